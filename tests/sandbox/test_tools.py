"""Tools of agents against direct file operations, and the two ways to read their arguments."""

import contextlib
import dataclasses
import fnmatch
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.sandbox.protocol import Resources, Spec, ToolError
from c2.sandbox.tasks.minirepo import generate, solve
from c2.sandbox.tools import calls, index, outside, plain, schema, search_files
from c2.sandbox.tools.environment import command_tests, sandbox_tools, task_tests
from c2.sandbox.tools.files import MemoryFiles, file_tools
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Tool, ToolResult, ToolsConfig, Toolset, clip

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


def said(tools, tool, /, **arguments) -> str:
    return tools(Call(tool, arguments)).text


def content(backend, box) -> dict[str, bytes]:
    paths = backend.exec(box, ["find", ".", "-type", "f", "-print0"]).stdout.decode().split("\0")
    return {path[2:]: backend.read(box, f"/repo/{path}") for path in filter(None, paths)}


# Files -------------------------------------------------------------------------------------------


def test_reading(tools):
    assert said(tools, "read_file", path="a.py") == "1|one\n2|two\n3|two"
    assert said(tools, "read_file", path="/repo/a.py", first=2, last=2) == "2|two"
    assert said(tools, "read_file", path="bytes.txt") == "1|caf\ufffd two"
    assert "no text" in said(tools, "read_file", path="binary")
    assert said(tools, "read_file", path="no.py").startswith("error: /repo/no.py: No such file")
    assert said(tools, "read_file", path="a.py", first=4).startswith("error: lines 4 to 3; a.py")
    assert "a folder" in said(tools, "read_file", path="lib")
    shown = said(tools, "read_file", path="/etc/passwd")  # of the sandbox, not of this machine
    assert shown.splitlines()[0] == "1|root:x:0:0::/root:/bin/sh"


def test_a_file_that_does_not_fit_is_read_in_pieces(bwrap, place):
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


def test_listing(tools):
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
            {"long.json": FILES["long.json"] + b"\nx\n"},
        ),
    ],
)
def test_edits_change_what_they_should_and_no_other_byte(
    bwrap, tools, place, tool, arguments, after
):
    assert tools(Call(tool, arguments)) == ToolResult("ok")
    assert content(bwrap, place) == FILES | after


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
def test_edits_that_cannot_be_done_change_nothing(bwrap, tools, place, tool, arguments, words):
    result = tools(Call(tool, arguments))
    assert not result.ok and result.lost is None
    assert words in result.text and result.text.count("\n") == 0
    kept = content(bwrap, place)
    kept.pop("x", None)  # a disk that is full may have half of it
    assert kept == FILES


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


def test_no_edit_and_no_pattern_keeps_this_process_busy():
    files = MemoryFiles({"f": "a" * (1 << 21), "g": "x\r\n" * (1 << 18)})
    tools = Toolset.of(file_tools(files, 999), ToolsConfig())
    edit = {"path": "f", "old": "a" * (1 << 20) + "b", "new": ""}
    assert "0 times" in said(tools, "edit_file", **edit)
    assert "more than 10 times, at lines 1, 1," in said(tools, "edit_file", **edit | {"old": "aa"})
    assert "more than 10" in said(tools, "edit_file", path="g", old="x\nx\n", new="")
    for pattern in ("(a+)+$", "(a|a)*b", "a*a*a*a*b", "(a{9}){9}"):
        assert "legal are 3 repetitions" in said(tools, "grep", pattern=pattern)
    assert said(tools, "grep", pattern="x+$", path="g").endswith("[and at least 9950 more matches]")


# Searching ---------------------------------------------------------------------------------------


def searched(pattern, glob="*", below=""):
    """All matches in `FILES`, the slow way."""
    return [
        f"{path}:{number}:{line}"
        for path, data in sorted(FILES.items(), key=lambda item: (item[0].count("/"), item[0]))
        if b"\0" not in data and not path.startswith(".git/") and path.startswith(below)
        for number, line in enumerate(data.decode(errors="replace").split("\n"), 1)
        if fnmatch.fnmatchcase(path, glob) and re.search(pattern, line) and len(line) < 200
    ]


