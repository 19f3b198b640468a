"""The walls and limits of a sandbox, seen from inside and from outside."""

import contextlib
import os
import signal
import threading
import time

import pytest

from c2.config import ConfigError
from c2.sandbox import cgroups
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.node import PREFIX
from c2.sandbox.protocol import (
    CAPABILITIES,
    Chunk,
    ExecResult,
    Resources,
    SandboxError,
    SandboxLost,
    Spec,
    ToolError,
    Unsupported,
    require,
)
from c2.sandbox.zygote import Zygote

pytestmark = pytest.mark.parametrize("bwrap", [Bwrap, Zygote], indirect=True)
SMALL = Resources(memory_mb=64, disk_mb=16, pids=48)


@contextlib.contextmanager
def sandbox(backend, **fields):
    handle = backend.create(Spec(**fields))
    try:
        yield handle
    finally:
        backend.close(handle)


@pytest.fixture(scope="module")
def box(bwrap):
    with sandbox(bwrap, resources=SMALL, env={"GREETING": "hello"}) as handle:
        yield handle


def shell(backend, handle, script, **options) -> ExecResult:
    return backend.exec(handle, ["sh", "-c", script], **options)


def names(backend, handle) -> str:
    """The command lines of all processes inside, the tool server and its forks left out."""
    listed = shell(backend, handle, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout.decode()
    return listed.replace("cat /proc", "")


def test_exec(bwrap, box):
    result = shell(
        bwrap, box, "echo $GREETING $X; pwd; id -u; echo bad >&2; exit 3", env={"X": "1"}
    )
    assert result.stdout == b"hello 1\n/repo\n1000\n" and result.stderr == b"bad\n"
    assert result.code == 3 and not result.ok and not result.left and result.error is None
    assert shell(bwrap, box, "kill -9 $$").signal == 9
    assert "nothing-like-this" in bwrap.exec(box, ["nothing-like-this"]).error
    assert "nowhere" in shell(bwrap, box, "true", cwd="/nowhere").error


def test_binary_input_and_output(bwrap, box):
    data = os.urandom(100_000)
    result = bwrap.exec(box, ["cat"], stdin=data, max_output=1 << 17)
    assert result.stdout == data and not result.truncated
    # It ends without reading what it is given.
    assert bwrap.exec(box, ["true"], stdin=data).ok


def test_stream(bwrap, box):
    script = "printf a; sleep 0.1; printf b >&2; sleep 0.1; printf %0500d 0"
    *chunks, result = bwrap.stream(box, ["sh", "-c", script], max_output=256)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    out = b"".join(chunk.data for chunk in chunks if chunk.stream == "stdout")
    assert chunks[:2] == [Chunk("stdout", b"a"), Chunk("stderr", b"b")]
    assert out == b"a" + b"0" * 255  # the first 256 bytes
    assert result.truncated and len(result.stdout) <= 256 and result.ok


def test_timeout_kills_everything_and_says_so(bwrap, box):
    script = "setsid sleep 991 & (trap '' TERM; sleep 992) & trap '' TERM; sleep 993"
    result = shell(bwrap, box, script, timeout_s=0.3)
    assert result.timed_out and result.killed == "timeout" and not result.left
    assert "sleep" not in names(bwrap, box)


def test_sigterm_comes_first(bwrap, box):
    result = shell(bwrap, box, "trap 'echo bye; exit 7' TERM; sleep 60 & wait", timeout_s=0.3)
    assert (result.code, result.stdout, result.killed) == (7, b"bye\n", "timeout")


def test_background_process_does_not_hold_up_its_call(bwrap, box):
    result = shell(bwrap, box, "sleep 994 & echo hi", timeout_s=30)
    assert result.stdout == b"hi\n" and result.ok and result.left
    assert bwrap.jobs(box) == [result.job]
    bwrap.kill(box, result.job)
    while bwrap.jobs(box):
        time.sleep(0.01)
    assert "994" not in names(bwrap, box)


def test_jobs(bwrap, box):
    shell(bwrap, box, "mkfifo fifo")
    number = bwrap.start(box, ["sh", "-c", "echo one; read line <fifo; echo two"])
    assert bwrap.job(box, number) is None and number in bwrap.jobs(box)
    shell(bwrap, box, "echo >fifo", timeout_s=5)
    while (result := bwrap.job(box, number)) is None:
        time.sleep(0.01)
    assert result.stdout == b"one\ntwo\n" and result.ok
    with pytest.raises(ToolError, match="no job 999"):
        bwrap.kill(box, 999)


def test_zombies_are_reaped(bwrap, box):
    def there() -> list[str]:
        return [name for name in bwrap.list_dir(box, "/proc") if name.isdigit()]

    before = there()  # the server, and what a test before has left
    shell(bwrap, box, "i=0; while [ $i -lt 200 ]; do (sleep 0.01 &); i=$((i+1)); done")
    end = time.monotonic() + 20
    while there() != before and time.monotonic() < end:
        time.sleep(0.02)
    assert there() == before and "1" in before


def test_supervisor_can_be_killed_but_not_escaped(bwrap, box):
    result = shell(bwrap, box, "setsid sleep 995 & kill -9 $PPID; sleep 996")
    assert result.killed == "supervisor" and not result.ok
    assert "sleep" not in names(bwrap, box)
    assert shell(bwrap, box, "kill -9 1; kill -TERM 1; echo alive").stdout == b"alive\n"


def test_fork_bomb(bwrap):
    with sandbox(bwrap, resources=SMALL) as handle:
        bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        assert bwrap.exec(handle, ["python3", "-c", bomb], timeout_s=0.5).timed_out
        assert bwrap.jobs(handle) == []
        # One whose first process fails early, so that no deadline is left to end it.
        shell(bwrap, handle, "f() { f | f & }; f; f; f; f; f", timeout_s=5)
        for number in bwrap.jobs(handle):
            with contextlib.suppress(ToolError):  # it has ended meanwhile
                bwrap.kill(handle, number)
        while bwrap.jobs(handle):
            time.sleep(0.02)
        assert shell(bwrap, handle, "echo alive").stdout == b"alive\n"


def test_memory_hog_is_killed_and_the_server_is_not(bwrap):
    with sandbox(bwrap, resources=SMALL) as handle:
        many = "import os, time\nfor _ in 'abc': os.fork()\nx = b'x' * (20 << 20); time.sleep(60)"
        result = bwrap.exec(handle, ["python3", "-c", many], timeout_s=2)
        assert result.oom
        alone = bwrap.exec(handle, ["python3", "-c", "x = b'x' * (1 << 30)"])
        assert alone.oom and alone.signal == 9
        unnoticed = shell(bwrap, handle, "python3 -c 'x = b\"x\" * (1 << 30)'; true")
        assert unnoticed.oom and unnoticed.ok
        after = shell(bwrap, handle, "echo alive; exit 1")
        assert after.stdout == b"alive\n" and not after.oom


def test_disk_is_limited_and_comes_back(bwrap):
    with sandbox(bwrap, resources=SMALL) as handle:
        full = shell(bwrap, handle, "head -c 64M /dev/zero > big; echo $?; stat -c %s big")
        assert b"No space left" in full.stderr
        assert int(full.stdout.split()[-1]) <= 16 << 20
        with pytest.raises(ToolError, match="No space left"):
            bwrap.write(handle, "/repo/other", b"x" * (1 << 20))
        many = "rm big; i=0; while true >f$i; do i=$((i+1)); done 2>/dev/null; echo $i"
        assert int(shell(bwrap, handle, many).stdout) < 3000
        assert shell(bwrap, handle, "rm f*; echo x > small; cat small").stdout == b"x\n"


def test_flood_of_output_ends(bwrap, box):
    result = bwrap.exec(box, ["yes"], timeout_s=60, max_output=1000)
    assert result.killed == "output" and result.truncated and len(result.stdout) <= 1000
    assert result.stdout.startswith(b"y\ny\n") and result.stdout.endswith(b"\ny\n")


def test_calls_from_many_threads(bwrap, box):
    found = {}

    def work(i):
        found[i] = shell(bwrap, box, f"sleep 0.{4 - i}; echo {i}").stdout

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: b"%d\n" % i for i in range(4)}


