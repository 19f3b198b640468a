"""Calls in plain text: what a small model writes."""

import contextlib
import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c2.sandbox.protocol import ToolError
from c2.sandbox.tools import calls, plain, schema
from c2.sandbox.tools.schema import Call

ARGUMENTS = [item for item in vars(calls).values() if dataclasses.is_dataclass(item)]
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
