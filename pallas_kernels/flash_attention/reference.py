"""Attention as its formula says: the whole score matrix, in f32."""

import jax
import jax.numpy as jnp


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, scale: float
) -> jax.Array:
    """Same contract as `pallas_kernels.flash_attention.flash_attention`."""
    q, k, v32 = (a.astype(jnp.float32) for a in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    index = jnp.arange(q.shape[1])
    visible = (index[:, None] >= index) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v32).astype(v.dtype)
