"""Who sees whom, and in which blocks of scores anybody does: what all backends share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Positions of a key that no query sees and of a query that sees no key; legal ones lie between.
NEVER = jnp.iinfo(jnp.int32).max
NOTHING = -1

MASKED = -1e30  # score of a key that is not seen; finite, so that no differences are NaN
UNSEEING = MASKED / 2  # log-sum-exp of a query without visible keys: exp(MASKED - UNSEEING) is 0


class Marks(NamedTuple):
    """A query sees the keys of its own segment at its own and lower positions.

    Attributes:
      segments: int32 [batch, q_seq].
      positions: int32 [batch, q_seq].
      kv_segments: int32 [batch, kv_seq].
      kv_positions: int32 [batch, kv_seq].
    """

    segments: jax.Array
    positions: jax.Array
    kv_segments: jax.Array
    kv_positions: jax.Array


def in_order(segment_ids: jax.Array) -> Marks:
    """Marks of queries and keys that are the same tokens, and whose positions are their indices."""
    positions = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    return Marks(segment_ids, positions, segment_ids, positions)


def blocks_seen(marks: Marks, queries: int, keys: int) -> jax.Array:
    """Which blocks of scores may hold a visible key, bool [batch, block of queries, block of keys].

    Decided by the least and greatest segment and position of either side, so true for some blocks
    without a visible key, but never false for one with. Lengths are multiples of the blocks.
    """

    def ends(array, size, counts):
        """Least and greatest value of each block among the tokens that count."""
        blocks = array.shape[0], -1, size
        array, counts = array.reshape(blocks), counts.reshape(blocks)
        large = jnp.iinfo(jnp.int32).max
        return jnp.where(counts, array, large).min(-1), jnp.where(counts, array, -large).max(-1)

    sees, seen = marks.positions > NOTHING, marks.kv_positions < NEVER
    _, latest = ends(marks.positions, queries, sees)
    first, last = ends(marks.segments, queries, sees)
    earliest, _ = ends(marks.kv_positions, keys, seen)
    kv_first, kv_last = ends(marks.kv_segments, keys, seen)
    return (
        (earliest[:, None, :] <= latest[:, :, None])
        & (kv_first[:, None, :] <= last[:, :, None])
        & (first[:, :, None] <= kv_last[:, None, :])
    )
