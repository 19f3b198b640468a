"""One node of a pool, and which of the pool's layers it has."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from c2.sandbox.bwrap import Bwrap
from c2.sandbox.gvisor import GVisor
from c2.sandbox.pool.config import PoolConfig
from c2.sandbox.pool.core import Lease
from c2.sandbox.protocol import Handle, SandboxError, SandboxLost, Spec
from c2.sandbox.zygote import Zygote

BACKENDS = {"bwrap": Bwrap, "zygote": Zygote, "gvisor": GVisor}


class Member:
    """A node process.

    Attributes:
      name: never used for another node of the pool.
      backend: the owner's side of the process.
      dead: whether it has died; nothing is asked of it then.
      leases: what runs there, by the node's own name of it.
      early: why a sandbox ended that its starter has not heard of yet.
    """

    def __init__(
        self,
        name: str,
        config: PoolConfig,
        ended: Callable[["Member", str | None, str], None],
    ) -> None:
        self.name = name
        self.dead = False
        self.leases: dict[str, Lease] = {}
        self.early: dict[str, str] = {}
        gate = {} if config.egress is None else {"egress": config.egress}
        self.backend = BACKENDS[config.backend](
            lambda sandbox, reason: ended(self, sandbox, reason), **gate
        )


@dataclass
class Place:
    """Where a sandbox of the pool is.

    Attributes:
      member: its node.
      inner: what that calls it.
      spec: what it is made of.
      prepared: a command that waits in it for input, and the number of its job.
    """

    member: Member
    inner: Handle
    spec: Spec
    prepared: tuple[tuple[str, ...], int] | None = None


@dataclass
class Layer:
    """A layer of the pool: where it came from, what nodes call it, and which sandboxes use it."""

    source: str | None
    at: str
    copies: dict[Member, str]
    users: set[str] = field(default_factory=set)
    dropped: bool = False


class Layers:
    """Layers of a pool, copied to a node when the first sandbox there needs them.

    Only `inner` and `free` talk to nodes.

    Attributes:
      unused: copies that `free` will remove.
    """

    def __init__(self) -> None:
        self.unused: list[tuple[Member, str]] = []
        self._lock = threading.Lock()
        self._copying = threading.RLock()
        self._layers: dict[str, Layer] = {}
        self._count = 0

    def add(self, member: Member, inner: str, source: str | None, at: str) -> str:
        """Gives a name to a layer that a node has."""
        with self._lock:
            self._count += 1
            name = f"layer-{self._count}"
            self._layers[name] = Layer(source, at, {member: inner})
            return name

    def use(self, sandbox: str, names: Sequence[str]) -> frozenset[str]:
        """Keeps layers until the sandbox releases them; returns the nodes that have its snapshots.

        Raises:
          SandboxError: if there is no such layer.
        """
        with self._lock:
            for name in names:
                if name not in self._layers:
                    raise SandboxError(f"layers: there is no {name!r}")
            for name in names:
                self._layers[name].users.add(sandbox)
            snapshots = [self._layers[name] for name in names if self._layers[name].source is None]
            homes = [{member.name for member in layer.copies} for layer in snapshots]
        return frozenset(set.intersection(*homes)) if homes else frozenset()

    def release(self, sandbox: str) -> None:
        """Says that a sandbox is gone."""
        with self._lock:
            for layer in self._layers.values():
                layer.users.discard(sandbox)
            self._discard()

    def drop(self, name: str) -> None:
        """Lets a layer go as soon as no sandbox uses it."""
        with self._lock:
            if layer := self._layers.get(name):
                layer.dropped = True
                self._discard()

    def forget(self, member: Member) -> None:
        """A node is gone, and its copies with it."""
        with self._lock:
            for layer in self._layers.values():
                layer.copies.pop(member, None)

    def inner(self, member: Member, name: str) -> str:
        """What a node calls a layer that is in use; copies it there if it is not there yet.

        Raises:
          SandboxError: if no copy is left, or copying fails.
        """
        with self._copying:
            with self._lock:
                layer = self._layers[name]
                if member in layer.copies:
                    return layer.copies[member]
                other, there = next(iter(layer.copies.items()), (None, ""))
            source, at = layer.source, layer.at
            if other is not None:
                try:
                    source, at = other.backend.layer_folder(there), "/"
                except SandboxLost:
                    self.forget(other)
                    return self.inner(member, name)
            if source is None:
                raise SandboxError(f"layers: {name!r} was lost with its node")
            made = member.backend.add_layer(source, at=at)
            with self._lock:
                layer.copies[member] = made
            return made

    def free(self) -> None:
        """Removes from the nodes what is not used any more; waits for them."""
        with self._lock:
            unused, self.unused = self.unused, []
        for member, inner in unused:
            with contextlib.suppress(SandboxLost):  # gone with its node
                member.backend.drop_layer(inner)

    def _discard(self) -> None:
        gone = [name for name, old in self._layers.items() if old.dropped and not old.users]
        for name in gone:
            self.unused += self._layers.pop(name).copies.items()
