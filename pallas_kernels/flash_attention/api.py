"""Public entry point of causal attention over packed documents."""

import jax

from pallas_kernels.flash_attention import xla


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, scale: float
) -> jax.Array:
    """Attends to earlier tokens of the same segment, in memory linear in the sequence length.

    Rows must hold tokens in order: a key at a later index than the query is never visible.

    Args:
      q: queries [batch, seq, heads, qk].
      k: keys [batch, seq, heads, qk].
      v: values [batch, seq, heads, v]; ``v`` may differ from ``qk``.
      segment_ids: int32 [batch, seq]; tokens see only tokens with an equal id.
      scale: factor on query-key products.

    Returns:
      [batch, seq, heads, v] in the dtype of ``v``; softmax and sums are computed in f32.

    Raises:
      ValueError: if shapes disagree.
    """
    batch, seq = segment_ids.shape
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} disagree")
    if q.shape[:2] != (batch, seq):
        raise ValueError(f"segment_ids {segment_ids.shape} must be [batch, seq] of q {q.shape}")
    return xla.flash_attention(q, k, v, segment_ids, scale)
