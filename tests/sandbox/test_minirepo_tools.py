"""Task records and the tools on a repository in memory."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.sandbox.tasks.minirepo.policies import edits
from c2.sandbox.tasks.task import Task, from_json
from c2.sandbox.tasks.tools import Call, MemoryRepo, play

TASK = Task(
    id="a", family="f", split_keys={"template": "t"}, prompt="fix it",
    files={"pkg/__init__.py": "", "pkg/a.py": "x = 1\n"},
    hidden_tests={"hidden/test_a.py": "def test_x(): pass\n"},
    fail_to_pass=("hidden/test_a.py::test_x",), pass_to_pass=(), editable=("pkg/*.py",),
)  # fmt: skip
FILES = {"a.py": "one\ntwo\ntwo\n", "lib/b.py": "aaa\n"}


def answer(name, /, **arguments):
    repo = MemoryRepo(FILES, lambda files: f"{len(files)} files")
    return repo(Call(name, arguments)), repo.files


def test_a_task_survives_json_and_its_hash_is_of_the_content():
    assert from_json(TASK.to_json()) == TASK
    assert dataclasses.replace(TASK, id="b").content_hash == TASK.content_hash
    assert dataclasses.replace(TASK, prompt="fix").content_hash != TASK.content_hash
    # Fixed, so that no version of the program gives a task another name without our knowledge.
    assert TASK.content_hash.startswith("a801f2d5f362")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": {"../a.py": ""}}, "files"),
        ({"files": {"/a.py": ""}}, "files"),
        ({"files": {"a//b.py": ""}}, "files"),
        ({"hidden_tests": {"pkg/a.py": ""}}, "hidden_tests.pkg/a.py"),
        ({"fail_to_pass": ()}, "fail_to_pass: it is empty"),
        ({"pass_to_pass": TASK.fail_to_pass}, "named twice"),
        ({"fail_to_pass": ("nowhere.py::test_x",)}, "nowhere.py::test_x"),
        ({"fail_to_pass": ("hidden/test_a.py",)}, "legal is PATH::FUNCTION"),
    ],
)
def test_a_senseless_task_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(TASK, **change)


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"id": "a"}), "[" * 100000])
def test_what_is_no_task_is_refused(text):
    with pytest.raises(ConfigError, match="task"):
        from_json(text)


@pytest.mark.parametrize(
    ("path", "legal"),
    [
        ("pkg/a.py", True), ("pkg/new.py", True), ("pkg/sub/new.py", True), ("other/a.py", False),
        ("pkg/conftest.py", False), ("pkg/sitecustomize.py", False), ("pkg/test_a.py", False),
        ("pkg/../other/a.py", False), ("/pkg/a.py", False), ("pkg//a.py", False),
        ("pkg/\n.py", False), ("pkg/\0.py", False), (f"pkg/{'a' * 300}.py", False),
    ],
)  # fmt: skip
def test_what_a_solution_may_change(path, legal):
    assert TASK.allows(path) == legal


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("read_file", {"path": "a.py"}, "1|one\n2|two\n3|two"),
        ("read_file", {"path": "b.py"}, "error: no file b.py"),
        ("list_dir", {}, "a.py\nlib/"),
        ("list_dir", {"path": "lib"}, "b.py"),
        ("list_dir", {"path": "li"}, "error: no folder li"),
        ("grep", {"pattern": "^t"}, "a.py:2:two\na.py:3:two"),
        ("grep", {"pattern": "aaa", "glob": "lib/*"}, "lib/b.py:1:aaa"),
        ("grep", {"pattern": "zzz"}, "nothing found"),
        ("grep", {"pattern": "("}, "error: pattern '(': missing ), unterminated subpattern"),
        ("run_tests", {}, "2 files"),
        ("edit_file", {"path": "a.py", "old": "two", "new": ""}, "error: old text is in a.py 2"),
        ("edit_file", {"path": "a.py", "old": "x", "new": ""}, "error: old text is in a.py 0"),
        ("edit_file", {"path": "a.py", "old": "", "new": "x"}, "error: old text is in a.py 0"),
        ("edit_file", {"path": "lib/b.py", "old": "aa", "new": "b"}, "error: old text is in lib"),
        ("edit_lines", {"path": "a.py", "first": 0, "last": 1, "text": ""}, "error: lines 0 to 1"),
        ("edit_lines", {"path": "a.py", "first": 3, "last": 4, "text": ""}, "error: lines 3 to 4"),
        ("edit_lines", {"path": "a.py", "first": 3, "last": 1, "text": ""}, "error: lines 3 to 1"),
        ("write_file", {"path": "../x", "text": ""}, "error: path '../x'"),
        ("read_file", {}, "error: "),
        ("read_file", {"path": "a.py", "mode": 1}, "error: "),
        ("read_file", {"path": ["a.py"]}, "error: "),
        ("edit_lines", {"path": "a.py", "first": "1", "last": 1, "text": ""}, "error: "),
        ("shell", {}, "error: no tool 'shell'; there are read_file, "),
    ],
)
def test_answers_of_the_tools_that_change_nothing(name, arguments, said):
    text, files = answer(name, **arguments)
    assert text.startswith(said) and files == FILES


@pytest.mark.parametrize(
    ("name", "arguments", "after"),
    [
        ("edit_file", {"path": "a.py", "old": "one\n", "new": "1\n"}, "1\ntwo\ntwo\n"),
        (
            "edit_lines",
            {"path": "a.py", "first": 2, "last": 3, "text": "x\ny\nz"},
            "one\nx\ny\nz\n",
        ),
        (
            "edit_lines",
            {"path": "a.py", "first": 1, "last": 0, "text": "x\n"},
            "x\none\ntwo\ntwo\n",
        ),
        ("edit_lines", {"path": "a.py", "first": 4, "last": 3, "text": "x"}, "one\ntwo\ntwo\nx\n"),
        ("edit_lines", {"path": "a.py", "first": 1, "last": 3, "text": ""}, ""),
        ("write_file", {"path": "a.py", "text": "new"}, "new"),
    ],
)
def test_edits(name, arguments, after):
    text, files = answer(name, **arguments)
    assert (text, files) == ("ok", FILES | {"a.py": after})


LINES = st.lists(st.sampled_from(["a", "b", "", "    c"]), min_size=1, max_size=8)


@given(LINES, LINES)
def test_edits_by_lines_turn_any_text_into_any_other(old, new):
    old, new = ("".join(f"{line}\n" for line in lines) for lines in (old, new))
    repo = MemoryRepo({"a.py": old}, lambda files: "")
    for call in edits(old, new, "a.py", "lines"):
        assert repo(call) == "ok"
    assert repo.files["a.py"] == new


def test_a_policy_is_sent_the_answers_and_stopped_in_time():
    heard = []

    def policy():
        while True:
            heard.append((yield Call("list_dir", {"path": "lib"})))

    transcript = play(policy(), MemoryRepo(FILES, lambda files: ""), max_calls=3)
    assert transcript == [(Call("list_dir", {"path": "lib"}), "b.py")] * 3
    assert heard == ["b.py"] * 2
