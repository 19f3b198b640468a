"""Which blocks of keys a block of queries has to visit, and the other way round."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.marks import Marks, blocks_seen

_WHOLE, _PARTIAL, _NONE = range(3)  # how much of a block sees, or is seen by, another


class BlockPlan(NamedTuple):
    """What a block works on: first blocks of the other side that need no mask, then the rest.

    Attributes:
      order: int32 [batch, block, other block]; numbers of blocks of the other side.
      unmasked: int32 [batch, block]; how many see each other wholly, the first ones of the order.
      visited: int32 [batch, block]; how many may see each other at all, the former included. Those
        behind are to be left out.
    """

    order: jax.Array
    unmasked: jax.Array
    visited: jax.Array


def for_queries(marks: Marks, block_q: int, block_kv: int) -> BlockPlan:
    """Blocks of keys that every block of queries visits; lengths are multiples of the blocks."""
    return _plan(_visibility(marks, block_q, block_kv))


def for_keys(marks: Marks, block_q: int, block_kv: int) -> BlockPlan:
    """Blocks of queries that every block of keys visits; lengths are multiples of the blocks."""
    return _plan(_visibility(marks, block_q, block_kv).swapaxes(1, 2))


def _visibility(marks: Marks, block_q: int, block_kv: int) -> jax.Array:
    segments, positions = (_blocks(x, block_q)[:, :, None] for x in marks[:2])
    kv_segments, kv_positions = (_blocks(x, block_kv)[:, None] for x in marks[2:])
    low = jnp.minimum(segments.min(-1), kv_segments.min(-1))
    high = jnp.maximum(segments.max(-1), kv_segments.max(-1))
    whole = (low == high) & (kv_positions.max(-1) <= positions.min(-1))
    some = blocks_seen(marks, block_q, block_kv)
    return jnp.where(whole, _WHOLE, jnp.where(some, _PARTIAL, _NONE))


def _blocks(x: jax.Array, size: int) -> jax.Array:
    return x.reshape(len(x), -1, size)


def _plan(visibility: jax.Array) -> BlockPlan:
    order = jnp.argsort(visibility, axis=-1, stable=True)
    counts = ((visibility <= most).sum(-1) for most in (_WHOLE, _PARTIAL))
    return BlockPlan(*(x.astype(jnp.int32) for x in (order, *counts)))
