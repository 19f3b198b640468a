"""Rollouts that are cut off in every way, and owners that are killed, leave nothing behind."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from c2.sandbox import cgroups
from c2.sandbox.node import PREFIX, sweep
from c2.sandbox.pool.log import Log, read

# A scripted agent, many times, on a pool of two nodes. Each line that it prints is a rollout done.
OWNER = """
import os, random, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from c2.sandbox.pool import Limits, Pool, PoolConfig
from c2.sandbox.protocol import Resources, SandboxError, Spec

log, seed, first, last = sys.argv[1], *map(int, sys.argv[2:])
busy = "sleep 99 & setsid sleep 99 & trap '' TERM; head -c 100k /dev/urandom > f; sleep 99"
spec = Spec(resources=Resources(memory_mb=64, disk_mb=16, pids=48), ttl_s=1.0, deadline_s=30.0)
limits = Limits(reserve_mb=64, cpu_pressure=100, memory_pressure=100)

def below(pid):
    try:
        inner = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(pid) for pid in inner] + [other for pid in inner for other in below(pid)]

def rollout(number):
    rng = random.Random(seed + number)
    try:
        handle = pool.create(spec, owner=f"worker-{number % 4}", key=str(number))
        pool.write(handle, "/repo/file", b"x" * 1000)
        if number % 2:
            pool.start(handle, ["sh", "-c", busy])
        pool.exec(handle, ["sh", "-c", "echo hello > out; cat file"])
        what = rng.choices(
            ["finish", "time out", "fork", "forget", "race", "kill", "kill node"],
            [4, 2, 2, 2, 1, 3, 0.5],
        )[0]
        node = pool._engine.at(handle).member.backend.pid
        if what == "time out":
            pool.exec(handle, ["sh", "-c", busy], timeout_s=0.05)
        elif what == "fork":
            pool.exec(pool.fork(handle)[0], ["cat", "out"])  # nobody closes the fork
        elif what == "forget":
            return
        elif what == "race":
            threading.Timer(0.02, pool.close, [handle]).start()
            pool.exec(handle, ["sleep", "9"])
        elif what == "kill":  # any process of the node, what makes sandboxes among them
            os.kill(rng.choice(below(node)), signal.SIGKILL)
        elif what == "kill node":
            os.kill(node, signal.SIGKILL)
        pool.close(handle)
    except (SandboxError, ProcessLookupError, IndexError):
        pass
    finally:
        print(number, flush=True)

with Pool(PoolConfig(nodes=2, backend="zygote", limits=limits, log=log)) as pool:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(rollout, range(first, last)))
"""


def processes() -> set[str]:
    """Nodes, what starts sandboxes, and everything inside them."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "c2.sandbox.node" in command or PREFIX in command:
                found.add(f"{path.name}: {command}")
            if PREFIX in (path / "cgroup").read_text():
                found.add(f"{path.name}: {command}")
    return found


def namespaces() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.update(os.readlink(link) for link in (path / "ns").iterdir())
    return found


def traces() -> dict[str, set]:
    """What sandboxes can leave on this machine, or in this process."""
    groups = {path for top in cgroups.find().folders() for path in top.glob(PREFIX + "*")}
    return {
        "processes": processes(),
        "namespaces": namespaces(),
        "mounts": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "groups": groups,
        "folders": set(Path(tempfile.gettempdir()).glob(PREFIX + "*")),
        "open files": set(os.listdir("/proc/self/fd")),
    }


def left(before: dict[str, set], seconds: float = 20.0) -> dict[str, set]:
    """What is there that was not before, once nothing is or it is clear that it stays."""
    end = time.monotonic() + seconds
    while True:
        more = {kind: found - before[kind] for kind, found in traces().items()}
        if not any(more.values()) or time.monotonic() > end:
            return {kind: found for kind, found in more.items() if found}
        time.sleep(0.1)


def run_owner(log: Path, seed: int, first: int, last: int, kill_at: int | None) -> int:
    """Runs rollouts until all are done or the owner is killed; returns how many were done."""
    command = [sys.executable, "-c", OWNER, log, seed, first, last]
    done = 0
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        for _ in process.stdout:
            done += 1
            if done == kill_at:
                process.kill()
                break
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL)
    return done


@pytest.mark.parametrize(
    "rollouts, kills", [(60, 1), pytest.param(2000, 20, marks=pytest.mark.slow)]
)
def test_rollouts_leave_nothing(bwrap, tmp_path, rollouts, kills):
    log = tmp_path / "log"
    before = traces()
    rng = random.Random(rollouts)
    stops = sorted(rng.sample(range(10, rollouts - 10), kills))
    done = 0
    for number, stop in enumerate([*stops, None]):
        kill_at = None if stop is None else max(1, stop - done)
        done += run_owner(log, number * 10_000, done, rollouts, kill_at)
        sweep()  # as every node does when it starts: a node may have been killed with its owner
        assert not left(before)
    assert done >= rollouts
    # Every sandbox that was ever asked for has ended, exactly once; those of killed owners were
    # written off by the next.
    book = read(log)
    assert not book.open and book.asked == book.ended.total() >= rollouts
    assert book.ended["lost"] >= kills
    seen = [book.ended[reason] > 0 for reason in ("lease", "exited")]  # chance decides in a few
    assert all(seen) if rollouts > 1000 else any(seen)
    Log(log, time.time()).close()