def test_files(bwrap, box):
    data = os.urandom(1_300_000)  # more than one frame
    bwrap.write(box, "/repo/new/deep/file", data, mode=0o755)
    assert bwrap.read(box, "/repo/new/deep/file") == data
    assert bwrap.read(box, "/repo/new/deep/file", offset=1_299_990, limit=5) == data[-10:-5]
    bwrap.write(box, "/repo/new/deep/file", b"short")
    assert bwrap.read(box, "/repo/new/deep/file") == b"short"
    shell(bwrap, box, "cd new; ln -s deep link; mkfifo pipe; touch \"$(printf 'a\\377b')\"")
    listed = bwrap.list_dir(box, "/repo/new")
    kinds = {name: entry.kind for name, entry in listed.items()}
    assert kinds == {"deep": "folder", "link": "link", "pipe": "other", "a\udcffb": "file"}
    found = bwrap.stat(box, "/repo/new/deep/file")
    assert (found.kind, found.size, found.mode) == ("file", 5, 0o755)
    assert bwrap.stat(box, "/repo/none").kind is None


@pytest.mark.parametrize(
    "path, why",
    [
        ("/repo", "folder"),
        ("/repo/none", "No such"),
        ("/repo/p", "not a regular"),
        ("a\0b", "null"),
    ],
)
def test_unreadable_files(bwrap, box, path, why):
    shell(bwrap, box, "test -p p || mkfifo p")
    with pytest.raises(ToolError, match=why):
        bwrap.read(box, path)


