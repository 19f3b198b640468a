"""Runs nodes and sandboxes as the core decides, and keeps the book."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from c2.sandbox.pool import pressure
from c2.sandbox.pool.config import PoolConfig
from c2.sandbox.pool.core import Core, Lease
from c2.sandbox.pool.ledger import INFRASTRUCTURE, Reason
from c2.sandbox.pool.log import Log
from c2.sandbox.pool.member import Layers, Member, Place
from c2.sandbox.protocol import Handle, SandboxError, SandboxLost, Spec

POOL = "pool"  # the backend of its handles
TICK_S = 0.2
READY_S = 1e6  # seconds that a ready sandbox may wait for an owner
GRACE_S = 5.0  # by which the node's own deadline comes later than the pool's
REASONS: dict[str, Reason] = {  # of a node, as reasons of the pool
    "closed": "closed", "deadline": "deadline", "lease": "deadline", "exited": "exited",
    "backend": "lost",
}  # fmt: skip


class Engine:
    """The state of a pool and what changes it. Threads of owners do the slow work themselves.

    Attributes:
      config: of the pool.
      turn: held while anything below is looked at or changed; told of every change. Nothing that
        waits for a node may be done with it.
      log: the book.
      core: what decides.
      members: nodes by name, dead ones until they are cleared away.
      places: where what is ready, live or closing is.
      layers: of the pool.
      open: whether new sandboxes are given out.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.turn = threading.Condition()
        self.log = Log(config.log and Path(config.log), time.time())
        self.core = Core(config.limits, self.log.add)
        self.members: dict[str, Member] = {}
        self.places: dict[str, Place] = {}
        self.layers = Layers()
        self.open = True
        self._pressure, self._measured = pressure.read(), time.monotonic()
        self._count = 0
        self._epoch = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch by a clock that nobody sets."""
        return self._epoch + time.monotonic()

    def create(self, spec: Spec, owner: str, key: str | None) -> Handle:
        """As `Pool.create`."""
        with self.turn:
            if not self.open:
                raise SandboxLost("the pool was shut down", "closed")
            if (known := self.core.known(owner, key)) is not None:
                return self._same(known)
            lease = self._lease(spec, owner, key)
            ready = self._claim(spec, lease)
            if ready is None:
                self._ask(lease, spec)
        if ready is None:
            return self.start(lease, spec)
        place = self.at(ready)
        try:
            place.member.backend.adopt(place.inner, _to_node(spec))
        except SandboxLost as error:
            raise self.lost(ready, error) from error
        return ready

    def ask(self, kind: Spec) -> Lease:
        """Asks for a sandbox that has no owner yet; with `turn` held."""
        lease = self._lease(kind, "", None)
        self._ask(lease, kind)
        return lease

    def start(self, lease: Lease, spec: Spec, command: Sequence[str] = ()) -> Handle:
        """Starts what was asked for, on another node if one dies under it.

        With a command, that is prepared in it before anybody gets it.
        """
        end = time.monotonic() + self.config.wait_s
        try:
            while True:
                member = self._placed(lease, end)
                if handle := self._attempt(member, lease, spec, tuple(command)):
                    return handle
        except BaseException:
            with self.turn:
                self.end(lease, "failed")
            raise

    def stock(self, kind: Spec) -> list[Lease]:
        """What of a kind runs and waits for an owner; with `turn` held, like most below."""
        ready = self.core.ready()
        return [lease for lease in ready if self.places[lease.sandbox].spec == kind]

    def close(self, lease: Lease, reason: Reason) -> None:
        """Ends a sandbox in whatever state it is; `turn` must not be held."""
        with self.turn:
            place = self.places.get(lease.sandbox)
            if not self.core.close(self.now(), lease, reason):
                self.changed()
                return
        self.finish(lease, place)

    def finish(self, lease: Lease, place: Place) -> None:
        """Ends one that is closing; `turn` must not be held."""
        with contextlib.suppress(SandboxLost):  # the node is dead, and with it the sandbox
            place.member.backend.close(place.inner)
        with self.turn:
            self.end(lease, lease.reason)

    def end(self, lease: Lease, reason: Reason) -> None:
        """Nothing is left of a sandbox."""
        self.core.ended(self.now(), lease, reason)
        if place := self.places.pop(lease.sandbox, None):
            place.member.leases.pop(place.inner.id, None)
        self.layers.release(lease.sandbox)
        self.changed()

    def ended(self, member: Member, inner: str | None, reason: str) -> None:
        """A node says that a sandbox has ended by itself, or, with None, that the node has.

        Called by threads that read what nodes say, so nothing here waits for a node.
        """
        with self.turn:
            if inner is not None:
                if lease := member.leases.get(inner):
                    self.end(lease, REASONS[reason])
                else:
                    member.early[inner] = reason
            elif not member.dead:
                member.dead = True
                self.layers.forget(member)
                for lease in self.core.lost(self.now(), member.name):
                    if lease.state == "ended":
                        self.end(lease, "lost")
                self.changed()

    def changed(self) -> None:
        """Starts what may start now, and wakes all who wait for something."""
        if time.monotonic() - self._measured > TICK_S / 4:
            self._pressure, self._measured = pressure.read(), time.monotonic()
        self.core.place(self.now(), self._pressure)
        self.turn.notify_all()

    def add_member(self) -> None:
        """Starts a node; `turn` must not be held."""
        with self.turn:
            self._count += 1
            name = f"node-{self._count}"
        member = Member(name, self.config, self.ended)
        with self.turn:
            self.members[name] = member
            if not member.dead:
                self.core.nodes.add(name)
            self.changed()

    def replace(self, member: Member) -> None:
        """Removes what a dead node has left; the keeper adds another one."""
        member.backend.shutdown()
        with self.turn:
            del self.members[member.name]

    def alive(self) -> list[Member]:
        """The nodes that can be asked for something."""
        with self.turn:
            return [member for member in self.members.values() if not member.dead]

    def at(self, handle: Handle) -> Place:
        """Where a sandbox with an owner is; raises `SandboxLost` if it is not any more."""
        place, lease = self.places.get(handle.id), self.core.leases.get(handle.id)
        if place is None or lease.state != "live":
            raise self.gone(handle.id)
        return place

    def gone(self, sandbox: str) -> SandboxLost:
        """The error that says why a sandbox is not there."""
        lease = self.core.leases.get(sandbox)
        reason = "closed" if lease is None else lease.reason
        seen = "backend" if reason in INFRASTRUCTURE else reason
        return SandboxLost(f"sandbox {sandbox} of the pool is gone ({reason})", seen)

    def lost(self, handle: Handle, error: SandboxLost) -> SandboxLost:
        """The error of a call that failed, with what its node knows; `turn` must not be held."""
        if (place := self.places.get(handle.id)) is None:
            return self.gone(handle.id)
        error = place.member.backend._lost(place.inner, error)
        inner = None if error.reason == "backend" else place.inner.id
        with self.turn:
            if handle.id in self.places:  # its node may have told before
                self.ended(place.member, inner, error.reason)
        return SandboxLost(f"sandbox {handle.id} of the pool: {error}", error.reason)

    def _lease(self, spec: Spec, owner: str, key: str | None) -> Lease:
        return Lease(
            sandbox=str(self.log.ledger.asked + 1), owner=owner, key=key, ttl_s=spec.ttl_s,
            deadline_s=spec.deadline_s, labels=spec.labels,
        )  # fmt: skip

    def _same(self, lease: Lease) -> Handle:
        while lease.state in ("asked", "placed"):
            self.turn.wait()
        handle = Handle(POOL, lease.sandbox)
        self.at(handle)
        return handle

    def _ask(self, lease: Lease, spec: Spec) -> None:
        image = () if spec.image is None else (spec.image,)
        lease.homes = self.layers.use(lease.sandbox, (*image, *spec.layers))
        self.core.ask(self.now(), lease)
        self.changed()

    def _claim(self, spec: Spec, wanted: Lease) -> Handle | None:
        stock = self.stock(kind_of(spec))
        if not stock or not self.core.may_own(wanted.owner):
            return None
        lease = stock[0]
        self.core.claim(self.now(), lease, wanted)
        self.places[lease.sandbox].spec = spec
        self.turn.notify_all()  # the keeper starts another one
        return Handle(POOL, lease.sandbox)

    def _placed(self, lease: Lease, end: float) -> Member:
        """Waits until a lease is admitted; returns its node."""
        with self.turn:
            while lease.state == "asked":
                woken = self.turn.wait(max(0.0, end - time.monotonic()))
                if lease.state == "asked" and not woken:
                    why = self.core.obstacle(lease, self._pressure) or "it came too late"
                    self.end(lease, "refused")
                    raise SandboxError(f"no room for a sandbox in {self.config.wait_s:g} s: {why}")
            if lease.state != "placed":
                raise self.gone(lease.sandbox)
            return self.members[lease.node]

    def _attempt(
        self, member: Member, lease: Lease, spec: Spec, command: tuple[str, ...]
    ) -> Handle | None:
        """Starts it on a node; None if the node has died, so that it was asked for again."""
        try:
            layers = tuple(self.layers.inner(member, name) for name in spec.layers)
            image = spec.image and self.layers.inner(member, spec.image)
            made_of = dataclasses.replace(
                _to_node(spec), layers=layers, image=image,
                labels={**spec.labels, POOL: lease.sandbox},  # its name in the log of the gate
            )  # fmt: skip
            inner = member.backend.create(made_of)
            prepared = _prepare(member, inner, command)
        except SandboxLost as error:
            if error.reason != "backend":
                raise
            self.ended(member, None, "backend")
            return None
        handle = Handle(POOL, lease.sandbox)
        with self.turn:
            if member.dead:
                return None
            if self.core.up(self.now(), lease):
                self.places[lease.sandbox] = Place(member, inner, spec, prepared)
                member.leases[inner.id] = lease
                self.changed()
                if reason := member.early.pop(inner.id, None):
                    self.end(lease, REASONS[reason])
                return handle
        member.backend.close(inner)  # its owner has closed it meanwhile
        with self.turn:
            self.end(lease, "closed")
        raise self.gone(lease.sandbox)


def kind_of(spec: Spec) -> Spec:
    """What of a spec a ready sandbox must agree with."""
    return dataclasses.replace(spec, env={}, labels={}, deadline_s=READY_S, ttl_s=READY_S)


def _prepare(
    member: Member, inner: Handle, command: tuple[str, ...]
) -> tuple[tuple[str, ...], int] | None:
    """Of a sandbox that nobody has yet; it is closed if that fails."""
    try:
        return (command, member.backend.prepare(inner, command)) if command else None
    except BaseException:
        member.backend.close(inner)
        raise


def _to_node(spec: Spec) -> Spec:
    """The pool watches leases and deadlines; a node's own limit is for a pool that hangs."""
    limit = spec.deadline_s + GRACE_S
    return dataclasses.replace(spec, deadline_s=limit, ttl_s=limit)
