"""A sandbox with files of every kind, for the tests of tools."""

import pytest

from c2.sandbox.protocol import Resources, Spec
from c2.sandbox.tools.environment import sandbox_tools
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import ToolsConfig

FILES = {
    "a.py": b"one\ntwo\ntwo\n",
    "lib/b.py": b"aaa\n",
    "lib/deep/c.txt": "é two ✓\n".encode(),
    "crlf.txt": b"a\r\nb\nc\r\n\rd\r\n",
    "bom.txt": b"\xef\xbb\xbfx = 1\n",
    "bytes.txt": b"caf\xe9 two\n",
    "binary": b"two\0two\n",
    "long.json": b"[" + b"1, " * 100_000 + b"two]",
    "many.txt": b"hit\n" * 400,
    ".hidden": b"two\n",
    ".git/two": b"two\n",
}


@pytest.fixture(scope="session")
def repo_files():
    """What is in the repository, path -> bytes."""
    return FILES


@pytest.fixture(scope="module")
def box(bwrap):
    handle = bwrap.create(Spec(resources=Resources(memory_mb=64, disk_mb=4, pids=48)))
    yield handle
    bwrap.close(handle)


@pytest.fixture
def place(bwrap, box):
    """The sandbox with exactly `FILES` in its repository, whatever a test before has done."""
    bwrap.exec(box, ["sh", "-c", "rm -rf /repo/* /repo/.[a-z]*"])
    for path, data in FILES.items():
        bwrap.write(box, f"/repo/{path}", data)
    return box


@pytest.fixture
def tools(bwrap, place):
    return sandbox_tools(bwrap, place, ToolsConfig())


@pytest.fixture(scope="session")
def said():
    """What a tool answers."""

    def said(tools, tool, /, **arguments) -> str:
        return tools(Call(tool, arguments)).text

    return said