def test_links_lead_nowhere(bwrap, box, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("canary")
    for target in (str(secret), f"/proc/self/root{secret}", f"../../../../{secret}", "/etc/shadow"):
        shell(bwrap, box, f"rm -f l; ln -s {target} l")
        with pytest.raises(ToolError, match="No such"):
            bwrap.read(box, "/repo/l")
        with contextlib.suppress(ToolError):
            bwrap.write(box, "/repo/l", b"overwritten")
    assert secret.read_text() == "canary"


def test_siblings_do_not_see_each_other(bwrap):
    plant = "echo s1bling > /repo/s; echo s1bling > /tmp/s; echo s1bling > /dev/shm/s"
    serve = (
        "import socket, time\n"
        "a = socket.create_server(('127.0.0.1', 7777))\n"
        "b = socket.socket(socket.AF_UNIX); b.bind('\\0c2-sibling'); b.listen()\n"
        "time.sleep(60)"
    )
    spy = (
        "import socket\n"
        "for f, a in ((socket.AF_INET, ('127.0.0.1', 7777)), (socket.AF_UNIX, '\\0c2-sibling')):\n"
        "    s = socket.socket(f)\n"
        "    print(s.connect_ex(a) == 0)\n"
    )
    with sandbox(bwrap) as one, sandbox(bwrap) as other:
        shell(bwrap, one, plant)
        bwrap.start(one, ["python3", "-c", serve])
        while shell(bwrap, one, "grep -q c2-sibling /proc/net/unix").code:
            time.sleep(0.02)
        assert bwrap.exec(one, ["python3", "-c", spy]).stdout == b"True\nTrue\n"
        assert bwrap.exec(other, ["python3", "-c", spy]).stdout == b"False\nFalse\n"
        found = shell(bwrap, other, "grep -rs s1bling /repo /tmp /dev/shm /home; true")
        assert found.stdout == b""
        assert "sleep" not in names(bwrap, other) and "7777" not in names(bwrap, other)
        shell(bwrap, other, "kill -9 -1")
        assert bwrap.read(one, "/repo/s") == b"s1bling\n"
        assert len(bwrap.jobs(one)) == 1


@pytest.mark.parametrize("limit, reason", [("deadline_s", "deadline"), ("ttl_s", "lease")])
def test_life_ends(bwrap, limit, reason):
    with sandbox(bwrap, **{limit: 0.4}) as handle:
        with pytest.raises(SandboxLost) as lost:
            bwrap.exec(handle, ["sleep", "60"])
        assert lost.value.reason == reason
        assert bwrap.status(handle).reason == reason


def test_lease_is_renewed(bwrap):
    with sandbox(bwrap, ttl_s=1.0) as handle:
        for _ in range(4):
            time.sleep(0.4)
            bwrap.renew(handle)
        status = bwrap.status(handle)
        assert status.alive and status.age_s > 1.5 and 0 < status.memory < 100 << 20


def test_closed(bwrap):
    handle = bwrap.create(Spec())
    assert bwrap.status(handle).alive
    bwrap.close(handle)
    bwrap.close(handle)
    assert bwrap.status(handle).reason == "closed"
    for call in (lambda: bwrap.exec(handle, ["true"]), lambda: bwrap.fork(handle)):
        with pytest.raises(SandboxLost) as lost:
            call()
        assert lost.value.reason == "closed"


def test_a_server_that_is_silent_is_lost_and_status_says_the_same(bwrap, monkeypatch):
    monkeypatch.setattr("c2.sandbox.served.GRACE_S", 0.1)
    with sandbox(bwrap) as handle:
        name = f"{PREFIX}*-{bwrap.pid}/{handle.id}/cgroup.procs"
        (first,) = {
            pid
            for top in cgroups.find().folders()
            for file in top.glob(name)
            for pid in file.read_text().split()
        }
        os.kill(int(first), signal.SIGSTOP)
        with pytest.raises(SandboxLost, match=r"ended \(exited\)") as lost:
            bwrap.exec(handle, ["true"], timeout_s=0.1)
        status = bwrap.status(handle)
        assert (lost.value.reason, status.reason, status.alive) == ("exited", "exited", False)


def test_bad_requests(bwrap, box):
    for field in (
        {"deadline_s": 0.0},
        {"ttl_s": float("inf")},
        {"network": "all"},
        {"env": {"=": ""}},
    ):
        with pytest.raises(ConfigError, match=next(iter(field))):
            Spec(**field)
    for field in ({"memory_mb": 1}, {"disk_mb": 0}, {"pids": 1}, {"cpus": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(field))):
            Resources(**field)
    for options in ({"timeout_s": 0}, {"max_output": 10}, {"max_output": 1 << 20}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            bwrap.exec(box, ["true"], **options)
    with pytest.raises(ConfigError, match="argv"):
        bwrap.exec(box, "true")
    with pytest.raises(SandboxError, match="there is no 'nothing'"):
        bwrap.create(Spec(layers=("nothing",)))
    with pytest.raises(Unsupported, match="no 'pause'; it has: fork, jobs, layers"):
        require(bwrap, "fork", "pause")
    assert require(bwrap, "fork") is bwrap
    for name, calls in CAPABILITIES.items():
        if name != "network_policy":  # it depends on settings
            assert isinstance(bwrap, calls) == (name in bwrap.capabilities)


def test_absurd_requests_cost_no_sandbox(bwrap, box):
    long = "x" * 900_000
    with pytest.raises(ToolError, match="too long"):
        bwrap.read(box, long)
    assert "too long" in bwrap.exec(box, [long]).error
    assert bwrap.exec(box, ["sh", "-c", "echo $#", *["x"] * 20_000]).ok
    assert bwrap.exec(box, ["true", "\0"]).error
    with pytest.raises(ToolError, match="stdin"):
        bwrap.exec(box, ["true"], stdin=b"x" * (1 << 20))
    assert shell(bwrap, box, "echo alive").stdout == b"alive\n"


def test_environment_of_the_owner_stays_outside(bwrap, box, monkeypatch):
    monkeypatch.setenv("C2_SECRET", "canary")
    found = bwrap.exec(box, ["cat", "/proc/self/environ"]).stdout.decode().split("\0")
    assert {line.split("=")[0] for line in found if line} == {"HOME", "PATH", "LANG", "GREETING"}
    assert bwrap.exec(box, ["cat", "/proc/1/environ"]).code == 1
