"""The calls of a pool."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from c2.sandbox.client import Client
from c2.sandbox.egress.policy import Policy
from c2.sandbox.layers import copy_tree
from c2.sandbox.pool.config import PoolConfig
from c2.sandbox.pool.engine import POOL, Engine, kind_of
from c2.sandbox.pool.keeper import Keeper
from c2.sandbox.pool.ledger import Ledger
from c2.sandbox.protocol import WORKDIR, Handle, Network, SandboxLost, Spec, Status, require
from c2.sandbox.served import Served
from c2.sandbox.store import MAX_BYTES

OWNER = "owner"  # of what is created without naming one


class Pool(Served):
    """Sandboxes of several nodes behind the calls of one backend, from any thread.

    A lease lasts as long as its owner renews it, a sandbox that is not renewed is ended. When
    neither the owner nor the code inside is to blame for an end, `SandboxLost.reason` is "backend".
    Memory snapshots belong to one node and are not passed on: `protocol.require` refuses them.

    Attributes:
      ledger: what has become of all sandboxes of the log.
    """

    name = POOL
    capabilities = frozenset({"jobs", "layers", "fork"})

    def __init__(self, config: PoolConfig) -> None:
        if config.egress is not None:
            self.capabilities = self.capabilities | {"network_policy"}
        self._engine = Engine(config)
        self.ledger: Ledger = self._engine.log.ledger
        self._keeper = Keeper(self._engine)
        try:
            for _ in range(config.nodes):
                self._engine.add_member()
        except BaseException:
            self.shutdown()
            raise
        self._keeper.start()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def create(self, spec: Spec, *, owner: str = OWNER, key: str | None = None) -> Handle:
        """As `protocol.Backend.create`; takes a ready sandbox if there is one of this kind.

        Args:
          spec: what it is made of; `ttl_s` and `deadline_s` count from when it is handed over.
          owner: who renews it, and whose quota it counts for.
          key: the owner's name for this create. Doing it again returns the same sandbox, or raises
            what became of it; only a create that never gave a sandbox can be repeated.

        Raises:
          SandboxError: if there is no room in time, or it does not come up.
          Unsupported: for network, of a pool without a gate.
        """
        if isinstance(spec.network, Policy):
            require(self, "network_policy")
        return self._engine.create(spec, owner, key)

    def keep_ready(self, spec: Spec, count: int, *, command: Sequence[str] = ()) -> None:
        """Keeps sandboxes of this kind running for owners to come; 0 takes no more into stock.

        The kind is the image, layers and resources of the spec. A command is prepared in each of
        them, and the owner's own `prepare` of the same command takes it over.
        """
        self._keeper.keep_ready(spec, count, command)

    def prepare(self, handle: Handle, argv: Sequence[str]) -> int:
        """As `protocol.SupportsJobs.prepare`."""
        with self._engine.turn:
            place = self._engine.at(handle)
            prepared, place.prepared = place.prepared, None
        if prepared and prepared[0] == tuple(argv):
            return prepared[1]
        if prepared:
            self.kill(handle, prepared[1])
        return super().prepare(handle, argv)

    def ready(self, spec: Spec) -> int:
        """How many sandboxes of this kind wait for an owner."""
        with self._engine.turn:
            return len(self._engine.stock(kind_of(spec)))

    def fork(self, handle: Handle, count: int = 1) -> list[Handle]:
        """As `protocol.SupportsFork.fork`: for the same owner, on the same node if it has room."""
        spec, owner = self._engine.at(handle).spec, self._engine.core.leases[handle.id].owner
        layer = self.snapshot(handle)
        spec = dataclasses.replace(spec, layers=(*spec.layers, layer))
        made: list[Handle] = []
        try:
            for _ in range(count):
                made.append(self.create(spec, owner=owner))
        except BaseException:
            for other in made:
                self.close(other)
            raise
        finally:
            self.drop_layer(layer)
        return made

    def snapshot(self, handle: Handle) -> str:
        """As `protocol.SupportsLayers.snapshot`."""
        place = self._engine.at(handle)
        try:
            inner = place.member.backend.snapshot(place.inner)
        except SandboxLost as error:
            raise self._engine.lost(handle, error) from error
        return self._engine.layers.add(place.member, inner, None, "/")

    def save(self, handle: Handle, folder: Path) -> None:
        """Copies all that a sandbox has changed into an empty folder, which outlives the pool.

        `add_layer(folder, at="/")` makes a layer of it again, to go on top of those of the sandbox.

        Raises:
          CopyError: if that is too deep or too large.
          OSError: if the folder cannot take it.
        """
        place = self._engine.at(handle)
        backend = place.member.backend
        try:
            layer = backend.snapshot(place.inner)
            given = os.open(backend.layer_folder(layer), os.O_RDONLY | os.O_DIRECTORY)
            taken = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                copy_tree(given, taken, None, MAX_BYTES)
            finally:
                os.close(given)
                os.close(taken)
                backend.drop_layer(layer)
        except SandboxLost as error:
            raise self._engine.lost(handle, error) from error

    def add_layer(self, source: str, *, at: str = WORKDIR) -> str:
        """As `protocol.SupportsLayers.add_layer`; the source must stay, for nodes to come."""
        engine = self._engine
        with engine.turn:  # a node that has died is being replaced
            engine.turn.wait_for(lambda: engine.alive() or not engine.open, engine.config.wait_s)
        alive = engine.alive()
        if not alive:
            raise SandboxLost("all nodes of the pool are dead", "backend")
        inner = alive[0].backend.add_layer(source, at=at)
        return self._engine.layers.add(alive[0], inner, source, at)

    def drop_layer(self, name: str) -> None:
        """As `protocol.SupportsLayers.drop_layer`."""
        self._engine.layers.drop(name)

    def set_network_policy(self, handle: Handle, policy: Network) -> None:
        """As `protocol.SupportsNetworkPolicy.set_network_policy`; forks have the new one, too."""
        require(self, "network_policy")
        place = self._engine.at(handle)
        try:
            place.member.backend.set_network_policy(place.inner, policy)
        except SandboxLost as error:
            raise self._engine.lost(handle, error) from error
        allowed = policy if isinstance(policy, Policy) else Policy()
        with self._engine.turn:
            place.spec = dataclasses.replace(place.spec, network=allowed)

    def status(self, handle: Handle) -> Status:
        """As `protocol.Backend.status`."""
        try:
            place = self._engine.at(handle)
        except SandboxLost as lost:
            return Status(False, lost.reason, 0.0, None)
        return place.member.backend.status(place.inner)

    def renew(self, handle: Handle) -> None:
        """As `protocol.Backend.renew`."""
        with self._engine.turn:
            self._engine.at(handle)
            self._engine.core.renew(self._engine.now(), self._engine.core.leases[handle.id])

    def renew_owner(self, owner: str) -> int:
        """Renews all that an owner has; returns how many there are."""
        with self._engine.turn:
            leases = self._engine.core.of(owner)
            for lease in leases:
                self._engine.core.renew(self._engine.now(), lease)
            return len(leases)

    def close(self, handle: Handle) -> None:
        """As `protocol.Backend.close`."""
        if lease := self._engine.core.leases.get(handle.id):
            self._engine.close(lease, "closed")

    def close_owner(self, owner: str) -> None:
        """Ends all that an owner has or waits for."""
        with self._engine.turn:
            leases = self._engine.core.of(owner)
        for lease in leases:
            self._engine.close(lease, "closed")

    def node_pids(self) -> list[int]:
        """The processes of the nodes that are alive."""
        return [member.backend.pid for member in self._engine.alive()]

    def shutdown(self) -> None:
        """As `protocol.Backend.shutdown`."""
        with self._engine.turn:
            self._engine.open = False
            for lease in self._engine.core.open():
                self._engine.core.close(self._engine.now(), lease, "closed")
            self._engine.turn.notify_all()
        self._keeper.stop()
        for member in list(self._engine.members.values()):
            member.backend.shutdown()
        with self._engine.turn:
            for lease in self._engine.core.open():
                self._engine.core.ended(self._engine.now(), lease, "closed")
            self._engine.places.clear()
            self._engine.log.close()

    def _client(self, handle: Handle) -> Client:
        place = self._engine.at(handle)
        return place.member.backend._client(place.inner)

    def _env(self, handle: Handle) -> dict[str, str]:
        place = self._engine.at(handle)
        return place.member.backend._env(place.inner)

    def _new_oom_kills(self, handle: Handle) -> int:
        place = self._engine.at(handle)
        return place.member.backend._new_oom_kills(place.inner)

    def _lost(self, handle: Handle, error: SandboxLost) -> SandboxLost:
        return self._engine.lost(handle, error)
