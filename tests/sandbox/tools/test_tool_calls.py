"""Schemas of tools, and the two policies on how their arguments are read."""

import contextlib
import dataclasses
import json
import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.sandbox.protocol import Spec, ToolError
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.minirepo import policies
from c2.sandbox.tasks.tools import MemoryRepo, play
from c2.sandbox.tools import calls, schema
from c2.sandbox.tools.environment import sandbox_tools
from c2.sandbox.tools.files import MemoryFiles, file_tools
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Tool, ToolsConfig, Toolset, clip


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


def test_the_tools_of_an_environment(bwrap, place, said):
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


@pytest.mark.parametrize("family", minirepo.FAMILIES)
def test_a_recorded_session_gets_the_same_answers_in_training_and_in_use(family):
    """To the byte, edits that fail and files that are not there included."""
    task = minirepo.generate(5, family, 2)
    expert = policies.expert(task, test_before=True)
    first = play(expert, MemoryRepo(task.files, _count), max_calls=30)
    wrong = [Call("read_file", {"path": "nowhere"}), Call("nothing"),
             Call("edit_file", {"path": "a", "old": "", "new": ""})]  # fmt: skip
    recorded = [*wrong, *(call for call, _ in first)]
    trained, used = (
        MemoryRepo(task.files, _count, ToolsConfig(reading=reading))
        for reading in ("strict", "lenient")
    )
    assert [trained(call).encode() for call in recorded] == [
        used(call).encode() for call in recorded
    ]
    assert trained.files == used.files == minirepo.solve(task)
    assert trained.tools.prompts() == used.tools.prompts()


def _count(files):
    return f"{len(files)} files"


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


@pytest.mark.parametrize(("depth", "legal"), [(31, True), (32, False), (900, False)])
def test_what_is_nested_too_deeply_is_refused_before_it_can_do_harm(depth, legal):
    nested = "[" * depth + "1" + "]" * depth
    with contextlib.nullcontext() if legal else pytest.raises(ToolError, match="arguments: "):
        schema.parse_json(f'{{"items": {nested}}}')
    with pytest.raises(ToolError):
        schema.read(calls.Todo, {"items": nested}, "lenient")


def test_calls_from_several_threads(tools, said):
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
