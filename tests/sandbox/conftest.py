import subprocess
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
def bwrap():
    if why := lacking():
        pytest.skip(why)
    with Bwrap() as backend:
        yield backend


@pytest.fixture
def new_bwrap(bwrap):
    """A backend of the test's own, which it may break."""
    with Bwrap() as backend:
        yield backend


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Under xdist one worker runs all tests of sandboxes: some look for what others would hold."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("sandbox"))