def test_grep(tools):
    found = said(tools, "grep", pattern="^two|é", glob="[a.l]*").split("\n")
    assert found == searched("^two|é", "[a.l]*") and len(found) == 4
    assert said(tools, "grep", pattern="aaa", path="lib") == "lib/b.py:1:aaa"
    assert said(tools, "grep", pattern="two", path="a.py", glob="*.txt") == "nothing found"
    assert said(tools, "grep", pattern="(").startswith("error: pattern '('")
    assert said(tools, "grep", pattern="x", path="no") == "error: no file or folder no"
    # A long line is cut and many matches are counted.
    assert said(tools, "grep", pattern="1, 1", path="long.json").endswith("more characters]")
    many = said(tools, "grep", pattern="hit").split("\n")
    assert many == [*searched("hit")[:50], "[and 350 more matches]"]
    assert "took more than" not in said(tools, "grep", pattern="-e")  # no option


@pytest.mark.parametrize("program", ["python", "rg"])
def test_both_searches_find_the_same(tmp_path, program):
    if program == "rg" and not shutil.which("rg"):
        pytest.skip("ripgrep is not installed")
    for path, data in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    (tmp_path / "link").symlink_to("a.py")
    path = os.environ["PATH"] if program == "rg" else str(tmp_path)
    for pattern, glob in (
        ("two", "*"),
        ("hit", "*"),
        ("1, 1", "*"),
        ("^t.o$", "*.py"),
        ("é", "*"),
        ("[ac]$", "*"),
    ):
        run = subprocess.run(
            [sys.executable, "-I", "-S", search_files.__file__, pattern, ".", glob],
            cwd=tmp_path, env={"PATH": path}, capture_output=True, check=True,
        )  # fmt: skip
        hits = search_files.Hits()
        for name in sorted(FILES):
            data = FILES[name]
            text = data.decode(errors="replace")
            if "\0" not in text and fnmatch.fnmatchcase(name, glob) and name[:5] != ".git/":
                search_files.search_text(hits, name, text, re.compile(pattern).search)
        assert sorted(run.stdout.decode().split("\n")) == sorted(hits.text().split("\n"))


def test_a_search_that_takes_too_long_is_ended(bwrap, place, monkeypatch):
    monkeypatch.setattr("c2.sandbox.tools.files.GREP_S", 0.5)
    bwrap.write(place, "/repo/a.py", b"a" * 100 + b"b")
    answer = sandbox_tools(bwrap, place, ToolsConfig())(Call("grep", {"pattern": "^(a+)+$"}))
    assert answer == ToolResult("error: the search took more than 0 s", ok=False)


WORDS = st.sampled_from(["total", "price", "readFile", "read_file", "x2", "Reader", "readers"])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.lists(WORDS, min_size=1)), st.lists(WORDS))
def test_bm25_against_its_formula(documents, query):
    texts = {path: " ".join(words) for path, words in documents.items()}
    bags = {path: Counter(index.terms(f"{path}\n{text}")) for path, text in texts.items()}
    mean = sum(bag.total() for bag in bags.values()) / max(len(bags), 1)

    def score(bag):
        total = 0.0
        for word in set(re.findall("[a-z]+|2", " ".join(query).replace("F", " f").lower())):
            grams = [f"~{word[i : i + 3]}" for i in range(len(word) - 2)] * (len(word) > 4)
            total += part(bag, word) + sum(part(bag, gram) for gram in grams) / max(len(grams), 1)
        return total

    def part(bag, term):
        holders = sum(term in other for other in bags.values())
        idf = math.log(1 + (len(bags) - holders + 0.5) / (holders + 0.5))
        norm = 1.2 * (1 - 0.75 + 0.75 * bag.total() / mean)
        return idf * bag[term] * 2.2 / (bag[term] + norm)

    expected = {path: score(bag) for path, bag in bags.items() if score(bag)}
    hits = index.Index(texts).search(" ".join(query), 20)
    assert {hit.path: hit.score for hit in hits} == pytest.approx(expected)
    assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.path))


def test_semantic_search_finds_the_place():
    source = Path(index.__file__)
    texts = {path.name: path.read_text() for path in source.parent.glob("*.py")}
    tools = Toolset.of([outside.semantic_search_tool(index.Index(texts))], ToolsConfig())
    query = "editing a file where the text is found once"
    answer = said(tools, "semantic_search", query=query, count=1)
    place, _, piece = answer.partition("\n")
    path, first, last = re.fullmatch(r"(\S+):(\d+)-(\d+)", place).groups()
    assert piece.split("\n") == texts[path].split("\n")[int(first) - 1 : int(last)]
    assert path == "files.py" and "def edit_file" in piece
    assert said(tools, "semantic_search", query="zzz qqq") == "nothing found"
    assert "is summarised" in said(tools, "semantic_search", query="summarisation", count=1)
    assert said(tools, "semantic_search", query="x", count=0).startswith("error: count: 0; legal")


