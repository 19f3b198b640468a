"""An agent's calls as plain records, and a repository in memory that answers them."""

import fnmatch
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from c2.sandbox.tasks.task import is_plain_path

MAX_MATCHES = 50

Policy = Generator["Call", str, None]
"""An agent: yields calls and is sent their answers. It has finished when it returns."""


@dataclass(frozen=True)
class Call:
    """A tool and its arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class CallError(Exception):
    """A call that cannot be done; the message is one line for the agent."""


class MemoryRepo:
    """Files in a dict that the tools work on. Every answer is text, errors too.

    Tools: read_file(path), list_dir(path), grep(pattern), write_file(path, text),
    edit_file(path, old, new), where `old` has to be there exactly once, edit_lines(path, first,
    last, text), which puts `text` in the place of lines `first` to `last`, counted from 1, or in
    front of `first` if `last` is one less (a newline at its end is optional), and run_tests().

    Attributes:
      files: path -> text.
    """

    def __init__(
        self, files: Mapping[str, str], run_tests: Callable[[Mapping[str, str]], str]
    ) -> None:
        self.files = dict(files)
        self._run_tests = run_tests
        self._tools = {
            "read_file": self._read_file, "list_dir": self._list_dir, "grep": self._grep,
            "write_file": self._write_file, "edit_file": self._edit_file,
            "edit_lines": self._edit_lines, "run_tests": lambda: self._run_tests(self.files),
        }  # fmt: skip

    def __call__(self, call: Call) -> str:
        """The answer; "error: ..." for a call that cannot be done."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool {call.name!r}; there are {', '.join(self._tools)}"
        try:
            return tool(**call.arguments)
        except (CallError, TypeError) as error:
            return f"error: {error}"

    def _text(self, path: str) -> str:
        if path not in self.files:
            raise CallError(f"no file {path}")
        return self.files[path]

    def _read_file(self, path: str) -> str:
        lines = self._text(path).splitlines()
        return "\n".join(f"{number}|{line}" for number, line in enumerate(lines, 1))

    def _list_dir(self, path: str = ".") -> str:
        below = "" if path in ("", ".") else path.rstrip("/") + "/"
        inside = [name[len(below) :] for name in self.files if name.startswith(below)]
        if not inside:
            raise CallError(f"no folder {path}")
        entries = {name.partition("/")[0] + ("/" if "/" in name else "") for name in inside}
        return "\n".join(sorted(entries))

    def _grep(self, pattern: str, glob: str = "*") -> str:
        try:
            found = re.compile(pattern).search
        except re.error as error:
            raise CallError(f"pattern {pattern!r}: {error}") from error
        hits = [
            f"{path}:{number}:{line}"
            for path in sorted(self.files)
            if fnmatch.fnmatchcase(path, glob)
            for number, line in enumerate(self.files[path].splitlines(), 1)
            if found(line)
        ]
        more = [f"and {len(hits) - MAX_MATCHES} more"] if len(hits) > MAX_MATCHES else []
        return "\n".join(hits[:MAX_MATCHES] + more) or "nothing found"

    def _write_file(self, path: str, text: str) -> str:
        if not is_plain_path(path):
            raise CallError(f"path {path!r}; legal are relative paths without '..'")
        self.files[path] = text
        return "ok"

    def _edit_file(self, path: str, old: str, new: str) -> str:
        text = self._text(path)
        # Overlapping matches count: "aa" is in "aaa" twice.
        count = len(re.findall(f"(?={re.escape(old)})", text)) if old else 0
        if count != 1:
            raise CallError(f"old text is in {path} {count} times; it has to be there once")
        self.files[path] = text.replace(old, new)
        return "ok"

    def _edit_lines(self, path: str, first: int, last: int, text: str) -> str:
        lines = self._text(path).splitlines()
        if not (1 <= first <= len(lines) + 1 and first - 1 <= last <= len(lines)):
            raise CallError(f"lines {first} to {last}; {path} has 1 to {len(lines)}")
        lines[first - 1 : last] = text.splitlines()
        self.files[path] = "\n".join(lines) + "\n" if lines else ""
        return "ok"


def play(policy: Policy, repo: Callable[[Call], str], *, max_calls: int) -> list[tuple[Call, str]]:
    """Lets a policy work on a repository; returns its calls with their answers.

    Args:
      policy: a fresh generator.
      repo: answers calls, for example a `MemoryRepo`.
      max_calls: calls after which the policy is stopped.
    """
    transcript, answer = [], None
    try:
        while len(transcript) < max_calls:
            call = policy.send(answer)
            answer = repo(call)
            transcript.append((call, answer))
    except StopIteration:
        pass
    finally:
        policy.close()
    return transcript
