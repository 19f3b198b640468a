"""The tools on files against direct file operations."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c2.sandbox.tools.environment import sandbox_tools
from c2.sandbox.tools.files import MemoryFiles, file_tools
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import ToolResult, ToolsConfig, Toolset

LONG = b"[" + b"1, " * 100_000 + b"two]"  # long.json, which has no line end


def content(backend, box) -> dict[str, bytes]:
    paths = backend.exec(box, ["find", ".", "-type", "f", "-print0"]).stdout.decode().split("\0")
    return {path[2:]: backend.read(box, f"/repo/{path}") for path in filter(None, paths)}


def test_reading(tools, said):
    assert said(tools, "read_file", path="a.py") == "1|one\n2|two\n3|two"
    assert said(tools, "read_file", path="/repo/a.py", first=2, last=2) == "2|two"
    assert said(tools, "read_file", path="bytes.txt") == "1|caf\ufffd two"
    assert "no text" in said(tools, "read_file", path="binary")
    assert said(tools, "read_file", path="no.py").startswith("error: /repo/no.py: No such file")
    assert said(tools, "read_file", path="a.py", first=4).startswith("error: lines 4 to 3; a.py")
    assert "a folder" in said(tools, "read_file", path="lib")
    shown = said(tools, "read_file", path="/etc/passwd")  # of the sandbox, not of this machine
    assert shown.splitlines()[0] == "1|root:x:0:0::/root:/bin/sh"


def test_a_file_that_does_not_fit_is_read_in_pieces(bwrap, place, said):
    tools = sandbox_tools(bwrap, place, ToolsConfig(max_result=512))
    first, lines = 1, []
    while first:
        shown = said(tools, "read_file", path="many.txt", first=first)
        assert len(shown.encode()) <= 512
        *body, last = shown.split("\n")
        onwards = re.fullmatch(r"\[lines \d+ to \d+ of 400; go on at (\d+)\]", last)
        lines += body if onwards else [*body, last]
        first = onwards and int(onwards[1])
    assert lines == [f"{number}|hit" for number in range(1, 401)]
    assert len(said(tools, "read_file", path="long.json").encode()) <= 512


def test_listing(tools, said):
    there = ".git/ .hidden a.py binary bom.txt bytes.txt crlf.txt lib/ long.json many.txt"
    assert said(tools, "list_dir").split("\n") == there.split()
    assert said(tools, "list_dir", path="lib") == "b.py\ndeep/"
    assert said(tools, "list_dir", path="lib/x").startswith("error: /repo/lib/x: No such file")


@pytest.mark.parametrize(
    ("tool", "arguments", "after"),
    [
        ("write_file", {"path": "new/é.py", "text": "x✓\n"}, {"new/é.py": "x✓\n".encode()}),
        (
            "edit_file",
            {"path": "a.py", "old": "one\ntwo", "new": "1\n2"},
            {"a.py": b"1\n2\ntwo\n"},
        ),
        # Bytes around the edit stay as they are, and so does the kind of line end.
        (
            "edit_file",
            {"path": "crlf.txt", "old": "c\n", "new": "c\ne\n"},
            {"crlf.txt": b"a\r\nb\nc\r\ne\r\n\rd\r\n"},
        ),
        (
            "edit_file",
            {"path": "crlf.txt", "old": "a\r\nb", "new": "a\r\nB"},
            {"crlf.txt": b"a\r\nB\nc\r\n\rd\r\n"},
        ),
        (
            "edit_file",
            {"path": "bom.txt", "old": "x = 1\n", "new": "x = 2\n"},
            {"bom.txt": b"\xef\xbb\xbfx = 2\n"},
        ),
        (
            "edit_file",
            {"path": "bytes.txt", "old": "two", "new": "\\1"},
            {"bytes.txt": b"caf\xe9 \\1\n"},
        ),
        (
            "edit_lines",
            {"path": "crlf.txt", "first": 2, "last": 2, "text": "B\nBB"},
            {"crlf.txt": b"a\r\nB\r\nBB\r\nc\r\n\rd\r\n"},
        ),
        (
            "edit_lines",
            {"path": "long.json", "first": 2, "last": 1, "text": "x"},
            {"long.json": LONG + b"\nx\n"},
        ),
    ],
)
def test_edits_change_what_they_should_and_no_other_byte(
    bwrap, tools, place, tool, arguments, after, repo_files
):
    assert tools(Call(tool, arguments)) == ToolResult("ok")
    assert content(bwrap, place) == repo_files | after


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("edit_file", {"path": "a.py", "old": "two", "new": "x"}, "2 times, at lines 2, 3;"),
        ("edit_file", {"path": "lib/b.py", "old": "aa", "new": "x"}, "2 times"),
        ("edit_file", {"path": "a.py", "old": "", "new": "x"}, "0 times"),
        ("edit_file", {"path": "crlf.txt", "old": "\n", "new": "x"}, "4 times, at lines 1, 2, 3,"),
        ("edit_lines", {"path": "a.py", "first": 5, "last": 5, "text": ""}, "a.py has 1 to 3"),
        ("write_file", {"path": "lib", "text": ""}, "directory"),
        ("write_file", {"path": "a\0b", "text": ""}, "null byte"),
        ("write_file", {"path": "/usr/x", "text": ""}, "/usr/x: "),
        ("write_file", {"path": "x" * 100_000, "text": ""}, "File name too long"),
        ("write_file", {"path": "x", "text": "\udc80"}, "surrogate"),
        ("write_file", {"path": "x", "text": "x" * (5 << 20)}, "No space left"),
    ],
)
def test_edits_that_cannot_be_done_change_nothing(
    bwrap, tools, place, tool, arguments, words, repo_files
):
    result = tools(Call(tool, arguments))
    assert not result.ok and result.lost is None
    assert words in result.text and result.text.count("\n") == 0
    kept = content(bwrap, place)
    kept.pop("x", None)  # a disk that is full may have half of it
    assert kept == repo_files


TEXT = st.text(st.sampled_from("ab\n\r"), max_size=8)


@settings(max_examples=100, deadline=None)
@given(TEXT, TEXT, st.text(st.sampled_from("ab\n"), max_size=4))
@example("\r\n", "\n", "x")
@example("\r\n", "\r", "x")
def test_edit_file_replaces_the_only_place(text, old, new):
    """Against a search that goes through all places, with line ends as characters of their own."""

    def units(value):
        return re.findall("\r\n|.", value, re.DOTALL)

    def same(a, b):
        return ("\n" if a == "\r\n" else a) == ("\n" if b == "\r\n" else b)

    here, wanted = units(text), units(old)
    places = [
        start
        for start in range(len(here) - len(wanted) + 1)
        if wanted and all(map(same, here[start:], wanted))
    ]
    files = MemoryFiles({"f": text})
    result = Toolset.of(file_tools(files, 999), ToolsConfig())(
        Call("edit_file", {"path": "f", "old": old, "new": new})
    )
    assert result.ok == (len(places) == 1)
    after = files.texts["f"]
    if result.ok:
        start, end = places[0], places[0] + len(wanted)
        before, behind = "".join(here[:start]), "".join(here[end:])
        assert after.startswith(before) and after.endswith(behind)
        middle = after[len(before) : len(after) - len(behind)]
        assert middle.replace("\r\n", "\n") == new.replace("\r\n", "\n")
    else:
        assert after == text


def test_no_edit_and_no_pattern_keeps_this_process_busy(said):
    files = MemoryFiles({"f": "a" * (1 << 21), "g": "x\r\n" * (1 << 18)})
    tools = Toolset.of(file_tools(files, 999), ToolsConfig())
    edit = {"path": "f", "old": "a" * (1 << 20) + "b", "new": ""}
    assert "0 times" in said(tools, "edit_file", **edit)
    assert "more than 10 times, at lines 1, 1," in said(tools, "edit_file", **edit | {"old": "aa"})
    assert "more than 10" in said(tools, "edit_file", path="g", old="x\nx\n", new="")
    for pattern in ("(a+)+$", "(a|a)*b", "a*a*a*a*b", "(a{9}){9}"):
        assert "legal are 3 repetitions" in said(tools, "grep", pattern=pattern)
    assert said(tools, "grep", pattern="x+$", path="g").endswith("[and at least 9950 more matches]")
