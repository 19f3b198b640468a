"""The recipe as a process of its own, killed again and again, then compared with one left alone."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.models import YarnConfig
from c2.training.checkpoint import Checkpoints
from c2.training.metrics import read_rows
from c2.training.objective import MTPConfig
from c2.training.pretrain import make_optimizer
from c2.training.state import init_state
from experiments import recipe
from launch import jax_setup

ROOT = Path(jax_setup.__file__).parent.parent
KILLS = 20


class Victim:
    """A run in a process that can be watched and killed.

    Args:
      config: a config.json.
      directory: gets the workdir, the compilation cache and what the process prints.
    """

    def __init__(self, config: Path, directory: Path):
        self.workdir = directory / "run"
        self.printed = directory / "stdout.txt"
        self.errors = directory / "stderr.txt"
        self.began = time.time()
        command = (sys.executable, "-m", "launch.main", f"--config={config}")
        with self.printed.open("wb") as stdout, self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, f"--workdir={self.workdir}"],
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env={
                    **os.environ,
                    "C2_CACHE_DIR": str(directory / "cache"),
                    "JAX_NUM_CPU_DEVICES": "2",
                },
            )

    def wait_until(self, condition) -> None:
        while self.process.poll() is None and not condition():
            time.sleep(0.0005)

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -9, f"ended before it was killed: {self.errors.read_text()}"

    def finish(self) -> None:
        assert self.process.wait() == 0, self.errors.read_text()

    @property
    def lines(self) -> int:
        path = self.workdir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def has_begun(self) -> bool:
        """Whether it has got as far as compiling its first step."""
        return "compiling" in self.printed.read_text()

    def saves(self) -> list[Path]:
        """Folders of checkpoints that this process has begun but not completed."""
        folders = self.workdir.glob("checkpoints/*")
        incomplete = [folder for folder in folders if not (folder / "manifest.json").exists()]
        return [folder for folder in incomplete if modified(folder) > self.began]

    def doing(self) -> str:
        """What it was at when it was killed, as the files tell."""
        if not self.has_begun():
            return "starting"
        return "saving" if self.saves() else "training"


def while_starting(run: Victim, chance: random.Random) -> None:
    """Imports, reading the corpus, training the tokenizer, initial values."""
    time.sleep(chance.uniform(0.0, 8.0))


def while_compiling(run: Victim, chance: random.Random) -> None:
    run.wait_until(run.has_begun)
    time.sleep(chance.uniform(0.0, 4.0))


def while_stepping(run: Victim, chance: random.Random) -> None:
    run.wait_until(run.has_begun)
    before = run.lines + chance.randint(0, 7)
    run.wait_until(lambda: run.lines > before)
    time.sleep(chance.uniform(0.0, 0.02))


def while_saving(run: Victim, chance: random.Random) -> None:
    run.wait_until(run.has_begun)  # before, it deletes what the last kill left behind
    for _ in range(chance.randint(1, 3)):
        run.wait_until(lambda: not run.saves())
        run.wait_until(run.saves)
    time.sleep(chance.uniform(0.0, 0.05))


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # renamed since it was listed
        return 0.0


def final_parameters(workdir: Path, config: recipe.Config, steps: int) -> list[np.ndarray]:
    optimizer = make_optimizer(config.optimizer, config.phases, config.model)
    shapes = jax.eval_shape(lambda key: init_state(key, config.model, optimizer), jax.random.key(0))
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    checkpoints = Checkpoints(workdir / "checkpoints")
    assert checkpoints.latest() == steps
    return [np.asarray(leaf) for leaf in jax.tree.leaves(checkpoints.restore(steps, empty))]


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_as_one_left_alone(tiny_recipe, save_config, tmp_path):
    main, distillation, tuning = tiny_recipe.phases
    yarn = YarnConfig(factor=4.0, original_context=32)
    phases = (
        replace(main, steps=16, context=32),
        replace(distillation, steps=24),
        replace(tuning, steps=40, yarn=yarn, mtp=MTPConfig(joint_weight=0.1, into_trunk=True)),
    )
    loop = replace(tiny_recipe.loop, eval_every=50, checkpoint_every=2)
    config = replace(tiny_recipe, phases=phases, loop=loop)
    saved = save_config(config, tmp_path / "config.json")
    directories = [tmp_path / name for name in ("alone", "killed")]
    for directory in directories:
        directory.mkdir()

    chance = random.Random(KILLS)
    hits: Counter[str] = Counter()
    moments = (while_starting, while_compiling, while_stepping, while_saving)
    for kill in range(KILLS):
        run = Victim(saved, directories[1])
        moments[kill % len(moments)](run, chance)
        run.kill()
        hits[run.doing()] += 1
    last = Victim(saved, directories[1])
    last.finish()
    Victim(saved, directories[0]).finish()

    assert set(hits) == {"starting", "training", "saving"}
    alone, killed = (directory / "run" for directory in directories)
    steps = sum(phase.steps for phase in phases)
    leaves = [final_parameters(workdir, config, steps) for workdir in (alone, killed)]
    for one, other in zip(*leaves, strict=True):
        assert one.tobytes() == other.tobytes()
    # Loss and expert load are functions of a step's documents and parameters, bit for bit.
    rows = [
        [row | {"tokens_per_second": None} for row in read_rows(workdir / "metrics.jsonl")]
        for workdir in (alone, killed)
    ]
    assert [row["step"] for row in rows[0]] == list(range(steps + 1))
    assert rows[0] == rows[1]
    assert not list(killed.glob("checkpoints/*tmp*"))
    assert (killed / "report.md").exists()