def test_web_search_from_a_recording(tmp_path):
    page = {"title": "T", "url": "https://example.org", "excerpt": "E"}
    path = tmp_path / "web.jsonl"
    path.write_text(json.dumps({"query": "JAX  scan", "pages": [page, page]}) + "\n")
    tools = Toolset.of([outside.web_search_tool(outside.RecordedSearch(path))], ToolsConfig())
    assert said(tools, "web_search", query="jax scan", count=1) == "T\nhttps://example.org\nE"
    assert said(tools, "web_search", query="other") == "nothing found"
    path.write_text('{"query": "x", "pages": [{"title": 1}]}\n')
    with pytest.raises(ConfigError, match=r"line 1 is no recorded search"):
        outside.RecordedSearch(path)


# Commands ----------------------------------------------------------------------------------------


def test_shell(tools):
    assert said(tools, "shell", command="echo a; echo b >&2; echo c; exit 3") == (
        "a\nb\nc\n[exit status 3]"
    )
    assert said(tools, "shell", command="pwd") == "/repo\n[exit status 0]"
    assert said(tools, "shell", command="kill -9 $$") == "[ended by signal 9]"
    left = said(tools, "shell", command="setsid sleep .3 & echo hi")
    assert left == "hi\n[exit status 0; it left processes running]"
    late = said(tools, "shell", command="echo x; sleep 9", timeout_s=0.2)
    assert late == "x\n[killed: it ran longer than 0.2 s]"
    for timeout_s in (0, -1, 601, "inf"):
        assert "timeout_s: " in said(tools, "shell", command="true", timeout_s=timeout_s)
    flood = said(tools, "shell", command="yes é | head -c 999999; echo end")
    assert len(flood.encode()) <= 16384 and "bytes left out" in flood
    assert flood.endswith("end\n[exit status 0]") and "\ufffd" not in flood


def test_background_jobs(bwrap, tools, place):
    started = said(tools, "shell", command="echo up; tail -f /dev/null", background=True)
    number, log = re.fullmatch(r"\[job (\d+) runs; its output goes to (\S+)\]", started).groups()
    number = int(number)
    waiting = f"until grep -q up {log}; do sleep .01; done"
    assert said(tools, "shell", command=waiting) == "[exit status 0]"
    assert said(tools, "job", number=number) == "up\n[it runs]"
    said(tools, "job", number=number, kill=True)
    said(tools, "shell", command="while pgrep -x tail; do sleep .01; done")
    assert said(tools, "job", number=number) == "up\n[killed: you asked for it]"
    assert said(tools, "job", number=99) == f"error: no job 99; there are {number}"


def test_run_tests_of_a_command_and_of_a_task(bwrap, place):
    tests = command_tests(bwrap, place, "python3 -c 'print(1); exit(1)'")
    assert said(sandbox_tools(bwrap, place, ToolsConfig(), run_tests=tests), "run_tests") == (
        "1\n[exit status 1]"
    )
    task = generate(3, "operator", 1)
    for files, begin in ((task.files, "fail "), (solve(task), "pass")):
        for path, text in files.items():
            bwrap.write(place, f"/repo/{path}", text.encode())
        tools = sandbox_tools(
            bwrap,
            place,
            ToolsConfig(names=("run_tests",)),
            run_tests=task_tests(bwrap, place, task),
        )
        assert said(tools, "run_tests").startswith(begin)


def test_todo():
    todo = outside.TodoList()
    tools = Toolset.of([todo.tool()], ToolsConfig())
    items = [{"text": "a"}, {"text": "b", "state": "done"}]
    assert said(tools, "todo", items=items) == "[ ] a\n[x] b"
    assert [item.state for item in todo.items] == ["open", "done"]
    assert said(tools, "todo", items=[{"text": "a", "state": "x"}]).startswith(
        "error: todo.items.0"
    )
    assert said(tools, "todo", items=[{"text": "a"}] * 51).startswith("error: items: 51; at most")
    assert len(todo.items) == 2


# Sets, results and schemas -----------------------------------------------------------------------


