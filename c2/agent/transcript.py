"""What happened in a conversation, as lines of JSON that survive the end of the process.

Every event is one `write` of one line at the end of the file, so a killed process leaves whole
lines and at most a piece of one more, which reading leaves out.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Transcript:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # behind the piece that a killed process has left

    def __enter__(self) -> "Transcript":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def __call__(self, event: dict[str, Any]) -> None:
        """Writes an event, with the time in front."""
        line = json.dumps({"time": round(time.time(), 3), **event}) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(self._fd, data) :]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file; what is no whole line is left out."""
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if line.endswith(b"\n") and isinstance(event, dict):
                yield event
