"""Commands that load before they get their input, and interpreters that are forked for them."""

import json
import subprocess
import sys
import time

import pytest

from c2.sandbox.bwrap import Bwrap
from c2.sandbox.pool import Limits, Pool, PoolConfig
from c2.sandbox.protocol import Resources, Spec, ToolError
from c2.sandbox.zygote import Zygote

SPEC = Spec(resources=Resources(memory_mb=64, disk_mb=16, pids=48), env={"A": "b"})
ISOLATED = ("-I", "-S", "-B", "-c")
both = pytest.mark.parametrize("bwrap", [Bwrap, Zygote], indirect=True)


@pytest.fixture
def box(bwrap):
    handle = bwrap.create(SPEC)
    yield handle
    bwrap.close(handle)


@both
def test_input_comes_later(bwrap, box):
    first, second = (bwrap.prepare(box, ["sh", "-c", "echo up > up; cat"]) for _ in range(2))
    while not bwrap.stat(box, "/repo/up").size:
        pass
    assert bwrap.exec(box, ["true"]).ok and bwrap.jobs(box) == [first, second]
    large = bytes(range(256)) * 1024  # more than a pipe holds, and than is kept of an output
    result = bwrap.finish(box, first, large[:200_000])
    assert result.ok and result.stdout == large[:200_000] and result.job == first
    assert bwrap.finish(box, second, b"").stdout == b""
    with pytest.raises(ToolError, match=f"no job {first}"):
        bwrap.finish(box, first, b"")
    running = bwrap.start(box, ["sleep", "60"])
    with pytest.raises(ToolError, match="does not wait"):
        bwrap.finish(box, running, b"")


@both
def test_commands_that_end_before_or_never(bwrap, box):
    early = bwrap.prepare(box, ["sh", "-c", "echo early; exit 3"])
    missing = bwrap.prepare(box, ["no-such-program"])
    killed = bwrap.prepare(box, ["sleep", "60"])
    while bwrap.jobs(box) != [killed]:
        pass
    result = bwrap.finish(box, early, b"unread")
    assert (result.stdout, result.code, result.killed) == (b"early\n", 3, None)
    assert "No such file" in bwrap.finish(box, missing, b"").error
    bwrap.kill(box, killed)
    assert bwrap.finish(box, killed, b"").killed == "asked"
    late = bwrap.prepare(box, ["sh", "-c", "cat; sleep 60"])
    time.sleep(0.3)  # the deadline counts from when it gets its input
    result = bwrap.finish(box, late, b"x", timeout_s=0.2)
    assert result.killed == "timeout" and result.stdout == b"x" and result.duration_s > 0.4
    assert bwrap.jobs(box) == [] and bwrap.exec(box, ["true"]).ok


FACTS = """
import json, os, signal, sys
import ctypes.util, encodings.cp1252, json.tool, xml.etree.ElementTree  # parts not loaded yet
status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
facts = {
    "path": sys.path, "argv": sys.argv, "env": dict(os.environ), "cwd": os.getcwd(),
    "flags": [sys.flags.isolated, sys.flags.no_site, sys.dont_write_bytecode],
    "program": os.path.realpath(sys.executable), "prefix": sys.prefix, "name": __name__,
    "signals": [str(signal.getsignal(n)) for n in range(1, 32) if n not in (9, 19)],
    "files": sorted(os.listdir("/proc/self/fd")), "user": [os.getuid(), status["CapBnd"]],
    "library": xml.etree.ElementTree.__file__, "limits": os.sysconf("SC_OPEN_MAX"),
    "session": os.getsid(0) == os.getpid(), "adjusted": open("/proc/self/oom_score_adj").read(),
    "input": sys.stdin.read(), "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
}
print(json.dumps(facts))
print("complaint", file=sys.stderr)
"""


@both
def test_a_forked_interpreter_is_as_good_as_a_new_one(bwrap, box):
    argv = ["python3", *ISOLATED, FACTS]
    new = bwrap.exec(box, argv, stdin=b"in")
    forked = bwrap.finish(box, bwrap.prepare(box, argv), b"in")
    assert forked.ok and forked.stderr == new.stderr == b"complaint\n"
    assert json.loads(forked.stdout) == json.loads(new.stdout)


