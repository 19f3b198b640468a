import fcntl
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from c2.sandbox import cgroups
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.command import find_bwrap


def lacking() -> str | None:
    """What the machine lacks for sandboxes; found out without the code under test."""
    if missing := cgroups.find().missing():
        return f"no control group for {', '.join(missing)} can be made"
    options = ("--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/")
    bare = [find_bwrap(), *options, "--proc", "/proc", "/bin/true"]
    run = subprocess.run(bare, capture_output=True, text=True)
    return f"namespaces do not work: {run.stderr.strip()}" if run.returncode else None


@pytest.fixture(scope="session")
def walls():
    """Skips tests that need sandboxes where there can be none."""
    if why := lacking():
        pytest.skip(why)


@pytest.fixture(scope="session")
def bwrap(request, walls):
    """The default backend, or the one that a test module asks for."""
    with getattr(request, "param", Bwrap)() as backend:
        yield backend


@pytest.fixture
def new_bwrap(bwrap):
    """A backend of the test's own, which it may break."""
    with type(bwrap)() as backend:
        yield backend


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The pytest that runs these tests, as a folder of packages."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        source = Path(importlib.util.find_spec(name).origin).parent
        shutil.copytree(source, folder / name)
    shutil.copy2(importlib.util.find_spec("py").origin, folder)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """One test at a time, over all xdist workers: many say how long something may take."""
    if Path(__file__).parent not in item.path.parents:  # pytest asks for tests of all folders
        return (yield)
    with open(Path(tempfile.gettempdir()) / "c2-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)
