"""Shuffled, mixed, sharded and checkpointable batches, with Grain.

The order is a function of the seed and of the position alone, so the state of an iterator is one
number however long it has run. (Importing this module imports jax, through Grain.)
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from c2.config import ConfigError
from c2.data.packing import Batch, PackedRows


def batches(
    rows: PackedRows,
    *,
    batch: int,
    seed: int,
    weights: Sequence[float] | None = None,
    shard: int = 0,
    shards: int = 1,
) -> grain.IterDataset[Batch]:
    """An endless dataset of batches, dicts of arrays [batch / shards, context].

    Each source is shuffled anew every time it has been gone through, and contributes rows, and so
    tokens, in proportion to its weight. Global batch number i consists of the same rows for every
    number of shards; a shard is a process, and holds `batch / shards` of these rows.

    `iter()` of the result gives an iterator with `get_state` and `set_state`, which is also a
    checkpointable of Orbax. A restored iterator continues with bitwise the same batches; the state
    of an iterator over other data is refused with a ConfigError.

    Args:
      rows: the packed corpus.
      batch: rows in a global batch.
      seed: decides about the order.
      weights: the weight of each source of the config, by its index. None: all rows are equally
        frequent, whatever source they are from.
      shard: index of this process.
      shards: number of processes.

    Raises:
      ConfigError: if the corpus is smaller than one batch.
    """
    if batch < 1 or batch % shards:
        raise ConfigError(
            f"batch: {batch} is not legal; legal: a multiple of the {shards} processes"
        )
    if len(rows) < batch:
        left_out = f"; {rows.dropped:,} longer than a row are left out" if rows.dropped else ""
        raise ConfigError(
            f"batch: {batch:,} rows of {rows.context:,} tokens, but the documents fill only "
            f"{len(rows):,} ({rows.tokens:,} tokens{left_out}); legal: no more than they fill, or "
            "a larger corpus"
        )
    if weights is None:
        spans, shares = [(0, len(rows))], [1.0]
    else:
        present = np.unique(rows.sources)
        spans = [np.searchsorted(rows.sources, [source, source + 1]) for source in present]
        shares = [float(weights[source]) for source in present]
    # Grain adds the epoch to the seed: distant seeds keep runs from being shifts of each other.
    seeds = np.random.SeedSequence(seed).generate_state(len(spans))
    orders = [
        grain.MapDataset.range(int(first), int(last)).shuffle(seed=int(order_seed)).repeat()
        for (first, last), order_seed in zip(spans, seeds, strict=True)
    ]
    mixed = grain.MapDataset.mix(orders, shares)
    mine = mixed[shard::shards].map(rows.__getitem__).batch(batch // shards)
    # Building a batch takes well under a millisecond, so threads would only add their overhead.
    dataset = mine.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    settings = (rows.store.fingerprint, rows.context, len(rows), batch, seed, shares)
    mark = hashlib.blake2b(repr(settings).encode("utf-8"), digest_size=16).hexdigest()
    return _Marked(dataset, mark)


class _Marked(grain.IterDataset[Batch]):
    """Gives iterators that put a mark of the data into their state."""

    def __init__(self, parent: grain.IterDataset[Batch], mark: str) -> None:
        super().__init__(parent)
        self._mark = mark

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return _MarkedIterator(iter(self._parent), self._mark)


class _MarkedIterator(grain.DatasetIterator[Batch]):
    """Refuses a state that was taken over other data: the position would mean something else.

    A run's config cannot tell, since the files behind a path may change, or the interpreter whose
    standard library is the corpus.
    """

    def __init__(self, parent: grain.DatasetIterator[Batch], mark: str) -> None:
        super().__init__(parent)
        self._mark = mark

    def __next__(self) -> Batch:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {"data": self._mark, **self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        position = dict(state)
        if position.pop("data", None) != self._mark:
            raise ConfigError(
                "sources: the data have changed since this checkpoint was written (documents, "
                "tokenizer, context, batch size, seed or weights); use a new workdir"
            )
        self._parent.set_state(position)