@both
@pytest.mark.parametrize(
    ("program", "flags", "forked"),
    [
        ("python3", ISOLATED, True),
        ("/usr/bin/env", ("python3", *ISOLATED), False),  # another program
        ("python3", ("-S", "-I", "-B", "-c"), False),
        ("python3", ("-I", "-B", "-c"), False),
    ],
)
def test_only_what_means_a_new_one_like_it_is_forked(bwrap, box, program, flags, forked):
    source = "print(open('/proc/self/cmdline').read().split(chr(0))[-2:-1])"
    result = bwrap.finish(box, bwrap.prepare(box, [program, *flags, source]), b"")
    assert result.ok and (b"toolserver" in result.stdout) == forked


@both
@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('why')", 1),
        ("1 / 0", 1),
        ("def", 1),
        ("import os; os.close(1); print(1)", 120),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", None),
    ],
)
def test_it_ends_like_one(bwrap, box, source, code):
    argv = ["python3", *ISOLATED, source]
    new, forked = bwrap.exec(box, argv), bwrap.finish(box, bwrap.prepare(box, argv), b"")
    assert (forked.code, forked.signal) == (new.code, new.signal) and forked.code == code
    last = [result.stderr.splitlines()[-1:] for result in (new, forked)]
    assert last[0] == last[1]


SEARCH = """
import ctypes, os, sys
there, here = os.pipe()
child = os.fork()  # as the process that runs untrusted code
if not child:
    os.read(there, 1)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
    found = set()
    for line in open("/proc/self/maps"):
        span, rights = line.split()[:2]
        if rights.startswith("r") and "[v" not in line:
            start, end = (int(word, 16) for word in span.split("-"))
            with open("/proc/self/mem", "rb", 0) as memory:
                memory.seek(start)
                data = memory.read(end - start) or b""
            found |= {word for word in (b"se" + b"cret", b"ma" + b"rk") if word * 4 in data}
    os.write(1, repr(sorted(found)).encode())
    os._exit(0)
MARK = "markmarkmarkmark"
sys.stdin.read()
os.write(here, b"x")
os.waitpid(child, 0)
"""


@both
def test_what_is_forked_early_never_sees_the_input(bwrap, box):
    """The tests and the nonce of a grade are nowhere in the memory of the code under test."""
    job = bwrap.prepare(box, ["python3", *ISOLATED, SEARCH])
    result = bwrap.finish(box, job, b"secret" * 100)
    assert result.ok and result.stdout == b"[b'mark']", result


def test_a_pool_keeps_commands_prepared(bwrap):
    limits = Limits(reserve_mb=64, cpu_pressure=100, memory_pressure=100)
    command = ("python3", *ISOLATED, "import os, sys; print(os.getpid()); sys.stdin.read()")
    with Pool(PoolConfig(backend="zygote", limits=limits)) as pool:
        pool.keep_ready(SPEC, 1, command=command)
        end = time.monotonic() + 20
        while not pool.ready(SPEC) and time.monotonic() < end:
            time.sleep(0.02)
        handle = pool.create(SPEC)
        (there,) = pool.jobs(handle)
        other = pool.prepare(handle, ["cat"])  # another one: that there is ended
        assert other != there and pool.finish(handle, other, b"x").stdout == b"x"
        assert pool.finish(handle, there, b"").killed == "asked"
        while not pool.ready(SPEC) and time.monotonic() < end:
            time.sleep(0.02)
        handle = pool.create(SPEC)
        (there,) = pool.jobs(handle)
        assert pool.prepare(handle, command) == there
        assert pool.prepare(handle, command) != there  # it is given once
        assert pool.finish(handle, there, b"").ok


CLOSES = """
import os, sys
from c2.sandbox.toolserver import processes
if sys.argv[1] == "before Linux 5.9":
    processes._close_range = lambda low, high: -1
for fd in (3, 7, 8, 200):
    os.dup2(1, fd)
processes.close_all_but([7, 0, 1, 2])
open_ = []
for fd in range(256):
    try:
        os.fstat(fd)
    except OSError:
        continue
    open_.append(fd)
print(open_)
"""


@pytest.mark.parametrize("kernel", ["new", "before Linux 5.9"])
def test_descriptors_are_closed(kernel):
    command = [sys.executable, "-c", CLOSES, kernel]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[0, 1, 2, 7]\n"
