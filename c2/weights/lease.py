"""The right to write a chain: one process at a time.

Every writer creates ``writer/EPOCH``, one above the highest there; the highest is the writer. It
rewrites its object several times per ``seconds``. A newcomer watches it for that long and gives up
if it changes, so clocks of machines are never compared, and a writer that was killed is followed
by the next one after ``seconds``. A writer that only slept finds the higher epoch before it
commits. Should it look just before that appears, the commit still cannot fork the chain: versions
are created under their number, and a number is created once.

The object also says which number was committed last, so that none is given again even if its
version is removed: to readers a version is its number.
"""

import json
import logging
import secrets
import threading
import time
from typing import Self

from c2.config import ConfigError
from c2.weights.store import Store

_LOG = logging.getLogger(__name__)
_BEATS = 4  # signs of life per `seconds`


class HeldError(RuntimeError):
    """Another process writes this chain."""


class Lease:
    """The right to write, from `acquire` until `release`, or until someone else has it.

    Attributes:
      epoch: grows from writer to writer; a fencing token.
    """

    def __init__(self, store: Store, owner: str, seconds: float, epoch: int, reached: int) -> None:
        self.epoch, self._reached = epoch, reached
        self._store, self._owner, self._seconds = store, owner, seconds
        self._writing = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._live, name="writer lease", daemon=True)

    @classmethod
    def acquire(cls, store: Store, owner: str, seconds: float) -> Self:
        """Takes the lease; takes ``seconds`` where the last writer did not release it.

        Args:
          store: of the chain.
          owner: who writes, for the message that others get.
          seconds: without a sign of life after which a writer counts as dead.

        Raises:
          HeldError: if a writer lives, or another newcomer was faster.
          ConfigError: if the store would let two writers create the same object.
        """
        if not seconds > 0:
            raise ConfigError(f"lease_seconds: {seconds}; legal: above 0")
        last = int(max(store.names("writer"), default=0))
        if last:
            _watch(store, _name(last), seconds)
        lease = cls(store, owner, seconds, last + 1, reached(store, last) if last else 0)
        name, content = _name(lease.epoch), lease._content()
        try:
            store.create(name, content)
        except FileExistsError:
            raise HeldError(f"{name}: another process has just become the writer") from None
        try:
            store.create(name, content)
        except FileExistsError:
            store.sweep()
            lease._thread.start()
            return lease
        raise ConfigError(
            "store: it ignores If-None-Match, so two writers could not be kept apart; legal are"
            " folders, AWS S3 and servers with conditional writes such as SeaweedFS"
        )

    def check(self) -> None:
        """Raises HeldError if this is no longer the writer."""
        newest = max(self._store.names("writer"), default=None)
        mine = _name(self.epoch)
        if f"writer/{newest}" != mine or self._released.is_set():
            raise HeldError(f"{mine} no longer holds this chain; the newest is {newest}")

    def reach(self, version: int) -> None:
        """Notes the number of a version, for all writers to come."""
        self._reached = version
        self._sign()

    def release(self) -> None:
        """Lets the next writer begin at once."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        self._sign(released=True)

    def _content(self, released: bool = False) -> bytes:
        content = {
            "owner": self._owner,
            "released": released,
            "reached": self._reached,
            "sign": secrets.token_hex(8),
        }
        return json.dumps(content).encode()

    def _sign(self, released: bool = False) -> None:
        with self._writing:  # an older content never follows a newer one
            self._store.write(_name(self.epoch), self._content(released))

    def _live(self) -> None:
        while not self._released.wait(self._seconds / _BEATS):
            try:
                self._sign()
            except OSError as error:  # it may be back before anyone takes over
                _LOG.warning("no sign of life from %s: %s", _name(self.epoch), error)


def reached(store: Store, epoch: int) -> int:
    """The highest number that a writer knows of, its own and those before; 0 for none."""
    return json.loads(store.read(_name(epoch))).get("reached", 0)


def _name(epoch: int) -> str:
    return f"writer/{epoch:08d}"


def _watch(store: Store, name: str, seconds: float) -> None:
    """Returns if a writer has released its lease or gives no sign of life."""
    first = store.read(name)
    writer = json.loads(first)
    end = time.monotonic() + seconds
    while not writer["released"] and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, seconds / _BEATS))
        if store.read(name) != first:
            raise HeldError(f"{name}: {writer['owner']} writes this chain")
