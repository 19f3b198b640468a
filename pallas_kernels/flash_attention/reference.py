"""Attention as its formula says: the whole score matrix, in f32."""

import jax
import jax.numpy as jnp


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float,
    positions: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
) -> jax.Array:
    """Same contract as `pallas_kernels.flash_attention.flash_attention`; finite numbers only."""
    q, k, v32 = (a.astype(jnp.float32) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if kv_segment_ids is None:
        kv_segment_ids, kv_positions = segment_ids, positions
    visible = segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    if positions is None:
        index = jnp.arange(q.shape[1])
        visible &= index[:, None] >= index
    else:
        visible &= positions[:, :, None] >= kv_positions[:, None, :]
        visible &= segment_ids[:, :, None] != 0
    visible = visible[:, None]
    weights = jax.nn.softmax(scores, axis=-1, where=visible)
    weights = jnp.where(visible.any(-1, keepdims=True), weights, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v32).astype(v.dtype)
