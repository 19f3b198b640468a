"""SIGKILL of services and of the controller, in processes of this machine and in actors of Ray."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from c2.rl.journal import Journal
from c2.rl.simulated import Folder

SCRIPT = Path(__file__).with_name("controller_run.py")
ROOT = Path(__file__).parents[2]
SERVICES = (
    "controller", "training", "inference", "evaluation", "environments-0", "environments-1",
)  # fmt: skip


@contextmanager
def two_nodes():
    """A Ray cluster of two raylets; gives its address and a function that kills the second."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 2, "object_store_memory": 100_000_000}
    cluster = Cluster(True, head_node_args={**sizes, "include_dashboard": False})
    try:
        second = cluster.add_node(**sizes)
        yield cluster.address, lambda: cluster.remove_node(second)
    finally:
        cluster.shutdown()


def play(folder, kind, *, kills, staleness, environment=(), halfway=lambda: None):
    """Runs a training to its end through a number of kills; returns who was killed.

    Kills come at random moments, spread over the steps, and meet everyone about as often. After
    half of them, something else happens in between.
    """
    rng, killed, most = random.Random(kills), Counter(), -(-kills // len(SERVICES))
    (folder / "store").mkdir(parents=True)
    command = [sys.executable, SCRIPT, folder, kind, str(staleness)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **dict(environment)}
    with open(folder / "log", "ab") as log:
        while not (folder / "done").exists():
            (folder / "pids").unlink(missing_ok=True)
            run = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            while run.poll() is None:
                time.sleep(rng.uniform(0, 0.15))
                steps = len(list((folder / "store").glob("trained-*")))
                if killed.total() == kills or steps < 35 * killed.total() / kills:
                    continue
                with suppress(FileNotFoundError, ProcessLookupError):
                    pids = json.loads((folder / "pids").read_text())
                    if up := [name for name in sorted(pids) if killed[name] < most]:
                        name = rng.choice(up)
                        os.kill(pids[name], signal.SIGKILL)
                        killed[name] += 1
                        if killed.total() == kills // 2:
                            halfway()
            assert run.returncode in (0, -signal.SIGKILL), (folder / "log").read_text()
    return killed


def check(folder):
    """Every prompt was trained once and every evaluation made; returns the weights."""
    store = Folder(folder / "store")
    with Journal(folder / "journal") as journal:
        assert sorted(journal.evaluations) == [0, 10, 20, 30, 40]
        trained = [journal.prompts[group] for batch in journal.batches for group in batch]
    assert Counter(trained) == Counter(f"task-{i}" for i in range(80))
    by_step = {name: store[name] for name in store if name.startswith("trained-")}
    assert sorted(task for tasks in by_step.values() for task in tasks) == sorted(trained)
    return store["checkpoint"]


@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_processes_lose_and_double_nothing(tmp_path, staleness):
    killed = play(tmp_path / "killed", "local", kills=5, staleness=staleness)
    assert killed.total() == 5
    check(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_fifty_kills_in_lock_step_end_in_the_same_weights(tmp_path, kind):
    play(tmp_path / "whole", "local", kills=0, staleness=0)
    with two_nodes() if kind == "ray" else nullcontext(("", int)) as (address, kill_raylet):
        killed = play(
            tmp_path / "killed", kind, kills=50, staleness=0,
            environment={"RAY_ADDRESS": address}, halfway=kill_raylet,
        )  # fmt: skip
    assert killed.total() == 50 and killed.keys() == set(SERVICES)
    assert check(tmp_path / "killed") == check(tmp_path / "whole")
