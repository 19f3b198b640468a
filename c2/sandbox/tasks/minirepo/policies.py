"""Scripted agents: one that solves every task, one that does nothing, one that is weak.

They yield `tools.Call` records and are sent the answers. The expert and the weak agent know the
solution, which they make anew from the task's seed; it is nowhere in what a model sees.
"""

import difflib
import random
import re
from collections.abc import Generator, Mapping
from typing import Literal

from c2.sandbox.tasks.minirepo.generate import slip, solve
from c2.sandbox.tasks.task import Task
from c2.sandbox.tasks.tools import Call, Policy

Style = Literal["lines", "match"]
GUESSED = ("constant", "config")


def nothing(task: Task) -> Policy:
    """Makes no call at all."""
    yield from ()


def expert(
    task: Task,
    *,
    style: Style = "lines",
    test_before: bool = False,
    test_after: bool = True,
) -> Policy:
    """Reads each file that has to change, edits it, and runs the tests.

    Args:
      task: made by `generate`.
      style: "lines" edits by line numbers, "match" by text that is in the file once.
      test_before: whether it looks at the failing test before its first edit.
      test_after: whether it runs the tests at the end.
    """
    yield from _rewrite(task.files, solve(task), style=style, read=True, test=test_before)
    if test_after:
        yield Call("run_tests")


def careless(
    task: Task,
    rng: random.Random,
    *,
    slips: float,
    tests: float,
    repairs: float,
    test_before: bool = False,
) -> Policy:
    """An expert that makes mistakes, often does not notice, and sometimes gives up.

    It looks for the file if the prompt does not name it. Its first edit can be wrong; if it then
    looks at the tests, it may put things right.

    Args:
      task: made by `generate`.
      rng: decides about habits and mistakes.
      slips: how often its first edit is wrong.
      tests: how often it runs the tests after its edits.
      repairs: how often it repairs a mistake that the tests have shown.
      test_before: whether it looks at the failing test before its first edit.
    """
    right, wrong = solve(task), slip(task, rng) if rng.random() < slips else None
    if ".py" not in task.prompt and (name := _function(task)):
        yield Call("grep", {"pattern": f"def {name}"})
    yield from _rewrite(task.files, wrong or right, read=True, test=test_before)
    if rng.random() < tests:
        answer = yield Call("run_tests")
        if wrong and answer != "pass" and rng.random() < repairs:
            yield from _rewrite(wrong, right)
            yield Call("run_tests")


def together(
    policy: Policy, rng: random.Random, share: float
) -> Generator[list[Call], list[str], None]:
    """An agent that makes calls in one turn where one need not wait for the answer of another.

    Those are the tests behind an edit or behind a file that is read, and edits in a row.

    Args:
      policy: `expert` or `careless`, which heed no answers but those of tests.
      rng: decides about habits.
      share: how often calls that can be joined are.
    """

    def after(answer: str) -> Call | None:
        try:
            return policy.send(answer)
        except StopIteration:
            return None

    turn, call = [], next(policy, None)
    while call is not None:
        turn.append(call)
        heeded = call.name == "run_tests"
        following = None if heeded else after("")
        if following and _joins(call, following) and rng.random() < share:
            call = following
            continue
        answers = yield turn
        turn, call = [], after(answers[-1]) if heeded else following


def weak(task: Task) -> Policy:
    """An agent that makes one edit and never runs a test.

    So it fails on every task that needs more than one edit: all of family "rename" and all of
    level 4. It guesses digits, always wrongly, so it fails on families "constant" and "config".
    Everything else it solves.
    """
    solution = solve(task)
    path = next(path for path, text in solution.items() if text != task.files[path])
    edit, *_ = edits(task.files[path], solution[path], path, "lines")
    yield Call("read_file", {"path": path})
    if task.family in GUESSED:
        text = edit.arguments["text"].translate(str.maketrans("123456789", "234567891"))
        edit = Call(edit.name, edit.arguments | {"text": text})
    yield edit


def _joins(first: Call, second: Call) -> bool:
    """Whether two calls that follow each other can be made in one turn."""
    edits = first.name.startswith("edit_") and second.name.startswith("edit_")
    return edits or second.name == "run_tests"


def _function(task: Task) -> str | None:
    """The first word of the prompt that names a function of the repository."""
    code = "".join(task.files.values())
    words = re.findall(r"\w+", task.prompt)
    return next((word for word in words if f"def {word}(" in code), None)


def edits(old: str, new: str, path: str, style: Style) -> list[Call]:
    """Calls that turn one text into another, to be made in this order.

    From the end of the file to its beginning, so that line numbers stay true.
    """
    before, after = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    calls = []
    for tag, start, end, new_start, new_end in reversed(matcher.get_opcodes()):
        if tag == "equal":
            continue
        text = after[new_start:new_end]
        if style == "match":
            # Later places have their new text by now, and may hold what is looked for here.
            now = before[:end] + after[new_end:]
            calls.append(_matching_edit(path, now, start, end, text))
        else:
            # The newline at the end is optional, except after an empty line.
            joined = "\n".join(text) + "\n" * (text[-1:] == [""])
            arguments = {"path": path, "first": start + 1, "last": end, "text": joined}
            calls.append(Call("edit_lines", arguments))
    return calls


def _matching_edit(path: str, lines: list[str], start: int, end: int, text: list[str]) -> Call:
    """An `edit_file` of lines `start` to `end`, with as many lines around as make it unique."""
    whole = "\n" + "\n".join(lines) + "\n"
    above = below = 0
    while True:
        first, last = max(start - above, 0), min(end + below, len(lines))
        old = "\n".join(lines[first:last])
        if old.strip() and whole.count(old) == 1:
            new = "\n".join([*lines[first:start], *text, *lines[end:last]])
            return Call("edit_file", {"path": path, "old": old, "new": new})
        above, below = above + (above <= below), below + (above > below)


def _rewrite(
    old: Mapping[str, str],
    new: Mapping[str, str],
    *,
    style: Style = "lines",
    read: bool = False,
    test: bool = False,
) -> Policy:
    """Turns files into others; with `test` the tests are run before the first edit."""
    for path, text in new.items():
        if text == old[path]:
            continue
        if read:
            yield Call("read_file", {"path": path})
        if test:
            yield Call("run_tests")
            test = False
        for call in edits(old[path], text, path, style):  # noqa: UP028 - can't be sent answers
            yield call
