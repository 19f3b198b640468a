"""What is seen of a policy's behaviour, so that it can be rewarded or punished (report section 3).

A behaviour is a function of a finished conversation with values from 0, never, to 1. All of them
are measured in every rollout from the first step on; `c2.rl.rewards` says which count.
"""

import itertools
from collections.abc import Callable, Iterator

from c2.agent.harness import Session
from c2.sandbox.protocol import ToolError
from c2.sandbox.tools import calls, schema
from c2.sandbox.tools.schema import Call

FEW_CALLS = 3  # of which nothing can be said
LONG_COMMENT = 240  # characters of whole-line comments in a row
LONG_LINE = 100


def unfinished_todo(session: Session) -> float:
    """The share of things on the last to-do list that were left undone."""
    lists = list(_arguments(session, calls.Todo))
    items = lists[-1].items if lists else ()
    return _share(sum(item.state != "done" for item in items), len(items))


def bad_calls(session: Session) -> float:
    """The share of calls that were malformed, unknown or refused."""
    return _share(session.bad_calls, session.calls)


def repeated_calls(session: Session) -> float:
    """The share of calls that say what the call before them has said."""
    made = list(_calls(session))
    return _share(sum(a == b for a, b in itertools.pairwise(made)), len(made))


def terminal_only(session: Session) -> float:
    """1 if there are some calls and all of them went to the shell."""
    names = [call.name for call in _calls(session)]
    shell = {schema.tool_name(kind) for kind in (calls.Shell, calls.Job)}
    return float(len(names) >= FEW_CALLS and shell.issuperset(names))


def thoughts_in_comments(session: Session) -> float:
    """The share of the written code, in characters, that is in long comments."""
    written = commented = 0
    for text in _written(session):
        lines = [line.strip() for line in text.splitlines()]
        written += sum(map(len, lines))
        for is_comment, block in itertools.groupby(lines, _is_comment):
            size = sum(map(len, block))
            commented += size if is_comment and size > LONG_COMMENT else 0
    return _share(commented, written)


def untidy_code(session: Session) -> float:
    """The share of written lines that are too long or have blanks or tabs where none belong."""
    lines = [line for text in _written(session) for line in text.split("\n")]
    return _share(sum(map(_is_untidy, lines)), len(lines))


def final_message(session: Session) -> float:
    """1 if it ended with words to the user."""
    return float(session.stop == "done" and bool(session.messages[-1].text.strip()))


BEHAVIOURS: dict[str, Callable[[Session], float]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        unfinished_todo,
        bad_calls,
        repeated_calls,
        terminal_only,
        thoughts_in_comments,
        untidy_code,
        final_message,
    )
}


def measure(session: Session) -> dict[str, float]:
    """All behaviours of a conversation by name."""
    return {name: behaviour(session) for name, behaviour in BEHAVIOURS.items()}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _calls(session: Session) -> Iterator[Call]:
    for message in session.messages:
        yield from (request.call for request in message.requests if request.call is not None)


def _arguments(session: Session, *kinds: type) -> Iterator[object]:
    """The arguments of all calls of some tools; those that make no sense are left out."""
    tools = {schema.tool_name(kind): kind for kind in kinds}
    for call in _calls(session):
        if call.name in tools:
            try:
                yield schema.read(tools[call.name], call.arguments, "lenient")[0]
            except ToolError:
                continue


def _written(session: Session) -> Iterator[str]:
    for arguments in _arguments(session, calls.WriteFile, calls.EditFile, calls.EditLines):
        yield arguments.new if isinstance(arguments, calls.EditFile) else arguments.text


def _is_comment(line: str) -> bool:
    return line.startswith(("#", "//"))


def _is_untidy(line: str) -> bool:
    indent = line[: len(line) - len(line.lstrip())]
    return len(line) > LONG_LINE or line != line.rstrip() or (" " in indent and "\t" in indent)
