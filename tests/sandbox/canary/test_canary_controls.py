"""Every attempt of the canary agent succeeds where the wall that stops it is missing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from c2.sandbox.command import find_bwrap
from c2.sandbox.plain import Plain
from c2.sandbox.protocol import Resources, Spec

LARGE = Resources(memory_mb=1024, disk_mb=300, pids=256)
UNKNOWN = 77  # of a script that finds out that this machine has nothing to try


@pytest.fixture(scope="module")
def plain():
    with pytest.warns(UserWarning, match="NO walls"), Plain() as backend:
        yield backend


def as_root(folder: Path) -> list[str]:
    """A place in which root may do everything, with copies of programs and settings."""
    command = [
        str(find_bwrap()),
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
    ]
    command += ["--cap-add", "ALL", "--die-with-parent", "--tmpfs", "/"]
    for path in ("/usr", "/etc"):
        command += ["--overlay-src", path, "--tmp-overlay", path]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib64", os.path.realpath(sys.base_prefix))):
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir() and not path.is_relative_to("/usr"):
            command += ["--ro-bind", str(path), str(path)]
    command += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/sys", "/sys", "--tmpfs", "/tmp"]
    for path in ("/repo", "/home", "/run", "/var"):
        command += ["--dir", path]
    command += ["--ro-bind", str(folder), str(folder), "--chdir", "/repo", "--clearenv"]
    path = f"{os.path.realpath(sys.base_prefix)}/bin:/usr/local/bin:/usr/bin:/bin"
    return [*command, "--setenv", "PATH", path, "--setenv", "HOME", "/tmp"]


def test_an_attempt_is_worth_making(bwrap, plain, host, attempt):
    command = attempt.at(host.places)
    if attempt.control == "root":
        if os.getuid():
            pytest.skip("only root can make a place in which it is root")
        script = f"PATH=$PATH:/usr/sbin\n{attempt.before}\n" % host.places + command
        before = host.state()
        run = subprocess.run(
            [*as_root(host.folder), "--", "sh", "-c", script], capture_output=True, timeout=60
        )
        assert host.state() == before
        if run.returncode == UNKNOWN:
            pytest.skip("this machine has nothing to try that with")
        output, well = run.stdout + run.stderr, run.returncode == 0
    else:
        backend, spec = (
            (plain, Spec()) if attempt.control == "open" else (bwrap, Spec(resources=LARGE))
        )
        handle = backend.create(spec)
        try:
            result = backend.exec(handle, ["sh", "-c", command], timeout_s=60)
        finally:
            backend.close(handle)
        output, well = result.stdout + result.stderr, result.ok
    assert host.got(output.decode(errors="replace"), well), output


def test_who_is_spoken_to_notices(plain, host, attempts):
    """Or that nobody was would show nothing."""
    host.heard.clear()
    handle = plain.create(Spec())
    for attempt in attempts:
        if attempt.what in ("a socket of the machine", "an abstract one", "a name server here"):
            plain.exec(handle, ["sh", "-c", attempt.at(host.places)])
    plain.close(handle)
    end = time.monotonic() + 10
    while len(host.heard) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    assert sorted(host.heard) == ["a connection", "a connection", "a datagram"]


def test_who_has_no_control_says_why(attempts):
    assert len({attempt.what for attempt in attempts}) == len(attempts) == 45
    for attempt in attempts:
        assert (attempt.control is None) == bool(attempt.why), attempt.what
    assert sum(attempt.control is None for attempt in attempts) == 5
