"""Whatever ends, and however, nothing stays behind of the nodes that a test has started.

Others may run on the machine meanwhile; the name of whatever a node makes ends with its process id.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from c2.sandbox import cgroups, linux
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.node import HOST_ID, PREFIX, sweep
from c2.sandbox.protocol import Resources, SandboxError, SandboxLost, Spec
from c2.sandbox.zygote import Zygote

pytestmark = pytest.mark.parametrize("bwrap", [Bwrap, Zygote], indirect=True)


def children(root: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == root and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found


def below(root: int) -> set[int]:
    found = children(root)
    return found.union(*(below(pid) for pid in found)) if found else found


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def groups(node: int) -> set[Path]:
    """Control groups of its sandboxes, that which the node has for all of them included."""
    return {path for top in cgroups.find().folders() for path in top.glob(f"{PREFIX}*-{node}/**/")}


def folders(node: int) -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{PREFIX}*-{node}"))


def inside(backend, handle) -> list[int]:
    """The processes of a sandbox, the first one in front."""
    name = f"{PREFIX}*-{backend.pid}/{handle.id}/cgroup.procs"
    file = next(file for top in cgroups.find().folders() for file in top.glob(name))
    return sorted(map(int, file.read_text().split()))


def traces(pid: int) -> dict[str, object]:
    """All that a node holds."""
    return {
        "processes": len(below(pid)),
        "mounts": len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()),
        "groups": groups(pid),
        "folders": folders(pid),
        "boxes": sorted(Path(f"/proc/{pid}/root/tmp").glob(PREFIX + "*/boxes/*")),
        "fds": fds(pid),
        "own fds": fds(os.getpid()),
        "own mounts": PREFIX in Path("/proc/self/mountinfo").read_text(),
    }


def until(true, seconds=20.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


BUSY = "sleep 99 & setsid sleep 99 & trap '' TERM; head -c 1M /dev/urandom > f; sleep 99"


def test_creates_and_kills_leave_nothing(new_bwrap):
    backend, node = new_bwrap, new_bwrap._node._process.pid
    before = traces(node)
    rng = random.Random(0)
    for number in range(24):
        handle = backend.create(Spec(resources=Resources(pids=64)))
        (first,) = inside(backend, handle)
        (bubblewrap,) = (pid for pid in children(node) if first in children(pid))
        if number % 2:
            backend.start(handle, ["sh", "-c", BUSY])
        match rng.randrange(5):
            case 0:  # its first process is killed from outside
                os.kill(first, signal.SIGKILL)
                with pytest.raises(SandboxLost) as lost:
                    backend.exec(handle, ["true"])
                assert lost.value.reason == "exited"
            case 1:  # a call is cut off
                backend.exec(handle, ["sh", "-c", BUSY], timeout_s=0.05)
            case 2:
                backend.close(backend.fork(handle)[0])
            case 3:  # so is what started it
                os.kill(bubblewrap if type(backend) is Bwrap else first, signal.SIGKILL)
        backend.close(handle)
    assert until(lambda: traces(node) == before, 3), (before, traces(node))


def test_failed_creates_leave_nothing(new_bwrap):
    node = new_bwrap._node._process.pid
    before = traces(node)
    for _ in range(3):
        with pytest.raises(SandboxError, match="there is no"):
            new_bwrap.create(Spec(layers=("none",)))
    assert traces(node) == before


OWNER = """
import os, sys
from c2.sandbox.{module} import {name}
from c2.sandbox.protocol import Spec
backend = {name}()
for number in range(50):
    handle = backend.create(Spec())
    if number % 10 == 0:
        backend.start(handle, ["sh", "-c", {busy!r}])
print(backend._node._process.pid, flush=True)
sys.stdin.read()
os.kill({victim}, 9)
{after}
"""


def owner(backend, victim: str, after: str = "") -> tuple[subprocess.Popen, int]:
    name = type(backend).__name__
    code = OWNER.format(busy=BUSY, victim=victim, after=after, name=name, module=backend.name)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return process, int(process.stdout.readline())


def test_killed_owner_leaves_nothing(bwrap):
    process, node = owner(bwrap, "os.getpid()")
    there = below(node)
    assert len(there) >= 45 + 5 * 6 and len(groups(node)) > 50 and folders(node)
    started = [(pid, linux.start_time(pid)) for pid in (node, *there)]
    process.communicate("")
    assert process.returncode == -signal.SIGKILL
    assert until(lambda: not any(when and linux.start_time(pid) == when for pid, when in started))
    assert until(lambda: not groups(node) and not folders(node))


def test_killed_node_leaves_nothing(bwrap):
    after = """
try:
    while True: backend.create(Spec())
except Exception as error:
    print(type(error).__name__, error.reason)
backend.shutdown()
"""
    process, node = owner(bwrap, "backend._node._process.pid", after)
    there = below(node)
    assert len(groups(node)) > 50 and folders(node)
    started = [(pid, linux.start_time(pid)) for pid in (node, *there)]
    said, _ = process.communicate("")
    assert said.split() == ["SandboxLost", "backend"] and process.returncode == 0
    assert until(lambda: not any(when and linux.start_time(pid) == when for pid, when in started))
    assert until(lambda: not groups(node) and not folders(node))


def test_sweep_ends_what_a_killed_node_had_stopped(bwrap):
    node, stopped = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    name = f"{PREFIX}{linux.start_time(node.pid)}-{node.pid}"
    group = cgroups.create(cgroups.find().below(name), "7", cgroups.Limits(1 << 26, 16, 1.0))
    group.attach(stopped.pid)
    group.freeze(True)
    assert until(group.is_frozen)
    for process in (stopped, node):
        process.kill()
    node.wait()
    sweep()
    assert stopped.wait(10) == -9 and until(lambda: not groups(node.pid))


def test_sweep_after_both_were_killed(bwrap):
    """Empty folders of a dead node go at the next start; those of a live one stay."""
    dead = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = f"{PREFIX}{linux.start_time(dead.pid)}-{dead.pid}"
    trees = cgroups.find().below(name)
    cgroups.create(trees, "7", cgroups.Limits(1 << 26, 16, 1.0))
    Path(tempfile.gettempdir(), name).mkdir()
    there = groups(dead.pid), folders(dead.pid)
    alive = bwrap.pid
    running = groups(alive), folders(alive)
    assert all(there) and all(running)
    sweep()
    assert (groups(dead.pid), folders(dead.pid)) == there
    dead.kill()
    dead.wait()
    sweep()
    assert not groups(dead.pid) and not folders(dead.pid)
    assert (groups(alive), folders(alive)) == running


def test_processes_are_nobody_outside(bwrap):
    """Were a wall to fall, what is behind it would still be an ordinary user of the machine."""
    handle = bwrap.create(Spec())
    bwrap.start(handle, ["sleep", "60"])
    assert until(lambda: len(inside(bwrap, handle)) >= 3)
    for pid in inside(bwrap, handle):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        user = HOST_ID if os.getuid() == 0 else os.getuid()
        assert fields["Uid"].split() == [str(user)] * 4
        assert not int(fields["CapPrm"], 16) and not int(fields["CapBnd"], 16)
        if os.getuid() == 0:
            assert fields["Gid"].split() == [str(user)] * 4 and not fields["Groups"].split()
    bwrap.close(handle)
