"""The record of all decisions: a file of JSON lines, which only grows."""

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

MAX_TEXT = 2048  # characters kept of what a sandbox has chosen
BURST, PER_S = 200, 50  # refusals of one sandbox that get lines of their own


class LogFailed(Exception):
    """A line could not be written; nothing may be let through any more."""


class Log:
    """Appends lines; each is written as a whole or not at all.

    Attributes:
      node: the process whose sandboxes are meant; in every line.
    """

    def __init__(self, path: str, node: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # A pipe that nobody reads is an error and not to be waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(path, flags, 0o600)
        self.node = node

    def write(self, event: str, **fields: Any) -> None:
        """Adds a line; raises LogFailed."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "node": self.node, "event": event}
        record |= {name: _short(value) for name, value in fields.items() if value is not None}
        line = json.dumps(record).encode() + b"\n"
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise LogFailed(f"the log cannot be written: {error.strerror}") from error
        if written != len(line):
            raise LogFailed("the log takes no whole line any more")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


class SandboxLog:
    """The lines of one sandbox. What a flood of refusals leaves out is counted."""

    def __init__(self, log: Log, sandbox: str) -> None:
        self._log, self._sandbox = log, sandbox
        self._left, self._since, self._hidden = float(BURST), time.monotonic(), 0

    def allow(self, event: str, **fields: Any) -> None:
        """Something has been let through."""
        self._log.write(event, sandbox=self._sandbox, decision="allow", **fields)

    def tell(self, event: str, **fields: Any) -> None:
        """Something else has happened."""
        self._log.write(event, sandbox=self._sandbox, **fields)

    def deny(self, event: str, reason: str, *, decision: str = "deny", **fields: Any) -> None:
        """Something has been refused, or has failed."""
        now = time.monotonic()
        self._left = min(float(BURST), self._left + PER_S * (now - self._since))
        self._since = now
        if self._left < 1:
            self._hidden += 1
            return
        self._left -= 1
        self.flush()
        self._log.write(event, sandbox=self._sandbox, decision=decision, reason=reason, **fields)

    def skip(self, count: int) -> None:
        """So many more have been refused, of which nothing else is known."""
        self._hidden += count

    def flush(self) -> None:
        """Tells how many refusals got no line."""
        if self._hidden:
            self._log.write("flood", sandbox=self._sandbox, decision="deny", count=self._hidden)
            self._hidden = 0


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}... ({len(value)} characters)"
    return value
