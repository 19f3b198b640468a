"""gVisor: the walls of another kernel, and running sandboxes that are saved and copied."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from c2.sandbox import battery, cgroups
from c2.sandbox.egress.policy import Policy
from c2.sandbox.gvisor import GVisor
from c2.sandbox.gvisor_runsc import find_runsc
from c2.sandbox.pool import Pool, PoolConfig
from c2.sandbox.protocol import (
    CAPABILITIES,
    Resources,
    SandboxError,
    SandboxLost,
    Spec,
    SupportsMemorySnapshot,
    Unsupported,
)

SMALL = Resources(memory_mb=128, disk_mb=16, pids=32)


@pytest.fixture(scope="module")
def gvisor():
    if why := lacking():
        pytest.skip(why)
    with GVisor() as backend:  # the battery finds no hole, or this raises
        yield backend


def lacking() -> str | None:
    try:
        find_runsc()
    except SandboxError as error:
        return str(error)
    if os.getuid():
        return "gVisor needs root"
    missing = cgroups.find().missing()
    return f"no control group for {', '.join(missing)} can be made" if missing else None


@contextlib.contextmanager
def sandbox(backend, **fields):
    handle = backend.create(Spec(resources=SMALL, **fields))
    try:
        yield handle
    finally:
        backend.close(handle)


@pytest.fixture(scope="module")
def box(gvisor):
    with sandbox(gvisor, env={"GREETING": "hello"}) as handle:
        yield handle


def shell(backend, handle, script, **options):
    return backend.exec(handle, ["sh", "-c", script], **options)


def until(backend, handle, script):
    while shell(backend, handle, script).code:
        time.sleep(0.02)


def test_calls(gvisor, box):
    result = shell(gvisor, box, "echo $GREETING; pwd; id -u; uname -r; echo bad >&2; exit 3")
    assert result.stdout.decode().split() == ["hello", "/repo", "1000", "4.4.0"]  # not this kernel
    assert (result.stderr, result.code) == (b"bad\n", 3)
    data = os.urandom(700_000)  # more than one frame
    gvisor.write(box, "/tmp/deep/file", data, mode=0o755)
    assert gvisor.read(box, "/tmp/deep/file") == data
    assert gvisor.exec(box, ["sha256sum"], stdin=data[:1000]).ok
    assert list(gvisor.list_dir(box, "/tmp/deep")) == ["file"]
    script = "setsid sleep 991 & trap '' TERM; sleep 992"
    assert shell(gvisor, box, script, timeout_s=0.5).timed_out
    assert b"sleep 99" not in shell(gvisor, box, "cat /proc/*/cmdline | tr '\\0' ' '").stdout
    assert shell(gvisor, box, "kill -TERM 1; echo alive").stdout == b"alive\n"
    assert gvisor.status(box).alive and 0 < gvisor.status(box).memory < 1 << 28
    for name, calls in CAPABILITIES.items():
        if name != "network_policy":  # `Bwrap` declares that one only when it has a gate
            assert isinstance(gvisor, calls) == (name in gvisor.capabilities)
    assert isinstance(gvisor, SupportsMemorySnapshot)


def test_what_it_cannot_do_is_refused(gvisor):
    with pytest.raises(Unsupported, match="no 'network_policy'"):
        gvisor.create(Spec(network=Policy()))
    with pytest.raises(SandboxError, match="there is no checkpoint '9'"):
        gvisor.restore("9")


def test_limits(gvisor):
    with sandbox(gvisor) as handle:
        for folder in ("/repo", "/tmp", "/dev/shm"):
            full = shell(gvisor, handle, f"head -c 64M /dev/zero > {folder}/big; rm {folder}/big")
            assert b"No space left" in full.stderr, folder
        bomb = "i=0; while [ $i -lt 40 ]; do sleep 60 & i=$((i+1)); done; echo all"
        assert b"all" not in shell(gvisor, handle, bomb).stdout
        for number in gvisor.jobs(handle):
            gvisor.kill(handle, number)
        while gvisor.jobs(handle):
            time.sleep(0.02)
        assert shell(gvisor, handle, "echo alive").stdout == b"alive\n"
        with pytest.raises(SandboxLost) as lost:  # the price of a kernel among the processes
            gvisor.exec(handle, ["python3", "-c", "x = b'x' * (1 << 30)"])
        assert lost.value.reason == "exited" and not gvisor.status(handle).alive


def test_files_are_forked_both_ways(gvisor, tmp_path):
    (tmp_path / "keep").write_text("keep")
    layer = gvisor.add_layer(str(tmp_path))
    with sandbox(gvisor, layers=(layer,)) as parent:
        shell(gvisor, parent, "echo changed > keep; echo t > /tmp/t")
        fork = gvisor.fork(parent)[0]
        shell(gvisor, parent, "echo parent > keep")
        assert shell(gvisor, fork, "cat keep /tmp/t; rm keep").stdout == b"changed\nt\n"
        assert gvisor.read(parent, "/repo/keep") == b"parent\n"
        gvisor.close(fork)
    gvisor.drop_layer(layer)
    assert (tmp_path / "keep").read_text() == "keep"


# Counts in memory and in a file, and draws random numbers in every way.
COUNTER = """
import os, random, ssl, sys, time, uuid
sys.path.append("/run/c2")
from toolserver.reseed import reseed_when_copied
plain = random.Random(7)  # nobody reseeds this one
random.seed(7)
reseed_when_copied()
log, number = open("/repo/log", "w"), 0
while True:
    number += 1
    drawn = (random.random(), ssl.RAND_bytes(8).hex(), os.urandom(8).hex(), uuid.uuid4().hex)
    log.write(f"{number} {log.tell()} {plain.random()} {drawn}\\n")
    log.flush()
    time.sleep(0.01)
