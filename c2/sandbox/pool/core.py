"""What a pool decides, and nothing of what it does: no clock, no files, no processes, no threads.

Every call is given the time and reports, as events, which sandbox has entered which state. So a
whole cluster can be simulated, and every decision be repeated.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from c2.config import ConfigError
from c2.sandbox.pool.ledger import Event, Reason, State
from c2.sandbox.pool.pressure import Pressure

HOLDING = ("placed", "ready", "live", "closing")
REMEMBERED = 10_000  # leases that have ended of which the reason and the key are still known


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a sandbox may start.

    A start takes more than a running sandbox, and what it takes shows in the measured memory only
    later. So each one in flight counts with its peak, those that run count as measured.

    Attributes:
      per_owner: sandboxes of one owner.
      per_node: sandboxes of one node.
      starting: starts in flight in one node.
      start_mb: MiB that a start takes at its peak.
      reserve_mb: MiB that must stay available on the machine.
      memory_pressure: percent of time, above which nothing starts.
      cpu_pressure: percent of time, above which one sandbox starts at a time in the whole pool.
    """

    per_owner: int = 512
    per_node: int = 1024
    starting: int = 4
    start_mb: float = 32.0
    reserve_mb: float = 512.0
    memory_pressure: float = 20.0
    cpu_pressure: float = 95.0

    def __post_init__(self) -> None:
        for name in ("per_owner", "per_node", "starting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name}: {getattr(self, name)}; legal are 1 and more")
        for name in ("start_mb", "reserve_mb", "memory_pressure", "cpu_pressure"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"limits.{name}: {getattr(self, name)}; legal are 0 and more")


@dataclass(kw_only=True)
class Lease:
    """A sandbox that someone has asked for.

    Attributes:
      sandbox: its name.
      owner: who asked; "" for one that is kept ready.
      key: the owner's name for this create, or None.
      ttl_s: seconds without a renewal after which it is ended, from when it is live.
      deadline_s: seconds after which it is ended in any case.
      homes: nodes that have its layers already, which are preferred.
      labels: for the events.
      state: where it is in its life.
      node: where it is placed.
      reason: why it is closing or has ended.
      expires: when its lease ends.
      ends: when its deadline is.
    """

    sandbox: str
    owner: str
    key: str | None = None
    ttl_s: float
    deadline_s: float
    homes: frozenset[str] = frozenset()
    labels: dict[str, str] = field(default_factory=dict)
    state: State | None = None
    node: str | None = None
    reason: Reason | None = None
    expires: float = math.inf
    ends: float = math.inf


