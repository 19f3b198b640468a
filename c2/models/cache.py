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
    cached: jax.Array | None = None  # int32 [batch], tokens in the cache; None without a cache


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
    kv_heads = new[0].shape[2]
    q = (q * scale).reshape(batch, seq, kv_heads, heads // kv_heads, features)

    def scores(keys, visible):
        raw = jnp.einsum("bsgrd,btgd->bgrst", q, keys, preferred_element_type=jnp.float32)
        return jnp.where(visible[:, None, None], raw, MASKED)

    held = jnp.arange(past[0].shape[1]) < tokens.cached[:, None]  # [batch, capacity]
    index = jnp.arange(seq)
    causal = (index[:, None] >= index) & (tokens.segment_ids > 0)[:, None, :]
    both = [scores(past[0], held[:, None]), scores(new[0], causal)]
    weights = jax.nn.softmax(jnp.concatenate(both, -1), axis=-1).astype(new[1].dtype)

    def mix(weights, values):
        return jnp.einsum("bgrst,btgd->bsgrd", weights, values, preferred_element_type=jnp.float32)

    capacity = past[0].shape[1]
    out = mix(weights[..., :capacity], past[1]) + mix(weights[..., capacity:], new[1])
    return out.reshape(batch, seq, heads, -1).astype(new[1].dtype)
