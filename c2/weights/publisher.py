"""The trainer's side: encodes, uploads and announces versions in the background.

States of a publisher, and what a failure does::

    idle ---publish---> encoding -> uploaded -> committed -> announced -> (anchor, pruning) -> idle
                           |           |            |
                           |           |            + announcing, noting the number, anchor,
                           |           |              pruning: a warning
                           |           + the commit's answer is lost: the base is unknown, so the
                           |             next version is written in full
                           + nothing has happened: the next version is a delta against the same base

An error shows in the next `publish`, `wait` or `close`. Killed at any point, a publisher leaves
committed versions and objects that nothing refers to, which pruning removes. The next one begins
with a full version.

Nobody but a publisher removes or changes anything of a chain. Where that happens all the same, a
reader that needs what is gone says so and waits for the next full version: the next multiple of
``anchor_every``, or the first of another publisher. Numbers go on from the highest ever given.

Objects of a chain::

    versions/V    manifest; creating it is the commit, and a number can be created once
    anchors/V     manifest of the same version with all chunks in full; counts for readers if V is
                  committed with its chain hash, and for pruning if V has been reached
    blobs/V-...   chunks of a rank; no name is written twice
    parts/V-...   a rank's share of a manifest, for the leader
    writer/EPOCH  see `c2.weights.lease`

Rank 0 is the leader: it holds the lease and joins the other ranks' parts. The base that deltas are
taken against advances after the commit only.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import numpy as np

from c2.config import ConfigError
from c2.weights import blob, lease, manifest, ranks
from c2.weights.blob import State
from c2.weights.lease import HeldError, Lease
from c2.weights.manifest import Manifest, MismatchError, Tensors
from c2.weights.ranks import Share
from c2.weights.shards import Part
from c2.weights.store import Store

Forms = Mapping[str, tuple[str, tuple[int, ...]]]

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublisherConfig:
    """How versions are written.

    Attributes:
      anchor_every: a version is written in full as well if its number is a multiple of this.
      keep_anchors: full versions that stay; what is older than all of them is deleted.
      chunk: elements that are encoded, stored and checked at once.
      workers: threads that encode.
      lease_seconds: after which a writer without a sign of life counts as dead.
      patience: seconds that a rank waits for another one.
    """

    anchor_every: int = 25
    keep_anchors: int = 2
    chunk: int = 1 << 20
    workers: int = 1
    lease_seconds: float = 10.0
    patience: float = 600.0

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key in ("anchor_every", "keep_anchors", "chunk", "workers"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least 1")
        for key in ("lease_seconds", "patience"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: above 0")


class Published(NamedTuple):
    """What became of a state, and what it took on this rank.

    Attributes:
      version: its number.
      step: the trainer's.
      numbers: elements of this rank.
      changes: how many of them changed; all in a full version.
      stored: bytes they were encoded to.
      seconds: from the copy to the commit.
      held_up: seconds for which `Publisher.publish` did not return: those that the trainer lost.
    """

    version: int
    step: int
    numbers: int
    changes: int
    stored: int
    seconds: float
    held_up: float


class Publisher:
    """One rank of a chain's only writer.

    Args:
      store: of the chain.
      config: how to write.
      owner: who writes, for the message that a second writer gets.
      notify: called in the background with every committed version; the signal to load it.
      rank: of this process; 0 takes the lease.
      ranks: number of processes with shards.
      epoch: for the other ranks, `Publisher.epoch` of rank 0.

    Raises:
      HeldError: if another process writes this chain.
      ConfigError: if the store cannot keep two writers apart.
    """

    def __init__(
        self,
        store: Store,
        config: PublisherConfig,
        *,
        owner: str,
        notify: Callable[[int], None] | None = None,
        rank: int = 0,
        ranks: int = 1,
        epoch: int | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank: {rank}; legal: 0 to {ranks - 1}")
        if (epoch is None) != (rank == 0):
            raise ConfigError(f"epoch: {epoch} on rank {rank}; legal: that of rank 0 on the others")
        self._store, self._config, self._notify = store, config, notify
        self._rank, self._ranks = rank, ranks
        self._lease = Lease.acquire(store, owner, config.lease_seconds) if rank == 0 else None
        self.epoch = epoch if self._lease is None else self._lease.epoch
        self._thread = ThreadPoolExecutor(1, "publish weights")
        self._pending: Future[Published] | None = None
        self._base: tuple[Manifest, State] | None = None  # as last committed
        self._attempts = 0

    @property
    def ready(self) -> bool:
        """Whether `publish` would start at once; what the leader says counts for all ranks."""
        return self._pending is None or self._pending.done()

    def publish(self, step: int, parts: Mapping[str, Part]) -> None:
        """Starts to publish a state.

        Returns as soon as arrays of numpy, which the caller may change, are copied; `jax.Array`s
        are taken as they are and must not be donated. Waits if the last state is still on its way:
        a trainer that never waits asks `ready` and leaves a state out. That loses nothing, since
        the next delta is against what was published last.

        Args:
          step: the trainer's name for the state.
          parts: this rank's rows of every tensor.

        Raises:
          HeldError: if another process has become the writer.
          MismatchError: if ranks do not cover the tensors.
          OSError: if the store failed. All three are errors of the state before; the new one is
            not taken then.
        """
        began = time.perf_counter()
        self.wait()
        taken = {
            name: part._replace(values=part.values.copy())
            if isinstance(part.values, np.ndarray)
            else part
            for name, part in parts.items()
        }
        held_up = time.perf_counter() - began
        self._pending = self._thread.submit(self._publish, step, taken, held_up)

    def wait(self) -> Published | None:
        """Waits for the state on its way, if any, and says what became of it; raises its error."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """Waits for the state on its way and lets another process become the writer."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._lease is not None:
                self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self, step: int, parts: Mapping[str, Part], held_up: float) -> Published:
        began = time.perf_counter()
        forms = {name: (str(part.values.dtype), part.shape) for name, part in parts.items()}
        state = blob.held(parts)
        link, old = self._base or (None, None)
        if old is not None and _places(old) != _places(state):
            raise MismatchError("tensors or rows are not those of the version before")
        version = 1 + (link.version if link else self._reached())
        tensors = self._write(version, state, old, forms)
        base = (link.version, link.chain) if link else None
        found = self._shared("versions", version, Share(step, base, tensors))
        self._base = None  # until the commit has been seen
        if found is None:
            name = f"versions/{version:08d}"
            found = ranks.await_commit(self._store, name, self.epoch, step, self._config.patience)
        else:
            self._commit(found)
        self._base = found, state
        chunks = [chunk for tensor in tensors.values() for chunk in tensor.chunks]
        published = Published(
            version=version,
            step=step,
            numbers=sum(held.bits.size for held in state.values()),
            changes=sum(chunk.changes for chunk in chunks),
            stored=sum(chunk.length for chunk in chunks),
            seconds=time.perf_counter() - began,
            held_up=held_up,
        )
        self._announce(version)
        try:
            if self._lease is not None:
                self._lease.reach(version)
            if found.base is not None and version % self._config.anchor_every == 0:
                self._anchor(found, self._write(version, state, None, forms))
            self._prune(version)
        except (OSError, MismatchError) as error:
            _LOG.warning("version %d is published, but not all behind it done: %s", version, error)
        return published

    def _reached(self) -> int:
        """The highest number so far, whether or not its version is there."""
        there = int(max(self._store.names("versions"), default=0))
        return max(there, lease.reached(self._store, self.epoch))

    def _write(self, version: int, state: State, base: State | None, forms: Forms) -> Tensors:
        """This rank's chunks in a blob of their own."""
        self._attempts += 1
        name = f"blobs/{version:08d}-{self.epoch:06d}-{self._rank:05d}-{self._attempts:08d}"
        chunk, workers = self._config.chunk, self._config.workers
        return blob.write(self._store, name, state, base, forms, chunk=chunk, workers=workers)

    def _shared(self, kind: str, version: int, share: Share) -> Manifest | None:
        """What all ranks' shares make, on the leader; None on the others."""

        def name(rank: int) -> str:
            return f"parts/{version:08d}-{self.epoch:06d}-{kind}-{rank:05d}"

        if self._lease is None:
            ranks.hand_in(self._store, name(self._rank), share)
            return None
        patience = self._config.patience
        others = [
            ranks.collect(self._store, name(rank), share.step, patience)
            for rank in range(1, self._ranks)
        ]
        return ranks.join([share, *others], version=version, epoch=self.epoch)

    def _commit(self, new: Manifest) -> None:
        name, data = f"versions/{new.version:08d}", manifest.dump_manifest(new)
        if new.base is None:
            self._store.write(f"anchors/{new.version:08d}", data)
        self._lease.check()
        try:
            self._store.create(name, data)
        except FileExistsError:
            # it may be ours, if the store lost its answer and was asked again
            if self._store.read(name) != data:
                raise HeldError(f"{name} has been published by another process") from None

    def _announce(self, version: int) -> None:
        if self._notify is not None:
            try:
                self._notify(version)
            except Exception:  # of whatever kind: the version stands, and readers also poll
                _LOG.warning("version %d is published, but not announced", version, exc_info=True)

    def _anchor(self, committed: Manifest, tensors: Tensors) -> None:
        share = Share(committed.step, None, tensors)
        full = self._shared("anchors", committed.version, share)
        if full is not None:
            anchor = dataclasses.replace(committed, base=None, tensors=full.tensors)
            name = f"anchors/{committed.version:08d}"
            self._store.write(name, manifest.dump_manifest(anchor))

    def _prune(self, newest: int) -> None:
        """Deletes what is older than the oldest anchor to keep: manifests before their blobs."""
        anchors = [name for name in self._store.names("anchors") if int(name) <= newest]
        if self._lease is None or len(anchors) <= self._config.keep_anchors:
            return
        oldest = anchors[-self._config.keep_anchors]
        for folder in ("anchors", "versions", "parts", "blobs"):
            for name in self._store.names(folder):
                if name.split("-")[0] < oldest:
                    self._store.remove(f"{folder}/{name}")


def _places(state: State) -> dict[str, tuple]:
    return {name: (held.start, held.bits.dtype, held.bits.size) for name, held in state.items()}
