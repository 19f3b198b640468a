"""Cached decoding: what is kept of earlier tokens, and attention over it.

Layers only read the cache. Each returns the entries of its new tokens, and one scatter at the end
of the forward pass adds those of all layers, in place if the caller donates the cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

MASKED = -1e30  # finite, so that a row without visible keys gives no NaN


@struct.dataclass
class Tokens:
    """What attention must know of the tokens besides their activations, once per forward."""

    cos: jax.Array  # [batch, seq, rotary // 2]
    sin: jax.Array  # [batch, seq, rotary // 2]
    positions: jax.Array  # [batch, seq]
    segment_ids: jax.Array  # [batch, seq], 0 on padding
    cached: jax.Array | None = None  # int32 [batch], tokens in the cache; None if there are none


@struct.dataclass
class Cache:
    """Earlier tokens of every row; made by `c2.models.init_cache`, returned by `forward`.

    A row is one sequence. What its attention keeps per token and layer is up to the kind: one
    latent with the rotary key (`c2.models.mla`), or keys and values (`c2.models.gqa`).

    ``length`` goes on counting when a row is full, while further tokens are not stored: a length
    above the capacity says that something was lost.
    """

    dense: Any  # leaves [layer, batch, capacity, ...]; None without such layers
    moe: Any
    length: jax.Array  # int32 [batch]


def append(cache: Cache, dense: Any, moe: Any, real: jax.Array) -> Cache:
    """Adds the entries of new tokens behind the old ones of each row.

    Args:
      cache: what is there.
      dense: leaves [layer, batch, seq, ...].
      moe: likewise.
      real: bool [batch, seq]; other tokens are padding, wherever it is, and leave no trace.
    """
    rows = jnp.arange(real.shape[0])[:, None]

    def add(old, new):
        slots = jnp.where(real, next_positions(cache.length, real), old.shape[2])
        return old.at[:, rows, slots].set(new.astype(old.dtype), mode="drop")

    return Cache(
        dense=jax.tree.map(add, cache.dense, dense),
        moe=jax.tree.map(add, cache.moe, moe),
        length=cache.length + real.sum(-1, dtype=jnp.int32),
    )


def next_positions(length: jax.Array, real: jax.Array) -> jax.Array:
    """Positions of new tokens behind ``length`` old ones, int32 [batch, seq]."""
    return length[:, None] + jnp.cumsum(real, axis=-1, dtype=jnp.int32) - 1


def attend(
    q: jax.Array,
    past: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    tokens: Tokens,
    scale: float,
) -> jax.Array:
    """Attention of new tokens over the cached ones and, causally, each other.

    Args:
      q: queries of the new tokens [batch, seq, heads, qk].
      past: cached keys [batch, capacity, kv_heads, qk] and values [batch, capacity, kv_heads, v].
      new: keys and values of the new tokens, [batch, seq, kv_heads, ...].
      tokens: of the new tokens.
      scale: factor on query-key products.

    Returns:
      [batch, seq, heads, v] in the dtype of the new values; softmax and sums are computed in f32.
    """
    batch, seq, heads, features = q.shape
    kv_heads, capacity = new[0].shape[2], past[0].shape[1]
    grouped = batch, kv_heads, heads // kv_heads, seq
    queries = heads // kv_heads * seq
    # Both products have the cache on the side on which XLA:CPU takes it as it lies; elsewhere it
    # would be transposed first. Barriers keep it from swapping the sides back.
    columns = (q * scale).reshape(batch, seq, kv_heads, -1, features).transpose(0, 2, 4, 3, 1)
    columns = columns.reshape(batch, kv_heads, features, queries)

    def scores(keys, visible):
        raw = jnp.einsum("btgd,bgdn->bgtn", keys, columns, preferred_element_type=jnp.float32)
        raw = jax.lax.optimization_barrier(raw).swapaxes(2, 3).reshape(*grouped, -1)
        return jnp.where(visible[:, None, None], raw, MASKED)

    held = jnp.arange(capacity) < tokens.cached[:, None]  # [batch, capacity]
    index = jnp.arange(seq)
    causal = (index[:, None] >= index) & (tokens.segment_ids > 0)[:, None, :]
    both = jnp.concatenate([scores(past[0], held[:, None]), scores(new[0], causal)], axis=-1)
    # rounded where flash attention rounds: weights before they are divided by their sum
    weights = jnp.exp(both - both.max(-1, keepdims=True))
    total = weights.sum(-1).reshape(batch, kv_heads, queries, 1)

    def mix(weights, values):
        rows = weights.astype(values.dtype).reshape(batch, kv_heads, queries, values.shape[1])
        rows = jax.lax.optimization_barrier(rows)
        return jnp.einsum("bgnt,btgd->bgnd", rows, values, preferred_element_type=jnp.float32)

    out = mix(weights[..., :capacity], past[1]) + mix(weights[..., capacity:], new[1])
    out = jax.lax.optimization_barrier((out / total).astype(new[1].dtype)).reshape(*grouped, -1)
    return jnp.moveaxis(out, 3, 1).reshape(batch, seq, heads, -1)
