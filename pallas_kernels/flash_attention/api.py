"""Public entry point of causal attention over packed documents."""

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention import blackwell, hopper, tpu, vjp, xla
from pallas_kernels.flash_attention.marks import NEVER, NOTHING, Marks

Impl = Literal["xla", "tpu", "hopper", "blackwell", "interpret"]
BACKENDS = {
    "xla": xla.BACKEND,
    "tpu": tpu.BACKEND,
    "hopper": hopper.BACKEND,
    "blackwell": blackwell.BACKEND,
    "interpret": tpu.INTERPRETED,
}


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float,
    positions: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    impl: Impl = "xla",
) -> jax.Array:
    """Attends to earlier tokens of the same segment, in memory linear in the sequence length.

    Without ``positions`` rows must hold tokens in order, and a key at a later index than the query
    is never visible. Ids are compared and nothing else: tokens of segment 0 see each other.

    With ``positions`` tokens may be in any order, and keys may be other tokens than the queries: a
    query sees the keys of its segment at its own and lower positions. So a rank of zigzag context
    parallelism passes its own queries, and the keys, ids and positions of all ranks. Positions may
    restart in every segment. Segment 0 is padding: it neither sees nor is seen, and may hold
    anything, NaN included. A query without a visible key gives zeros and adds nothing to gradients.

    Other tokens of a row must be finite: what no query sees is multiplied by 0, not left out.

    Args:
      q: queries [batch, q_seq, heads, qk].
      k: keys [batch, kv_seq, heads, qk].
      v: values [batch, kv_seq, heads, v]; ``v`` may differ from ``qk``.
      segment_ids: int32 [batch, q_seq]; tokens see only tokens with an equal id.
      scale: factor on query-key products.
      positions: int32 [batch, q_seq], from 0 to 2**31 - 2, or None if tokens are in order.
      kv_segment_ids: int32 [batch, kv_seq], by default ``segment_ids``.
      kv_positions: int32 [batch, kv_seq], by default ``positions``. Only together with
        ``positions``, and both of ``kv_*`` or none.
      impl: "xla" (default, on every platform; made for CPUs), "tpu", "hopper" or "blackwell" (for
        NVIDIA's chips; bf16 only), or "interpret" (the TPU kernels run by jax, for tests).

    Returns:
      [batch, q_seq, heads, v] in the dtype of ``v``; softmax and sums are computed in f32.

    Raises:
      ValueError: if shapes disagree, arguments do not go together, or ``impl`` is unknown.
      NotImplementedError: if a backend is not made for these widths or this dtype.
    """
    given = [x is not None for x in (positions, kv_segment_ids, kv_positions)]
    if given[1] != given[2] or given[1] > given[0]:
        raise ValueError(
            "kv_segment_ids and kv_positions go together, and with positions; given are "
            f"positions, kv_segment_ids, kv_positions: {given}"
        )
    if kv_segment_ids is None:
        kv_segment_ids, kv_positions = segment_ids, positions
    if k.shape != (q.shape[0], k.shape[1], *q.shape[2:]) or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} disagree")
    for name, marks, x in (
        ("segment_ids", segment_ids, q),
        ("positions", positions, q),
        ("kv_segment_ids", kv_segment_ids, k),
        ("kv_positions", kv_positions, k),
    ):
        if marks is not None and marks.shape != x.shape[:2]:
            raise ValueError(
                f"{name} {marks.shape} must be {x.shape[:2]}: q {q.shape}, k {k.shape}"
            )
    if impl not in BACKENDS:
        raise ValueError(f"impl {impl!r}; legal are {', '.join(map(repr, BACKENDS))}")
    if positions is None:
        return vjp.attention(q, k, v, segment_ids, scale, BACKENDS[impl])

    real, kv_real = segment_ids != 0, kv_segment_ids != 0
    marks = Marks(
        segment_ids,
        jnp.where(real, positions, NOTHING),
        kv_segment_ids,
        jnp.where(kv_real, kv_positions, NEVER),
    )
    # not by the mask alone: zero times NaN is NaN, in the backward pass for queries and ``out`` too
    q, k, v = _cleared(q, real), _cleared(k, kv_real), _cleared(v, kv_real)
    return _cleared(vjp.attention(q, k, v, marks, scale, BACKENDS[impl]), real)


def _cleared(x: jax.Array, real: jax.Array) -> jax.Array:
    return jnp.where(real[..., None, None], x, 0)
