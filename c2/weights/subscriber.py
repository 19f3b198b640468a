"""A rollout engine's side: rebuilds versions and puts whole ones in its hands.

States of a subscriber, and what a failure does::

    empty ----poll----> staging -> checked -> serving V ----poll----> staging (V stays) -> ...
                           |
                           + a link missing, damaged, or of another base: from the newest sound
                             anchor, said in the log; if there is none, BrokenLinkError
                           + the store has only older versions than V: BrokenLinkError
                           + tensors that are not the model's: MismatchError
                           + the store fails: OSError

After an error ``current`` is what it was, and the next `poll` tries again. A version is staged
beside the served one and becomes ``current`` by one assignment, after all its checksums have
agreed; applying a version twice, or out of order, cannot happen, since the store says which
version is the newest and the chain hash which base it has. Nothing is kept between processes:
after a restart the state comes from the newest anchor. Subscribers know nothing of each other.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from c2.config import ConfigError
from c2.weights import blob, manifest
from c2.weights.blob import Cost, State
from c2.weights.manifest import BrokenLinkError, Manifest, MismatchError
from c2.weights.shards import Want
from c2.weights.store import Store

_LOG = logging.getLogger(__name__)


class Snapshot(NamedTuple):
    """A version to compute with.

    Attributes:
      version: its number.
      step: the trainer's.
      chain: its chain hash.
      tensors: the wanted rows of every tensor; read-only.
      cost: of building it.
    """

    version: int
    step: int
    chain: str
    tensors: Mapping[str, np.ndarray]
    cost: Cost


class Subscriber:
    """A reader of a chain that holds some rows of every tensor.

    Args:
      store: of the chain.
      want: name -> rows, for every tensor of the model.
      workers: threads that read and decode.

    Attributes:
      current: the newest version that `poll` has built; None before the first one. May be read by
        other threads while `poll` runs in one of them.
    """

    def __init__(self, store: Store, want: Mapping[str, Want], *, workers: int = 1) -> None:
        if workers < 1:
            raise ConfigError(f"workers: {workers}; legal: at least 1")
        self._store, self._want, self._workers = store, dict(want), workers
        self._held: tuple[Manifest, State] | None = None
        self._cost = Cost()
        self.current: Snapshot | None = None

    def poll(self) -> bool:
        """Builds the newest version; says whether ``current`` is another one now.

        Raises:
          BrokenLinkError: if no anchor leads to it.
          MismatchError: if its tensors are not those that are wanted.
          OSError: if the store fails.
        """
        versions = self._store.names("versions")
        if not versions or (self.current and int(versions[-1]) == self.current.version):
            return False
        newest = int(versions[-1])
        if self.current and newest < self.current.version:
            raise BrokenLinkError(f"version {newest} is the newest of a store that had later ones")
        self._cost = Cost()
        built = self._by_deltas(newest) or self._from_anchor(newest)
        link, state = built
        tensors = {name: _rows(self._want[name], held) for name, held in state.items()}
        snapshot = Snapshot(link.version, link.step, link.chain, tensors, self._cost)
        self._held, self.current = built, snapshot
        return True

    def follow(
        self,
        deliver: Callable[[Snapshot], None],
        *,
        stop: threading.Event,
        wake: threading.Event,
        seconds: float,
    ) -> None:
        """Polls until ``stop`` is set, when ``wake`` is and every so many seconds.

        What `poll` raises is logged, and tried again. To be run in a thread of its own; set both
        events to end it at once.
        """
        while not stop.is_set():
            wake.clear()
            try:
                if self.poll():
                    deliver(self.current)
            except (BrokenLinkError, MismatchError, OSError) as error:
                served = self.current and self.current.version
                _LOG.warning("version %s stays: %s: %s", served, type(error).__name__, error)
            wake.wait(seconds)

    def _by_deltas(self, newest: int) -> tuple[Manifest, State] | None:
        """The newest version out of the held one; None if that does not work."""
        if self._held is None:
            return None
        try:
            return self._advance(self._held, newest)
        except BrokenLinkError as error:
            version = self._held[0].version
            _LOG.warning("from version %d to %d: %s; taking an anchor", version, newest, error)
            return None

    def _from_anchor(self, newest: int) -> tuple[Manifest, State]:
        """The newest version out of the newest anchor that leads to it."""
        problem = "there is none"
        anchors = [name for name in self._store.names("anchors") if int(name) <= newest]
        for name in reversed(anchors):
            try:
                anchor = self._manifest("anchors", int(name))
                # a writer that was killed may have left an anchor of a version it never committed
                if anchor.chain != self._manifest("versions", int(name)).chain:
                    raise BrokenLinkError("its version was not committed")
                return self._advance((anchor, self._stage(anchor, None)), newest)
            except BrokenLinkError as error:
                _LOG.warning("anchor %s: %s", name, error)
                problem = f"the last one tried: {error}"
        raise BrokenLinkError(f"no anchor leads to version {newest}; {problem}")

    def _advance(self, held: tuple[Manifest, State], newest: int) -> tuple[Manifest, State]:
        """Applies the versions after the held one, one by one."""
        link, state = held
        for version in range(link.version + 1, newest + 1):
            new = self._manifest("versions", version)
            if new.base is not None and (new.base, new.base_chain) != (link.version, link.chain):
                raise BrokenLinkError(f"version {version} follows another version {new.base}")
            link, state = new, self._stage(new, None if new.base is None else state)
        return link, state

    def _stage(self, new: Manifest, base: State | None) -> State:
        state, cost = blob.stage(self._store, new.tensors, self._want, base, workers=self._workers)
        self._cost = self._cost.plus(cost)
        return state

    def _manifest(self, folder: str, version: int) -> Manifest:
        name = f"{folder}/{version:08d}"
        try:
            found = manifest.load_manifest(self._store.read(name))
        except FileNotFoundError:
            raise BrokenLinkError(f"{name} is missing") from None
        except BrokenLinkError as error:
            raise BrokenLinkError(f"{name}: {error}") from error
        if found.version != version:
            raise BrokenLinkError(f"{name} is a copy of version {found.version}")
        return found


def _rows(want: Want, held: blob.Held) -> np.ndarray:
    start, stop = (at - held.start for at in want.flat)
    rows = held.bits[start:stop].view(np.dtype(want.dtype)).reshape(want.held)
    rows.flags.writeable = False
    return rows
