"""A run on several processes: the same curve as on one, and what happens if one of them is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from c2.config import ConfigError
from c2.data.config import DataConfig, Source
from c2.models import MLAConfig, MoEConfig
from c2.training.loop import LoopConfig
from c2.training.metrics import read_columns, read_rows
from experiments import recipe, registry
from launch import jax_setup, processes, run_dir
from launch.main import run_main
from launch.processes import Processes

ROOT = Path(jax_setup.__file__).parent.parent
TOLERANCE = 1e-5  # relative: sums over processes differ in rounding, chosen before any run
STUDY = '''
"""Does a linear model learn on any number of processes?"""
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
import jax, jax.numpy as jnp, numpy as np
from flax import struct
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from c2.config import runtime
from c2.data import store
from c2.data.packing import pack
from c2.data.pipeline import batches
from c2.training.checkpoint import Checkpoints
from c2.training.loop import LoopConfig, Phase, train
from c2.training.metrics import MetricsLog
from c2.training.progress import TrainingProgress
from experiments.study import Result

MULTI_PROCESS = True

@struct.dataclass
class State:
    step: jax.Array
    params: jax.Array

@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 12
    pause: float = runtime(0.0)

def get_config():
    return Config()

def run(config, run):
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*a)) for a in ((), ("rows",)))
    rng = np.random.default_rng(0)
    documents = [(rng.integers(1, 99, n).astype(np.uint16), 0, 0) for n in rng.integers(3, 9, 99)]
    rows = pack(store.from_documents(documents, np.uint16, "toy"), 8)
    mine = {"shard": jax.process_index(), "shards": jax.process_count()}
    dataset = batches(rows, batch=4, seed=0, **mine)

    @jax.jit
    def update(state, tokens):
        def loss_fn(w):
            return jnp.mean((jnp.sin(tokens) @ w - tokens.sum(1) / 99) ** 2)
        loss, gradient = jax.value_and_grad(loss_fn)(state.params)
        metrics = {"loss": loss, "tokens": tokens.size, "rows": jnp.sort(tokens.sum(1))}
        return State(state.step + 1, state.params - 0.05 * gradient), metrics

    def step_fn(state, batch):
        time.sleep(config.pause)
        return update(state, jax.make_array_from_process_local_data(split, batch["tokens"]))

    state = jax.device_put(State(jnp.int32(0), jnp.zeros(8)), everywhere)
    phase = Phase(
        name="all",
        steps=config.steps,
        step_fn=step_fn,
        make_batches=lambda: iter(dataset),
        evaluate=lambda state: {"norm": float(jnp.linalg.norm(state.params))},
    )
    with (
        Checkpoints(run.workdir / "checkpoints") as checkpoints,
        MetricsLog(run.workdir, mute=jax.process_index() > 0) as log,
    ):
        train(
            [phase],
            state,
            checkpoints=checkpoints,
            log=log,
            progress=TrainingProgress(run.console),
            config=LoopConfig(log_every=1, eval_every=4, checkpoint_every=4),
        )
    return Result(summary="Done.")
'''


class Launch:
    """A command in a process group of its own; what it prints goes to files.

    Args:
      folder: for the files and the compilation cache.
      words: flags of `launch.main`.
    """

    def __init__(self, folder: Path, *words: object, **environment: str):
        self.printed, self.errors = folder / "stdout.txt", folder / "stderr.txt"
        command = [sys.executable, "-m", "launch.main", *map(str, words)]
        cache = {"C2_CACHE_DIR": str(folder / "cache")}
        with self.printed.open("wb") as stdout, self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                cwd=ROOT,
                env=os.environ | cache | environment,
            )

    def children(self) -> list[int]:
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    def wait_for_line(self, workdir: Path, step: int) -> None:
        """Waits until the metrics of a step are on disk."""
        metrics = workdir / "metrics.jsonl"
        while not (metrics.exists() and any(row["step"] >= step for row in read_rows(metrics))):
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.02)

    def end(self, timeout: float = 300) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def last_checkpoint(workdir: Path) -> int:
    manifests = sorted(workdir.glob("checkpoints/*/manifest.json"))
    return json.loads(manifests[-1].read_text())["manifest"]["step"]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("study") / "linear.py"
    path.write_text(STUDY)
    return path


@pytest.fixture(scope="module")
def alone(study, tmp_path_factory) -> Path:
    """The run of one process that is left alone."""
    folder = tmp_path_factory.mktemp("alone")
    run = Launch(folder, f"--config={study}", f"--workdir={folder / 'run'}")
    assert run.end() == 0, run.errors.read_text()
    return folder / "run"


def assert_same_curve(workdir: Path, expected: Path, names: list[str], exact: list[str]) -> None:
    """Every step is there once, and close to the expected one; data are the same."""
    found, wanted = (read_columns(path / "metrics.jsonl") for path in (workdir, expected))
    assert found.keys() == wanted.keys()
    for name in (*names, *exact, "total_tokens"):
        assert found[name][0].tolist() == wanted[name][0].tolist(), name
        tolerance = TOLERANCE if name in names else 0
        np.testing.assert_allclose(found[name][1], wanted[name][1], rtol=tolerance, err_msg=name)


def test_two_processes_stopped_killed_and_resumed_end_as_one(study, alone, tmp_path):
    """One chain of starts, because every start takes seconds."""
    workdir = tmp_path / "run"
    words = [f"--config={study}", f"--workdir={workdir}", "--processes=2"]
    slowly = [*words, "--config.pause=0.1"]

    stopped = Launch(tmp_path, *slowly)
    stopped.wait_for_line(workdir, 1)
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.end() == 143, stopped.errors.read_text()
    at = last_checkpoint(workdir)
    assert f"SIGTERM: stopped after step {at} of 12" in stopped.printed.read_text()
    assert [row["step"] for row in read_rows(workdir / "metrics.jsonl")] == list(range(at + 1))
    assert 1 < at < 12

    killed = Launch(tmp_path, *slowly)
    killed.wait_for_line(workdir, at + 1)
    children = killed.children()
    assert len(children) == 2
    os.kill(children[1], signal.SIGKILL)
    began = time.monotonic()
    assert killed.end() == 1
    assert time.monotonic() - began < 30
    assert all(map(gone, children))
    (line,) = killed.errors.read_text().splitlines()
    assert line == (
        "error: process 1 was ended by SIGKILL, so all are stopped; to resume: "
        f"python -m launch.main {' '.join(slowly)}"
    )
    assert not (workdir / "result.json").exists()

    last = Launch(tmp_path, *words)
    assert last.end() == 0, last.errors.read_text()
    assert_same_curve(workdir, alone, names=["loss", "norm"], exact=["rows"])
    assert last.printed.read_text().count("report: ") == 1
    assert "2 x cpu" in json.loads((workdir / "result.json").read_text())["devices"]
    starts = json.loads((workdir / "overrides.json").read_text())["starts"]
    assert [start["command"][3:] for start in starts] == [slowly, slowly, words]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["1"], Processes()),
        (["4"], Processes(count=4)),
        (["4", 3, "host-0.jobs:80"], Processes(count=4, index=3, coordinator="host-0.jobs:80")),
        (["cluster"], Processes(count=None)),
    ],
)
def test_flags(flags, expected):
    assert processes.parse(*flags, *[None] * (3 - len(flags))) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["0", None, None], "--processes: '0' is not legal; legal: 1, 2, ... or cluster"),
        (["many", None, None], "--processes: 'many' is not legal"),
        (["2", 2, "h:1"], "--process_id: 2 is not legal; legal: 0 to 1"),
        (["2", 0, None], "--process_id, --coordinator: one without the other"),
        (["2", None, "h:1"], "--process_id, --coordinator: one without the other"),
        (["2", 0, "host"], "--coordinator: 'host' is not legal; legal: HOST:PORT"),
        (["cluster", 0, "h:1"], "--processes=cluster: jax finds --process_id and --coordinator"),
    ],
)
def test_flags_that_are_not_legal(flags, message):
    with pytest.raises(ConfigError) as caught:
        processes.parse(*flags)
    assert str(caught.value).startswith(message)


def test_a_study_for_one_process_is_refused_on_more(capsys, tmp_path):
    words = ["--config=kl_estimators", "--processes=2", f"--workdir={tmp_path / 'run'}"]
    joined = ["--process_id=0", "--coordinator=127.0.0.1:1"]
    assert run_main(["launch/main.py", *words, *joined]) == 2
    message = "error: --processes: kl_estimators:full runs on one process; legal: 1\n"
    assert capsys.readouterr().err == message
    assert run_main(["launch/main.py", *words]) == 2  # as the processes that it starts say
    assert capsys.readouterr().err == message
    assert not (tmp_path / "run").exists()


class Pair:
    """Two processes of a run that nothing watches, as on a cluster."""

    def __init__(self, folder: Path, study: Path, pause: float):
        self.workdir = folder / "run"
        port = processes.free_port()
        self.both = []
        for index in range(2):
            home = folder / str(index)
            home.mkdir(exist_ok=True)
            self.both.append(
                Launch(
                    home,
                    f"--config={study}",
                    f"--workdir={self.workdir}",
                    f"--config.pause={pause}",
                    "--processes=2",
                    f"--process_id={index}",
                    f"--coordinator=127.0.0.1:{port}",
                )
            )


@pytest.mark.slow
def test_processes_that_nothing_watches_stop_together_and_notice_a_loss(study, alone, tmp_path):
    stopped = Pair(tmp_path, study, pause=0.1)
    stopped.both[0].wait_for_line(stopped.workdir, 1)
    stopped.both[1].process.send_signal(signal.SIGINT)
    assert [one.end() for one in stopped.both] == [143, 130]
    at = last_checkpoint(stopped.workdir)
    assert f"stopped after step {at} of 12" in stopped.both[0].printed.read_text()

    for lost in (1, 0):
        seen = read_rows(stopped.workdir / "metrics.jsonl")[-1]["step"]
        left = Pair(tmp_path, study, pause=0.1)
        left.both[0].wait_for_line(left.workdir, seen + 1)
        left.both[lost].process.kill()
        began = time.monotonic()
        assert left.both[1 - lost].end() not in (0, None)
        assert time.monotonic() - began < 30
    assert "step" not in left.both[1].printed.read_text()  # what number 0 says
    last = Launch(tmp_path, f"--config={study}", f"--workdir={stopped.workdir}")  # on one process
    assert last.end() == 0, last.errors.read_text()
    assert_same_curve(stopped.workdir, alone, names=["loss", "norm"], exact=["rows"])


@pytest.mark.slow
def test_no_process_outlives_the_one_that_started_it(study, tmp_path):
    workdir = tmp_path / "run"
    words = [f"--config={study}", f"--workdir={workdir}", "--processes=2", "--config.pause=0.2"]
    run = Launch(tmp_path, *words)
    run.wait_for_line(workdir, 1)
    children = run.children()
    run.process.kill()
    run.process.wait()
    end = time.monotonic() + 10
    while not all(map(gone, children)) and time.monotonic() < end:
        time.sleep(0.02)
    assert all(map(gone, children))


@pytest.fixture(scope="module")
def recipe_json(tmp_path_factory) -> Path:
    """The first phase of the recipe, at a size of which nearly all time is compilation."""
    config = recipe.get_config("smoke")
    config = replace(
        config,
        model=replace(
            config.model,
            hidden=16,
            layers=2,
            dense_intermediate=32,
            attention=MLAConfig(heads=2, q_lora=8, kv_lora=8, nope=4, rope=4, v=4),
            moe=MoEConfig(experts=4, top_k=2, intermediate=16),
            mtp=0,
        ),
        data=DataConfig(sources=(Source(path="stdlib:email"),), held_out="json", vocab_size=512),
        packages=None,
        post_training=None,
        phases=(replace(config.phases[0], steps=12, context=64, batch=4),),
        evaluation=replace(config.evaluation, windows=(64,), batch=32),
        loop=LoopConfig(log_every=1, eval_every=4, checkpoint_every=2),
    )
    path = tmp_path_factory.mktemp("recipe") / "tiny.json"
    run_dir.write_json(path, run_dir.manifest(registry.load("recipe:smoke"), config))
    return path


@pytest.fixture(scope="module")
def recipe_alone(recipe_json, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe_alone")
    words = [f"--config={recipe_json}", f"--workdir={folder / 'run'}"]
    run = Launch(folder, *words, JAX_NUM_CPU_DEVICES="1")
    assert run.end(900) == 0, run.errors.read_text()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_the_recipe_on_several_processes_killed_and_resumed(
    recipe_json, recipe_alone, tmp_path, count
):
    workdir = tmp_path / "run"
    words = [f"--config={recipe_json}", f"--workdir={workdir}", f"--processes={count}"]
    killed = Launch(tmp_path, *words, JAX_NUM_CPU_DEVICES="1")
    while not any(workdir.glob("checkpoints/*/manifest.json")):
        assert killed.process.poll() is None, killed.errors.read_text()
        time.sleep(0.02)
    children = killed.children()
    os.kill(children[-1], signal.SIGKILL)
    began = time.monotonic()
    assert killed.end() == 1
    assert time.monotonic() - began < 30
    assert all(map(gone, children))
    assert f"process {count - 1} was ended by SIGKILL" in killed.errors.read_text()

    resumed = Launch(tmp_path, *words, JAX_NUM_CPU_DEVICES="1")
    assert resumed.end(900) == 0, resumed.errors.read_text()
    assert "resuming after step" in resumed.printed.read_text()
    held_out = [f"held_out_64/{name}" for name in ("nats", "nats_per_token", "bits_per_byte")]
    exact = ["tokens", "target_tokens"]
    assert_same_curve(workdir, recipe_alone, names=["loss", "grad_norm", *held_out], exact=exact)
    result = json.loads((workdir / "result.json").read_text())
    assert result["devices"] == f"{count} x cpu"
