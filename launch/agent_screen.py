"""Shows a conversation between an agent and its tools while it happens."""

import textwrap
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

MAX_LINES, MAX_WIDTH = 12, 160  # of a text that a tool gets or answers
_NAME = 11  # columns of the name of a fact
_INLINE = 40  # characters of an argument that is shown in the line of its tool

_ENDINGS = {
    "done": "the agent has finished",
    "turns": "all turns are used up",
    "tokens": "all tokens are used up",
    "context": "the context is full",
    "cut": "a turn reached its limit before any call",
    "deadline": "time is up",
    "lost": "the sandbox is gone",
    "agent": "the agent cannot be reached",
}


class Screen:
    """An observer of `c2.agent.harness.run` that prints.

    Everything that comes from a model or a tool is untrusted: control characters, which could
    rewrite what is on the screen, are shown as U+FFFD.
    """

    def __init__(self, console: Console, max_turns: int) -> None:
        self._console, self._max_turns = console, max_turns
        self._turn = 0
        self._calls: list[str] = []  # of the newest turn, if they are several and not answered yet

    def copyable(self, name: str, value: str) -> None:
        """A name and a value that is not broken into lines."""
        self._console.print(Text.assemble((f"{name:<{_NAME}}", "bold"), value), soft_wrap=True)

    def facts(self, **facts: str) -> None:
        """Names and values."""
        for name, value in facts.items():
            width = max(self._console.width - _NAME, 40)
            lines = textwrap.wrap(
                printable(value), width, break_long_words=False, break_on_hyphens=False
            )
            shown = f"\n{' ' * _NAME}".join(lines)
            line = Text.assemble((f"{name.replace('_', ' '):<{_NAME}}", "bold"), shown)
            self._console.print(line, soft_wrap=True)

    def note(self, text: str) -> None:
        """A line of our own."""
        self._console.print(Text(printable(text), style="yellow"))

    def diff(self, patch: str) -> None:
        """A patch, in colour where there is any."""
        self._rule("changes")
        lines = printable(patch.rstrip("\n"))
        shown = Syntax(lines, "diff", theme="ansi_dark").highlight(lines)
        self._console.print(shown, soft_wrap=True, end="")

    def __call__(self, event: dict[str, Any]) -> None:
        """Prints an event."""
        kind = event["event"]
        if kind == "turn":
            self._turn += 1
            self._said(f"turn {self._turn} of {self._max_turns}", event)
        elif kind == "summary":
            self._said("summary, in the place of all turns so far", event)
        elif kind == "result":
            failed = event["text"].startswith("error: ")
            if self._calls:
                self._console.print(Text(f"  {self._calls.pop(0)}:", style="dim"))
            self._indented(event["text"], "red" if failed else "dim")
        elif kind == "end":
            self._end(event)

    def _said(self, title: str, event: dict[str, Any]) -> None:
        self._rule(f"{title}: {event['prompt_tokens']:,} tokens read, {event['tokens']:,} written")
        if thinking := event.get("thinking"):
            self._console.print(Text(printable(thinking), style="italic dim"))
        if event["text"]:
            self._console.print(Text(printable(event["text"])))
        calls = event.get("calls", [])
        names = [printable(call.get("name", "a call that cannot be read")) for call in calls]
        several = len(calls) > 1 and event["event"] == "turn"
        self._calls = [f"{n} {name}" for n, name in enumerate(names, 1)] if several else []
        for call, name in zip(calls, self._calls or names, strict=True):
            self._call(call, name)
        if event["cut"]:
            self.note("this turn was cut at its limit")

    def _call(self, call: dict[str, Any], name: str) -> None:
        line = Text.assemble(("> ", "cyan"), (name, "bold cyan"), " ")
        if "name" not in call:
            self._console.print(line.append(cut(call["raw"], 1), style="red"), soft_wrap=True)
            return
        given = call["arguments"]
        long = {key: text for key, text in given.items() if _is_long(text)}
        short = " ".join(f"{key}={value!r}" for key, value in given.items() if key not in long)
        self._console.print(line.append(cut(short, 1)), soft_wrap=True)
        for key, text in long.items():
            self._indented(f"{key}:", "cyan")
            self._indented(text, "")

    def _indented(self, text: str, style: str) -> None:
        shown = textwrap.indent(cut(text, MAX_LINES), "    ", lambda line: True)
        self._console.print(Text(shown, style=style), soft_wrap=True)

    def _end(self, event: dict[str, Any]) -> None:
        self._rule("end")
        why = f" ({event['lost']})" if event["lost"] else ""
        used = [_count(event["turns"], "turn"), _count(event["calls"], "call")]
        if event["bad_calls"]:
            used[1] += f" ({event['bad_calls']} refused)"
        if event["summaries"]:
            used.append(f"{event['summaries']} x summarised")
        used.append(f"{_count(event['tokens'], 'token')} written")
        self.facts(ended=_ENDINGS[event["stop"]] + why, used=", ".join(used))

    def _rule(self, title: str) -> None:
        self._console.print(Rule(title, style="dim", align="left"))


def printable(text: str) -> str:
    """The text without anything that a terminal could obey."""
    signs = (sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
    return "".join(signs).expandtabs(4)


def cut(text: str, lines: int) -> str:
    """At most so many lines of a text, none of them wide, and how many more there are."""
    whole = printable(text).split("\n")
    shown = [
        line if len(line) <= MAX_WIDTH else f"{line[: MAX_WIDTH - 3]}..." for line in whole[:lines]
    ]
    more = len(whole) - lines
    return "\n".join([*shown, f"[{more} more lines]"] if more > 0 else shown)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + "s" * (number != 1)


def _is_long(argument: object) -> bool:
    return isinstance(argument, str) and (len(argument) > _INLINE or "\n" in argument)