def test_a_sandbox_that_is_gone_is_an_answer_too(bwrap):
    handle = bwrap.create(Spec())
    tools = sandbox_tools(bwrap, handle, ToolsConfig())
    bwrap.close(handle)
    for name, arguments in (("read_file", {"path": "a"}), ("shell", {"command": "true"})):
        result = tools(Call(name, arguments))
        assert result.lost == "closed" and not result.ok and result.text.startswith("error: ")


def test_a_mistake_of_ours_is_not_held_against_the_agent(caplog):
    tools = Toolset.of([Tool(calls.RunTests, lambda _: 1 / 0)], ToolsConfig())
    assert tools(Call("run_tests")).lost == "backend"
    assert "ZeroDivisionError" in caplog.text


@settings(deadline=None)
@given(st.text(), st.integers(256, 300))
def test_no_result_is_longer_than_its_bound(text, limit):
    cut = clip(text * 20, limit)
    whole = (text * 20).encode(errors="replace")
    assert len(cut.encode()) <= limit
    assert cut.encode() == whole if len(whole) <= limit else "bytes left out" in cut


def test_the_tools_of_an_environment(bwrap, place):
    with pytest.raises(ConfigError, match=r"no tool 'grpe' here; did you mean 'grep'"):
        sandbox_tools(bwrap, place, ToolsConfig(names=("grpe",)))
    tools = sandbox_tools(bwrap, place, ToolsConfig(names=("grep", "list_dir"), max_result=512))
    assert [prompt["name"] for prompt in tools.prompts()] == ["grep", "list_dir"]
    answer = tools(Call("read_file", {"path": "a.py"}))
    assert answer.text == "error: no tool 'read_file'; there are grep, list_dir"
    assert len(said(tools, "grep", pattern="hit").encode()) <= 512
    for bad in ({"max_result": 1}, {"max_shell_s": math.inf}, {"names": ("a", "a")}):
        with pytest.raises(ConfigError):
            ToolsConfig(**bad)


ARGUMENTS = [item for item in vars(calls).values() if dataclasses.is_dataclass(item)]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_schemas_are_whole(arguments):
    described = schema.json_schema(arguments)
    assert json.loads(json.dumps(described)) == described
    assert schema.description(arguments)
    for name, item in described["properties"].items():
        assert item["description"] and item["type"], name


def test_a_schema():
    assert schema.tool_name(calls.EditLines) == "edit_lines"
    assert schema.json_schema(calls.Todo) == {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "description": "what is to be done"},
                        "state": {
                            "type": "string",
                            "enum": ["open", "doing", "done"],
                            "description": "how far it is",
                            "default": "open",
                        },
                    },
                    "required": ["text"],
                    "additionalProperties": False,
                },
                "description": "the whole list, in order",
            }
        },
        "required": ["items"],
        "additionalProperties": False,
    }


LENIENT = [
    ("read_file", {"path": "a.py", "first": "2"}, "first: '2' was read as 2"),
    ("read_file", {"path": "a.py", "first": 2.0, "last": None}, "last: null was read as its"),
    ("Read-File", {"file_path": "a.py", "first": 2}, "'Read-File' was read as read_file"),
    ("read_file", {"PATH": "a.py", "first": 2, "mode": "r"}, "'mode' is no argument and was left"),
    ("readFile", '{"path": "a.py", "first": 2}', "was read as {'path': 'a.py', 'first': 2}"),
]


@pytest.mark.parametrize(("tool", "arguments", "note"), LENIENT)
def test_strict_refuses_what_lenient_repairs_and_tells(tool, arguments, note):
    def answer(reading):
        files = MemoryFiles({"a.py": "1\n2\n"})
        return Toolset.of(file_tools(files, 999), ToolsConfig(reading=reading))(
            Call(tool, arguments)
        )

    strict, lenient = answer("strict"), answer("lenient")
    assert not strict.ok and strict.text.startswith("error: ")
    assert lenient.ok and lenient.text.endswith("\n2|2") and note in lenient.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "read_file.path: missing; expected str"),
        ({"path": 1}, "read_file.path: expected str, got 1"),
        ({"path": "a", "firts": 1}, "read_file.firts: unknown key; did you mean 'first'?"),
        ({"path": "a", "first": True}, "read_file.first: expected int, got True"),
        ([], "arguments: expected an object, got []"),
        (None, "arguments: expected an object, got None"),
    ],
)
def test_what_strict_says(arguments, words):
    with pytest.raises(ToolError) as error:
        schema.read(calls.ReadFile, arguments, "strict")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": None}, {"path": ["a"]}, {"path": "a", "first": "x"}, {"path": "a", "first": 1.5},
        {"path": "a", "file": "b", "first": []}, [], None, "[1]", "path", 7, {"first": 1},
        {"path": "a", "first": "1" * 30},
    ],
)  # fmt: skip
def test_lenient_does_not_guess(arguments):
    with pytest.raises(ToolError):
        schema.read(calls.ReadFile, arguments, "lenient")


