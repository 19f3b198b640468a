"""Which tokens of a sequence each context-parallel rank holds, so that all have the same to do.

A token attends to itself and the tokens before it in its document, so work grows along a document.
The order of tokens is free otherwise: attention looks at positions and segments, not at indices.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError
from c2.parallel.mesh import TOKENS, MeshConfig

CHUNKS = "chunks"  # field of an arranged batch
CHUNK = 64  # tokens of a chunk of `balanced`


def zigzag(seq_len: int, cp: int) -> np.ndarray:
    """Two chunks per rank, one from either end (report section 5).

    Of 2 * cp chunks rank r holds chunks r and 2 * cp - 1 - r: for one document that fills the
    sequence, all ranks have the same number of query-key pairs.

    Args:
      seq_len: tokens of the sequence.
      cp: ranks.

    Returns:
      Indices of the tokens, int32 [cp, seq_len // cp].

    Raises:
      ValueError: unless seq_len is a multiple of 2 * cp.
    """
    if seq_len < 1 or cp < 1 or seq_len % (2 * cp):
        raise ValueError(f"seq_len {seq_len} must be a positive multiple of 2 * cp = {2 * cp}")
    chunks = np.arange(seq_len, dtype=np.int32).reshape(2 * cp, -1)
    return np.concatenate([chunks[:cp], chunks[: cp - 1 : -1]], axis=1)


def balanced(segment_ids: np.ndarray, cp: int, chunk: int = CHUNK) -> np.ndarray:
    """Chunks dealt by their work: balanced for packed documents, where `zigzag` is not.

    Chunks are sorted by their number of query-key pairs and dealt to and fro, rank 0 to cp - 1 and
    back; a single document is dealt exactly as by `zigzag` with finer chunks. What remains uneven
    is levelled by exchanging chunks between the ranks with most and least work.

    Args:
      segment_ids: int [seq], 0 on padding, which is no work.
      cp: ranks.
      chunk: consecutive tokens that stay together: attention kernels skip blocks that no query can
        see, so scattered tokens would cost more than they balance.

    Returns:
      Indices of the tokens, int32 [cp, seq // cp], ascending within a rank.

    Raises:
      ValueError: unless seq is a multiple of chunk * cp.
    """
    seq = len(segment_ids)
    if seq < 1 or cp < 1 or chunk < 1 or seq % (chunk * cp):
        raise ValueError(f"seq {seq} must be a positive multiple of chunk * cp = {chunk * cp}")
    work = pairs(segment_ids).reshape(-1, chunk).sum(1)
    order = np.argsort(-work, kind="stable").reshape(-1, cp)
    order[1::2] = order[1::2, ::-1]
    held = _levelled(np.ascontiguousarray(order.T), work)
    tokens = held[..., None] * chunk + np.arange(chunk)
    return np.sort(tokens.reshape(cp, -1), axis=1).astype(np.int32)


def _levelled(held: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Exchanges single chunks between the busiest and the idlest rank while that helps.

    Args:
      held: ids of chunks, int [rank, place].
      work: of each chunk.

    Returns:
      Like ``held``.
    """
    load = work[held].sum(1)
    for _ in range(held.size):
        busiest, idlest = load.argmax(), load.argmin()
        gap = load[busiest] - load[idlest]
        moved = work[held[busiest]][:, None] - work[held[idlest]]
        give, take = np.unravel_index(np.abs(2 * moved - gap).argmin(), moved.shape)
        if not 0 < moved[give, take] < gap:
            break
        pair = (busiest, give), (idlest, take)
        held[pair[0]], held[pair[1]] = held[pair[1]], held[pair[0]]
        load[busiest] -= moved[give, take]
        load[idlest] += moved[give, take]
    return held


def pairs(segment_ids: np.ndarray) -> np.ndarray:
    """Keys that each query sees, int64 [seq]: its position in its document plus 1, 0 on padding."""
    index = np.arange(len(segment_ids))
    starts = np.concatenate([[True], segment_ids[1:] != segment_ids[:-1]])
    begin = np.maximum.accumulate(np.where(starts, index, 0))
    return np.where(segment_ids > 0, index - begin + 1, 0)


def imbalance(layout: np.ndarray, segment_ids: np.ndarray) -> float:
    """Query-key pairs of the busiest rank over the mean of all ranks; 1 is perfect."""
    work = pairs(segment_ids)[layout].sum(1)
    return float(work.max() / max(work.mean(), 1))


def arrange(batch: Mapping[str, np.ndarray], cfg: MeshConfig) -> dict[str, np.ndarray]:
    """Puts the tokens of each row in the order in which context-parallel ranks hold them.

    Args:
      batch: arrays [rows, seq, ...], ``segment_ids`` among them.
      cfg: number of ranks and layout.

    Returns:
      The batch in that order, and as `CHUNKS` the number of each chunk of consecutive tokens in its
      row, int32 [rows, chunks]. With one rank, the batch as it is.

    Raises:
      ConfigError: if the ranks do not divide the tokens of a row.
    """
    if cfg.context == 1:
        return dict(batch)
    segment_ids = np.asarray(batch["segment_ids"])
    seq = segment_ids.shape[1]
    chunk = seq // (2 * cfg.context) if cfg.layout == "zigzag" else CHUNK
    try:
        if cfg.layout == "zigzag":
            orders = [zigzag(seq, cfg.context)] * len(segment_ids)
        else:
            orders = [balanced(row, cfg.context, chunk) for row in segment_ids]
    except ValueError as error:
        raise ConfigError(f"mesh.context: {error}") from None
    order = np.stack([tokens.reshape(-1) for tokens in orders])  # [rows, seq]
    rows = np.arange(len(order))[:, None]
    arranged = {name: np.asarray(x)[rows, order] for name, x in batch.items()}
    return arranged | {CHUNKS: order[:, ::chunk] // chunk}


def following(x: jax.Array, chunks: jax.Array) -> jax.Array:
    """The values of the next token of the row, 0 at its end, in a manual region.

    Only the first token of each chunk travels.

    Args:
      x: of this rank's tokens [rows, tokens, ...].
      chunks: of this rank, see `arrange` [rows, some chunks].
    """
    rows, held = chunks.shape
    cut = x.reshape(rows, held, -1, *x.shape[2:])
    firsts = jax.lax.all_gather(cut[:, :, 0], TOKENS, axis=1, tiled=True)
    place = jnp.argsort(jax.lax.all_gather(chunks, TOKENS, axis=1, tiled=True), axis=1)
    last = place.shape[1] - 1
    source = jnp.take_along_axis(place, jnp.minimum(chunks + 1, last), axis=1)
    rest = (1,) * (x.ndim - 2)
    first = jnp.take_along_axis(firsts, source.reshape(rows, held, *rest), axis=1)
    first = jnp.where((chunks == last).reshape(rows, held, *rest), 0, first)
    return jnp.concatenate([cut[:, :, 1:], first[:, :, None]], axis=2).reshape(x.shape)