class Core:
    """The state of a pool.

    Attributes:
      leases: by sandbox, the latest `REMEMBERED` of those that have ended included.
      nodes: names of those that are alive.
    """

    def __init__(self, limits: Limits, emit: Callable[[Event], None]) -> None:
        self.leases: dict[str, Lease] = {}
        self.nodes: set[str] = set()
        self._open: dict[str, Lease] = {}
        self._limits, self._emit = limits, emit
        self._queue: dict[str, Lease] = {}  # the longest waiting first
        self._keys: dict[tuple[str, str], Lease] = {}
        self._held: Counter[str] = Counter()  # by node
        self._starting: Counter[str] = Counter()  # by node
        self._owned: Counter[str] = Counter()  # by owner, what is asked for left out
        self._ended: deque[Lease] = deque()

    def known(self, owner: str, key: str | None) -> Lease | None:
        """What the owner has asked for under this key before."""
        return None if key is None else self._keys.get((owner, key))

    def ask(self, now: float, lease: Lease) -> None:
        """Takes a new lease into the queue."""
        self.leases[lease.sandbox] = self._open[lease.sandbox] = lease
        if lease.key is not None:
            self._keys[lease.owner, lease.key] = lease
        self._enter(now, lease, "asked")

    def place(self, now: float, pressure: Pressure) -> list[Lease]:
        """Gives nodes to all that may start now, which the caller has to do; owners come first."""
        placed = []
        for lease in sorted(self._queue.values(), key=lambda lease: not lease.owner):
            if self.obstacle(lease, pressure) is None:
                self._enter(now, lease, "placed", node=self._node(lease))
                placed.append(lease)
        return placed

    def obstacle(self, lease: Lease, pressure: Pressure) -> str | None:
        """Why a lease cannot be placed now, or None."""
        limits, starting = self._limits, self._starting.total()
        if lease.owner and self._owned[lease.owner] >= limits.per_owner:
            return f"owner {lease.owner!r} has {self._owned[lease.owner]} sandboxes"
        left = pressure.available_mb - (starting + 1) * limits.start_mb
        if left < limits.reserve_mb:
            return f"{pressure.available_mb:.0f} MiB of memory are available"
        if pressure.memory > limits.memory_pressure:
            return f"memory is short for {pressure.memory:.0f} % of the time"
        if starting and pressure.cpu > limits.cpu_pressure:
            return f"cores are short for {pressure.cpu:.0f} % of the time"
        if self._node(lease) is None:
            return f"all {len(self.nodes)} nodes are busy"
        return None

    def may_own(self, owner: str) -> bool:
        """Whether an owner may have one more."""
        return self._owned[owner] < self._limits.per_owner

    def up(self, now: float, lease: Lease) -> bool:
        """A placed sandbox runs; False if it is to be closed, because nobody wants it any more."""
        if lease.state != "placed":
            return False
        if lease.owner:
            self._live(now, lease)
        else:
            self._enter(now, lease, "ready")
        return True

    def claim(self, now: float, lease: Lease, wanted: Lease) -> None:
        """Gives a ready sandbox to an owner, with the terms of what was asked for."""
        if wanted.key is not None:
            self._keys[wanted.owner, wanted.key] = lease
        lease.ttl_s, lease.deadline_s = wanted.ttl_s, wanted.deadline_s
        self._live(now, lease, owner=wanted.owner, key=wanted.key, labels=wanted.labels)

    def renew(self, now: float, lease: Lease) -> None:
        """The owner is alive."""
        if lease.state == "live":
            lease.expires = now + lease.ttl_s

    def close(self, now: float, lease: Lease, reason: Reason) -> bool:
        """Begins to end one; True if the caller has to do it, and to call `ended` then.

        One that is starting is ended by who starts it, when `up` returns False.
        """
        if lease.state == "asked":
            self.ended(now, lease, reason)
        runs = lease.state in ("ready", "live")
        if runs or lease.state == "placed":
            self._enter(now, lease, "closing", reason=reason)
        return runs

    def ended(self, now: float, lease: Lease, reason: Reason) -> None:
        """Nothing is left of it. Only the first reason that is given for an end counts."""
        if lease.state != "ended":
            self._enter(now, lease, "ended", reason=lease.reason or reason)

    def lost(self, now: float, node: str) -> list[Lease]:
        """A node is dead: what it was starting is asked for again, all else there has ended.

        Returns what was there.
        """
        self.nodes.discard(node)
        there = [lease for lease in self._open.values() if lease.node == node]
        for lease in there:
            if lease.state == "placed":
                self._enter(now, lease, "asked", node=None)
            else:
                self.ended(now, lease, "lost")
        # what comes back has waited longer than what was asked for meanwhile
        self._queue = {name: x for name, x in self._open.items() if x.state == "asked"}
        return there

    def open(self) -> list[Lease]:
        """All that has not ended, the oldest first."""
        return list(self._open.values())

    def of(self, owner: str) -> list[Lease]:
        """What an owner has or waits for."""
        return [lease for lease in self._open.values() if lease.owner == owner]

    def ready(self) -> list[Lease]:
        """What runs and waits for an owner."""
        return [lease for lease in self._open.values() if lease.state == "ready"]

    def due(self, now: float) -> list[tuple[Lease, Reason]]:
        """What has outlived its lease or deadline."""
        live = (lease for lease in self._open.values() if lease.state == "live")
        return [
            (lease, "deadline" if lease.ends <= lease.expires else "lease")
            for lease in live
            if min(lease.ends, lease.expires) <= now
        ]

    def next_due(self) -> float:
        """When `due` will have something to say, if nothing is renewed until then."""
        live = (lease for lease in self._open.values() if lease.state == "live")
        return min((min(lease.ends, lease.expires) for lease in live), default=math.inf)

    def _live(self, now: float, lease: Lease, **changes: object) -> None:
        lease.expires, lease.ends = now + lease.ttl_s, now + lease.deadline_s
        self._enter(now, lease, "live", **changes)

    def _node(self, lease: Lease) -> str | None:
        """The emptiest node with room, if possible one that has the layers."""
        limits = self._limits
        free = [
            node
            for node in self.nodes
            if self._held[node] < limits.per_node and self._starting[node] < limits.starting
        ]
        return min(
            free, key=lambda node: (node not in lease.homes, self._held[node], node), default=None
        )

    def _enter(self, now: float, lease: Lease, state: State, **changes: object) -> None:
        self._count(lease, -1)
        for name, value in changes.items():
            setattr(lease, name, value)
        lease.state = state
        self._count(lease, +1)
        if state == "asked":
            self._queue[lease.sandbox] = lease
        else:
            self._queue.pop(lease.sandbox, None)
        if state == "ended":
            self._forget(lease)
        self._emit(
            Event(
                time=now, sandbox=lease.sandbox, state=state, owner=lease.owner, key=lease.key,
                node=lease.node, reason=lease.reason, labels=lease.labels,
            )
        )  # fmt: skip

    def _count(self, lease: Lease, step: int) -> None:
        if lease.state in HOLDING:
            self._held[lease.node] += step
            self._owned[lease.owner] += step
        if lease.state == "placed":
            self._starting[lease.node] += step

    def _forget(self, lease: Lease) -> None:
        """A create that never gave a sandbox frees its key; others are remembered for a while."""
        del self._open[lease.sandbox]
        self._ended.append(lease)
        forgotten = [self._ended.popleft()] if len(self._ended) > REMEMBERED else []
        for old in forgotten:
            del self.leases[old.sandbox]
        for old in [*forgotten, *([lease] if lease.reason in ("failed", "refused") else [])]:
            if self._keys.get((old.owner, old.key)) is old:
                del self._keys[old.owner, old.key]
