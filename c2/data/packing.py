"""Packs documents of any length into rows of one length.

A document longer than a row is cut into pieces of at most one row; each piece is a segment of its
own, as if it were a document: attention stays inside it and positions restart at 0. Because
segments do not see each other, it does not matter to the model which of them share a row, so rows
are packed once and only their order is shuffled, epoch after epoch.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from c2.data.store import TokenStore

Batch = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class PackedRows(Sequence[Batch]):
    """Random access to packed rows; a row is built from the flat tokens when it is asked for.

    `rows[i]` is a dict of arrays [context]: `tokens` int32, `targets` int32 (the next token of the
    piece), `positions` int32 (from 0 in each piece), `segment_ids` int32 (from 1, 0 is padding) and
    `loss_mask` float32 (1 where the target counts: not on padding, not on the last token of a
    piece, not where the target is part of a prompt; or the target's weight, if tokens have
    weights). Unused entries are 0.

    Attributes:
      store: the documents.
      context: length of a row.
      begins: int64 [piece], index of the piece's first token in `store.tokens`.
      lengths: int64 [piece].
      prompts: int64 [piece], leading tokens of the piece that belong to a prompt.
      first_piece: int64 [row + 1], the pieces of row i are first_piece[i] : first_piece[i + 1].
      sources: int32 [row], the source of the row's documents. Rows of a source are contiguous.
      dropped: number of documents left out because they are longer than a row.
    """

    store: TokenStore
    context: int
    begins: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    first_piece: np.ndarray
    sources: np.ndarray
    dropped: int

    @property
    def tokens(self) -> int:
        """Number of tokens in the rows, without padding."""
        return int(self.lengths.sum())

    @property
    def padding(self) -> float:
        """Share of the rows that is padding."""
        return 1 - self.tokens / max(len(self) * self.context, 1)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sources)

    def __iter__(self) -> Iterator[Batch]:
        """The rows in packed order."""
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, row: int) -> Batch:
        """One row as a dict of arrays [context]."""
        integers = ("tokens", "targets", "positions", "segment_ids")
        result = {name: np.zeros(self.context, np.int32) for name in integers}
        result["loss_mask"] = np.zeros(self.context, np.float32)
        start = 0
        pieces = range(self.first_piece[row], self.first_piece[row + 1])
        for segment, piece in enumerate(pieces, start=1):
            begin, length = self.begins[piece], self.lengths[piece]
            ids = self.store.tokens[begin : begin + length]
            end = start + length
            # The last prompt token already predicts the first token to be learned.
            learned = start + max(self.prompts[piece] - 1, 0)
            result["tokens"][start:end] = ids
            result["targets"][start : end - 1] = ids[1:]
            result["positions"][start:end] = np.arange(length)
            result["segment_ids"][start:end] = segment
            if self.store.weights is None:
                result["loss_mask"][learned : end - 1] = 1
            else:
                weights = self.store.weights[begin + 1 : begin + length]
                result["loss_mask"][start : end - 1] = weights
            start = end
        return result


def pack(
    store: TokenStore, context: int, *, overlong: Literal["split", "drop"] = "split"
) -> PackedRows:
    """Plans the rows. Every token is in exactly one row, except those of dropped documents.

    Args:
      store: tokenised documents.
      context: length of a row in tokens.
      overlong: whether documents longer than a row are cut into pieces or left out.
    """
    fits = (store.lengths <= context) | (overlong == "split")
    documents = np.flatnonzero(fits & (store.lengths > 0))
    per_document = -(-store.lengths[documents] // context)
    document = np.repeat(documents, per_document)
    number = np.arange(len(document)) - np.repeat(
        np.cumsum(per_document) - per_document, per_document
    )
    start = number * context  # of the piece in its document
    length = np.minimum(store.lengths[document] - start, context)
    source = store.sources[document]

    row = np.zeros(len(document), np.int64)
    rows = 0
    row_sources = []
    for one in np.unique(source):
        mine = np.flatnonzero(source == one)
        row[mine] = rows + best_fit(length[mine], context)
        used = row[mine].max() + 1 - rows
        row_sources.append(np.full(used, one, np.int32))
        rows += used
    order = np.argsort(row, kind="stable")
    return PackedRows(
        store=store,
        context=context,
        begins=(store.offsets[document] + start)[order],
        lengths=length[order],
        prompts=(store.prompts[document] - start).clip(0, length)[order],
        first_piece=np.searchsorted(row[order], np.arange(rows + 1)),
        sources=np.concatenate([np.zeros(0, np.int32), *row_sources]),
        dropped=int((~fits).sum()),
    )


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing bin packing: int64 [item], the row of each item.

    The longest item first, each into the fullest row that still has room. Uses at most 11/9 of the
    smallest possible number of rows, plus one.
    """
    rows = np.zeros(len(lengths), np.int64)
    count = 0
    spaces: list[tuple[int, int]] = []  # (free tokens, row) of the rows that are not full, sorted
    for item in np.argsort(-lengths, kind="stable"):
        length = int(lengths[item])
        at = bisect.bisect_left(spaces, (length, 0))
        if at < len(spaces):
            space, row = spaces.pop(at)
        else:
            space, row = capacity, count
            count += 1
        rows[item] = row
        if space > length:
            bisect.insort(spaces, (space - length, row))
    return rows
