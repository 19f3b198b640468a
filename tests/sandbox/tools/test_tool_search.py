"""The tools that search, in the sandbox and outside of it."""

import fnmatch
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.sandbox.tools import index, outside, search_files
from c2.sandbox.tools.environment import sandbox_tools
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import ToolResult, ToolsConfig, Toolset


def searched(repo_files, pattern, glob="*", below=""):
    """All matches in `repo_files`, the slow way."""
    return [
        f"{path}:{number}:{line}"
        for path, data in sorted(repo_files.items(), key=lambda item: (item[0].count("/"), item[0]))
        if b"\0" not in data and not path.startswith(".git/") and path.startswith(below)
        for number, line in enumerate(data.decode(errors="replace").split("\n"), 1)
        if fnmatch.fnmatchcase(path, glob) and re.search(pattern, line) and len(line) < 200
    ]


def test_grep(tools, said, repo_files):
    found = said(tools, "grep", pattern="^two|é", glob="[a.l]*").split("\n")
    assert found == searched(repo_files, "^two|é", "[a.l]*") and len(found) == 4
    assert said(tools, "grep", pattern="aaa", path="lib") == "lib/b.py:1:aaa"
    assert said(tools, "grep", pattern="two", path="a.py", glob="*.txt") == "nothing found"
    assert said(tools, "grep", pattern="(").startswith("error: pattern '('")
    assert said(tools, "grep", pattern="x", path="no") == "error: no file or folder no"
    # A long line is cut and many matches are counted.
    assert said(tools, "grep", pattern="1, 1", path="long.json").endswith("more characters]")
    many = said(tools, "grep", pattern="hit").split("\n")
    assert many == [*searched(repo_files, "hit")[:50], "[and 350 more matches]"]
    assert "took more than" not in said(tools, "grep", pattern="-e")  # no option


def test_a_search_cannot_flood_the_answer(bwrap, place, said):
    """Many files, a line of a megabyte, and both."""
    plant = "for i in range(500): open('many%d' % i, 'w').write('needle\\n')"
    plant += "\nopen('wide', 'w').write('needle ' * 150_000)"
    assert bwrap.exec(place, ["python3", "-c", plant]).ok
    tools = sandbox_tools(bwrap, place, ToolsConfig(max_result=4096))
    found = said(tools, "grep", pattern="needle")
    assert len(found.encode()) <= 4096 and found.endswith("[and 451 more matches]")
    wide = said(tools, "grep", pattern="needle", path="wide")
    assert len(wide.encode()) < 500 and wide.endswith("more characters]")


@pytest.mark.parametrize("program", ["python", "rg"])
def test_both_searches_find_the_same(tmp_path, program, repo_files):
    if program == "rg" and not shutil.which("rg"):
        pytest.skip("ripgrep is not installed")
    for path, data in repo_files.items():
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
        for name in sorted(repo_files):
            data = repo_files[name]
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


def test_semantic_search_finds_the_place(said):
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


def test_web_search_from_a_recording(tmp_path, said):
    page = {"title": "T", "url": "https://example.org", "excerpt": "E"}
    path = tmp_path / "web.jsonl"
    path.write_text(json.dumps({"query": "JAX  scan", "pages": [page, page]}) + "\n")
    tools = Toolset.of([outside.web_search_tool(outside.RecordedSearch(path))], ToolsConfig())
    assert said(tools, "web_search", query="jax scan", count=1) == "T\nhttps://example.org\nE"
    assert said(tools, "web_search", query="other") == "nothing found"
    path.write_text('{"query": "x", "pages": [{"title": 1}]}\n')
    with pytest.raises(ConfigError, match=r"line 1 is no recorded search"):
        outside.RecordedSearch(path)
