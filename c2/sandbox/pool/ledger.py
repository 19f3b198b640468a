"""The life of a sandbox in a pool, and the book in which every one of them ends exactly once.

    asked, placed, live, closing, ended       what an owner asks for
    asked, placed, ready, live, closing, ended    what the pool keeps ready

asked: it waits to be admitted. placed: a node is starting it; if that node dies, it is asked for
again. ready: it runs and waits for an owner. live: it has one, who renews the lease. closing: it is
being ended, and the reason stands. ended: nothing of it is left.

It can end from every state. The reasons: "closed" by its owner or with the pool, "lease" not
renewed, "deadline", "exited" by itself, and three that nobody inside is to blame for and that must
not be counted against an agent: "lost" with its node or its pool, "failed" to start, "refused"
because there was no room.
"""

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

State = Literal["asked", "placed", "ready", "live", "closing", "ended"]
Reason = Literal["closed", "lease", "deadline", "exited", "lost", "failed", "refused"]

INFRASTRUCTURE = frozenset({"lost", "failed", "refused"})
FOLLOWS: dict[State | None, frozenset[State]] = {
    None: frozenset({"asked"}),
    "asked": frozenset({"placed", "ended"}),
    "placed": frozenset({"asked", "ready", "live", "closing", "ended"}),
    "ready": frozenset({"live", "closing", "ended"}),
    "live": frozenset({"closing", "ended"}),
    "closing": frozenset({"ended"}),
    "ended": frozenset(),
}


class LedgerError(ValueError):
    """Events that no sandbox can go through; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A sandbox enters a state.

    Attributes:
      time: seconds since the epoch.
      sandbox: its name, never used twice in a log.
      state: what it enters.
      owner: whose it is; "" for one that is kept ready.
      key: the owner's name for this create, or None.
      node: where it is, or None.
      reason: why it is closing or has ended, or None.
      labels: of its spec.
    """

    time: float
    sandbox: str
    state: State
    owner: str = ""
    key: str | None = None
    node: str | None = None
    reason: Reason | None = None
    labels: dict[str, str] = field(default_factory=dict)


class Ledger:
    """What has become of all sandboxes of a log, event by event.

    Attributes:
      open: the last event of those that have not ended.
      ended: how many have, by reason.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.open: dict[str, Event] = {}
        self.ended: collections.Counter[str] = collections.Counter()
        self._seen: set[str] = set()
        for event in events:
            self.add(event)

    @property
    def asked(self) -> int:
        """How many were ever asked for; always those that are open and those that have ended."""
        return len(self._seen)

    def add(self, event: Event) -> None:
        """Takes the next event.

        Raises:
          LedgerError: if the sandbox cannot go there from where it is; nothing is changed then.
        """
        last = self.open.get(event.sandbox)
        before = last.state if last else "ended" if event.sandbox in self._seen else None
        if event.state not in FOLLOWS[before]:
            raise LedgerError(f"sandbox {event.sandbox}: {event.state} after {before}")
        if (event.state in ("closing", "ended")) != (event.reason is not None):
            raise LedgerError(f"sandbox {event.sandbox}: {event.state} for {event.reason}")
        if last and last.reason not in (None, event.reason):
            raise LedgerError(f"sandbox {event.sandbox}: {event.reason} after {last.reason}")
        self._seen.add(event.sandbox)
        self.open[event.sandbox] = event
        if event.state == "ended":
            del self.open[event.sandbox]
            self.ended[event.reason] += 1