def test_lenient_reads_lists_and_words():
    items = json.dumps([{"content": "a", "status": "DONE"}])
    todo, notes = schema.read(calls.Todo, {"todos": items}, "lenient")
    assert todo.items == (calls.TodoItem(text="a", state="done"),) and notes
    shell, _ = schema.read(calls.Shell, {"cmd": 1, "background": "True"}, "lenient")
    assert shell == calls.Shell(command="1", background=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(["path", "first", "last", "Path", "items", "text", "x"])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ARGUMENTS), st.dictionaries(NAMES, JSON) | JSON)
def test_both_readings_agree_on_valid_calls_and_never_raise_another_error(arguments, given_):
    with contextlib.suppress(ToolError):
        strict, notes = schema.read(arguments, given_, "strict")
        assert notes == []
        assert schema.read(arguments, given_, "lenient") == (strict, [])
    with contextlib.suppress(ToolError):
        schema.read(arguments, given_, "lenient")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", '"a"', "null", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}',
        '{"a": 1}}', "[" * 100_000, "{" + '"a": 1, ' * 100_000, "1" * 10_000, "\0", '{"a": "\n"}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_in_a_line(text):
    with pytest.raises(ToolError, match="arguments: ") as error:
        schema.parse_json(text)
    assert len(str(error.value)) < 200


WORD = st.text(st.sampled_from('ab "\\\n\té/='), max_size=6)
BODY = st.text(st.sampled_from("a \n=é"), max_size=12)


@settings(max_examples=100, deadline=None)
@given(WORD, WORD, st.integers(), st.integers(), BODY, BODY)
def test_plain_calls_are_read_as_they_were_written(path, glob, first, last, old, new):
    for arguments, given_ in (
        (calls.ReadFile, {"path": path, "first": first}),
        (calls.Grep, {"pattern": path, "path": glob, "glob": glob}),
        (calls.EditLines, {"path": path, "first": first, "last": last, "text": new}),
        (calls.EditFile, {"path": path, "old": old, "new": new}),
        (calls.Shell, {"timeout_s": 2.5, "background": True, "command": new}),
        (calls.RunTests, {}),
    ):
        call = Call(schema.tool_name(arguments), given_)
        try:
            text = plain.write(call, arguments)
        except ValueError:
            assert arguments is calls.EditFile and "\n====\n" in f"\n{old}\n"
            continue
        assert plain.read(text, arguments) == given_
        schema.read(arguments, given_, "strict")


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ARGUMENTS), st.text(st.sampled_from('ab 1"\\\n=[')))
@example(calls.Todo, "todo 1")
@example(calls.Todo, "todo [" + "[" * 100_000)
def test_whatever_a_plain_call_is_it_is_read_or_refused(arguments, text):
    with contextlib.suppress(ToolError):
        schema.read(arguments, plain.read(text, arguments), "strict")


def test_plain_calls():
    assert plain.read("edit_lines a.py 2 2\n    x = 1", calls.EditLines) == {
        "path": "a.py", "first": 2, "last": 2, "text": "    x = 1",
    }  # fmt: skip
    with pytest.raises(ToolError, match="4 words; read_file has 3"):
        plain.read("read_file a 1 2 3", calls.ReadFile)
    with pytest.raises(ValueError, match="in front of a given one"):
        plain.write(Call("read_file", {"path": "a", "last": 3}), calls.ReadFile)


@pytest.mark.parametrize(("depth", "legal"), [(31, True), (32, False), (900, False)])
def test_what_is_nested_too_deeply_is_refused_before_it_can_do_harm(depth, legal):
    nested = "[" * depth + "1" + "]" * depth
    with contextlib.nullcontext() if legal else pytest.raises(ToolError, match="arguments: "):
        schema.parse_json(f'{{"items": {nested}}}')
    with pytest.raises(ToolError):
        schema.read(calls.Todo, {"items": nested}, "lenient")


def test_calls_from_several_threads(tools):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(said(tools, "read_file", path="a.py")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["1|one\n2|two\n3|two"] * 8
