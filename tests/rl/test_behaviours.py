"""Behaviours of conversations that are written by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2.agent.chat import Message, Request
from c2.agent.harness import Session
from c2.rl import behaviours
from c2.rl.behaviours import BEHAVIOURS, measure
from c2.sandbox.tools.schema import Call

THOUGHT = "# perhaps the loop is wrong, or the bound; let me see what happens if it is one more\n"


def said(*calls, text=""):
    requests = tuple(Request(call=Call(name, arguments)) for name, arguments in calls)
    return Message(role="assistant", text=text, requests=requests)


def session(*messages, **fields):
    return Session(messages=[Message(role="user", text="do it"), *messages], **fields)


def shell(command="ls"):
    return ("shell", {"command": command})


def todo(*states):
    return ("todo", {"items": [{"text": f"{i}", "state": s} for i, s in enumerate(states)]})


def write(text):
    return ("write_file", {"path": "a.py", "text": text})


@pytest.mark.parametrize(
    ("name", "messages", "value"),
    [
        ("unfinished_todo", [], 0),
        ("unfinished_todo", [said(todo())], 0),
        ("unfinished_todo", [said(todo("open", "doing", "done", "done"))], 0.5),
        ("unfinished_todo", [said(todo("open", "open")), said(todo("done", "done"))], 0),
        ("unfinished_todo", [said(todo("open")), said(("todo", {"items": "?"}))], 1),
        ("repeated_calls", [said(shell()), said(shell()), said(shell("cat a"), shell())], 1 / 4),
        ("repeated_calls", [], 0),
        ("terminal_only", [said(shell(), shell(), shell("cat a"))], 1),
        ("terminal_only", [said(shell(), shell(), ("job", {"number": 1}))], 1),
        ("terminal_only", [said(shell(), shell())], 0),  # too few to tell
        ("terminal_only", [said(shell(), shell(), ("read_file", {"path": "a"}))], 0),
        ("thoughts_in_comments", [said(write("x = 1\n"))], 0),
        ("thoughts_in_comments", [said(write("# why\nx = 1\n"))], 0),  # a comment, as it should be
        ("thoughts_in_comments", [said(write(THOUGHT * 4))], 1),
        ("thoughts_in_comments", [said(write(THOUGHT * 2 + "x = 1\n" + THOUGHT * 2))], 0),
        ("untidy_code", [said(write("x = 1\ny = 2 \n" + "z" * 101 + "\n \tw = 3"))], 3 / 4),
        ("untidy_code", [said(("edit_file", {"path": "a", "old": "b ", "new": "b"}))], 0),
        (
            "untidy_code",
            [said(("edit_lines", {"path": "a", "first": 1, "last": 1, "text": " "}))],
            1,
        ),
        ("final_message", [said(text="It was the bound.")], 1),
        ("final_message", [said(text=" \n")], 0),
    ],
)
def test_by_hand(name, messages, value):
    assert BEHAVIOURS[name](session(*messages)) == pytest.approx(value)


def test_thoughts_are_counted_in_characters_of_what_was_written():
    text = THOUGHT * 4 + "x" * 4 * (len(THOUGHT) - 1)
    assert behaviours.thoughts_in_comments(session(said(write(text)))) == pytest.approx(0.5)
    elsewhere = session(said(shell(THOUGHT * 4), ("read_file", {"path": THOUGHT * 4})))
    assert behaviours.thoughts_in_comments(elsewhere) == 0


def test_numbers_of_the_conversation():
    assert behaviours.bad_calls(session(calls=8, bad_calls=2)) == 0.25
    assert behaviours.bad_calls(session()) == 0
    assert behaviours.final_message(session(said(text="so far"), stop="turns")) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
NAMES = st.sampled_from(["todo", "shell", "job", "write_file", "edit_file", "edit_lines", "x"])
KEYS = st.sampled_from(["items", "text", "new", "old", "path", "first", "last", "command"])


@given(st.lists(st.tuples(NAMES, st.dictionaries(KEYS, JSON, max_size=4)), max_size=6), st.text())
def test_no_conversation_is_too_broken_to_measure(calls, text):
    seen = measure(session(said(*calls, text=text), Message(role="tool", text=text)))
    assert seen.keys() == BEHAVIOURS.keys()
    assert all(0 <= value <= 1 and not math.isnan(value) for value in seen.values())