"""


def log_of(backend, handle) -> list[list[str]]:
    lines = shell(backend, handle, "cat log", max_output=1 << 18).stdout.decode().splitlines()
    return [line.split(maxsplit=3) for line in lines]


def test_running_sandbox_goes_on_in_four_copies(gvisor):
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(sandbox(gvisor, env={"A": "b"}))
        number = gvisor.start(parent, ["python3", "-c", COUNTER])
        until(gvisor, parent, "test $(cat log | wc -l) -gt 20")
        checkpoint = gvisor.checkpoint(parent)
        copies = [gvisor.restore(checkpoint) for _ in range(4)]
        for copy in copies:
            stack.callback(gvisor.close, copy)
        gvisor.drop_checkpoint(checkpoint)
        boxes = [parent, *copies]
        assert len({handle.id for handle in boxes}) == 5
        for i, handle in enumerate(boxes):
            shell(gvisor, handle, f"echo {i} > mine; echo $A >> mine; rm -f later; touch later")
            assert gvisor.jobs(handle) == [number]
            until(gvisor, handle, "test $(cat log | wc -l) -gt 200")
        logs = [log_of(gvisor, handle) for handle in boxes]
        # All went on from one moment, in step with their files, and lost or repeated nothing.
        for lines in logs:
            assert [int(line[0]) for line in lines] == list(range(1, len(lines) + 1))
            assert int(lines[100][1]) == sum(len(" ".join(line)) + 1 for line in lines[:100])
        common = 0
        while all(lines[common] == logs[0][common] for lines in logs):
            common += 1
        assert 20 < common < 190
        # A generator that nobody seeds anew goes on alike; all others went their own ways.
        at = common + 5
        assert len({lines[at][2] for lines in logs}) == 1
        drawn = [eval(lines[at][3]) for lines in logs]
        for values in zip(*drawn, strict=True):
            assert len(set(values)) == 5
        for i, handle in enumerate(boxes):
            assert gvisor.read(handle, "/repo/mine") == b"%d\nb\n" % i
        # A copy is a sandbox like others: it can be ended, forked and saved again.
        gvisor.close(parent)
        again = gvisor.restore(gvisor.checkpoint(copies[0]))
        stack.callback(gvisor.close, again)
        assert gvisor.read(again, "/repo/mine") == b"1\nb\n" and gvisor.jobs(again) == [number]
        gvisor.kill(again, number)
        assert gvisor.jobs(copies[0]) == [number]


def test_what_cannot_be_saved_is_refused(gvisor):
    with sandbox(gvisor) as handle:
        script = "exec 3>file; rm file; touch up; while true; do echo >&3; sleep 0.05; done"
        number = gvisor.start(handle, ["sh", "-c", script])
        until(gvisor, handle, "test -e up")
        with pytest.raises(SandboxError, match="deleted and invalidated") as refused:
            gvisor.checkpoint(handle)
        assert len(str(refused.value)) < 400
        assert gvisor.jobs(handle) == [number]  # it goes on
        assert shell(gvisor, handle, "echo alive").stdout == b"alive\n"
        gvisor.kill(handle, number)
        while gvisor.jobs(handle):
            time.sleep(0.02)
        gvisor.close(gvisor.restore(gvisor.checkpoint(handle)))


def test_calls_in_flight_belong_to_the_original(gvisor):
    with sandbox(gvisor) as parent:
        found = []
        script = "touch up; while ! test -e go; do sleep 0.05; done; echo done"
        thread = threading.Thread(target=lambda: found.append(shell(gvisor, parent, script)))
        thread.start()
        while not gvisor._client(parent)._last:  # so that its call is the first
            time.sleep(0.01)
        until(gvisor, parent, "test -e up")
        copy = gvisor.restore(gvisor.checkpoint(parent))
        try:
            gvisor.write(parent, "/repo/go", b"")
            thread.join()
            assert found[0].stdout == b"done\n"
            # The first call of another client, which must not get the answer to that of the first.
            assert shell(gvisor, copy, "touch go; sleep 1; echo mine").stdout == b"mine\n"
            ended = gvisor.job(copy, found[0].job)
            assert ended.stdout == b"done\n" and ended.ok
        finally:
            gvisor.close(copy)


def traces(name: str) -> list[str]:
    """What is there of a node of this name: processes, mounts, folders and groups."""
    places = [Path("/tmp"), *cgroups.find().folders()]
    found = [str(path) for place in places for path in place.glob(f"{name}*")]
    found += [line for line in Path("/proc/self/mountinfo").read_text().split("\n") if name in line]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if name.encode() in path.read_bytes() else []
    return found


@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_nothing_is_left(gvisor, monkeypatch, end):
    monkeypatch.setattr(battery, "check", lambda *_: None)
    backend = GVisor()
    handle = backend.create(Spec(resources=SMALL))
    backend.start(handle, ["sleep", "1000"])
    backend.restore(backend.checkpoint(handle))
    (folder,) = Path("/tmp").glob(f"c2-sandbox-*-{backend.pid}")
    assert len(traces(folder.name)) > 6
    if end == "kill":
        os.kill(backend.pid, signal.SIGKILL)
    backend.shutdown()
    deadline = time.monotonic() + 10
    while traces(folder.name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert traces(folder.name) == []
    assert backend.status(handle).reason == "backend"


@pytest.mark.slow
def test_in_a_pool(gvisor):
    with Pool(PoolConfig(backend="gvisor", wait_s=60)) as pool:
        one = pool.create(Spec(resources=SMALL))
        shell(pool, one, "echo x > file")
        other = pool.fork(one)[0]
        assert shell(pool, other, "uname -r; cat file").stdout == b"4.4.0\nx\n"


NODE = """
from c2.sandbox import gvisor_bundle, gvisor_node, gvisor_runsc, node
original = gvisor_bundle.config
def changed(*args):
    settings = original(*args)
    {change}
    return settings
gvisor_runsc.config = changed
node.main(gvisor_node.Node)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "wall, change",
    [
        ("user", "settings['process']['user'] = {'uid': 0, 'gid': 0}"),
        ("seccomp", "del settings['linux']['seccomp']"),
        ("files", "del settings['mounts'][1]"),  # /sys
        ("devices", "del settings['mounts'][4]"),
        ("fork_bomb", "settings['process']['rlimits'] = []"),
    ],
)  # fmt: skip
def test_missing_wall_is_found(gvisor, monkeypatch, wall, change):
    monkeypatch.setattr("c2.sandbox.gvisor.NODE", ("-c", NODE.format(change=change)))
    with pytest.raises(SandboxError, match=f"walls are missing: .*{wall}: "):
        GVisor()


def test_without_runsc_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("c2.sandbox.gvisor_runsc.sys.executable", "/nowhere/python")
    with pytest.raises(SandboxError, match=r"^there is no runsc; Debian 13"):
        find_runsc()
