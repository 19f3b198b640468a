"""The events of a pool as a file: one JSON object a line, only ever appended to."""

import dataclasses
import fcntl
import json
import os
from pathlib import Path

from c2.config import ConfigError, from_dict
from c2.sandbox.pool.ledger import Event, Ledger, LedgerError


class Log:
    """A book of events, in a file that one pool writes, or with None in memory alone.

    Opening it ends what a pool that was killed left open: its nodes have ended all of that.

    Attributes:
      ledger: what became of all sandboxes.
    """

    def __init__(self, path: Path | None, now: float) -> None:
        self.ledger, self._file = Ledger(), None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.ledger = read(path)
            os.ftruncate(self._file, path.read_bytes().rfind(b"\n") + 1)  # a line that was cut off
            for event in list(self.ledger.open.values()):
                reason = event.reason or "lost"
                self.add(dataclasses.replace(event, time=now, state="ended", reason=reason))
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"log: another pool writes {path}") from error
            raise

    def add(self, event: Event) -> None:
        """Appends an event.

        Raises:
          LedgerError: if its sandbox cannot go through it.
        """
        self.ledger.add(event)
        if self._file is not None:
            line = json.dumps(dataclasses.asdict(event), separators=(",", ":")) + "\n"
            os.write(self._file, line.encode())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read(path: Path) -> Ledger:
    """What became of the sandboxes of a log; a last line that was cut off does not count.

    Raises:
      ConfigError: if something else is in the file.
    """
    lines = path.read_text().split("\n")[:-1]
    try:
        return Ledger(from_dict(Event, json.loads(line)) for line in lines)
    except (ValueError, LedgerError) as error:
        raise ConfigError(f"log: {path} is not the log of a pool: {error}") from error
