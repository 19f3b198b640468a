"""The gradient of attention, the same for all backends.

A backend computes with arrays in a layout of its own and with lengths that are multiples of its
blocks. The backward pass recomputes probabilities from the saved log-sum-exp (Dao 2023).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.flash_attention.marks import NEVER, NOTHING, Marks

# What the backward pass needs besides its arguments, by names for a policy of `jax.checkpoint`.
RESIDUALS = ("attention_out", "attention_log_sum_exp")


class Backend(NamedTuple):
    """Functions for "heads", arrays [batch, seq, heads, feature] in the backend's own layout.

    Where visibility is said by segment ids alone (int32 [batch, seq]), tokens are in order.

    Attributes:
      multiples: (q_seq, kv_seq, in order) -> what their lengths must be multiples of.
      to_heads: [batch, seq, heads, feature] -> heads.
      forward: (q, k, v, visibility) -> output [batch, q_seq, heads, v] and log-sum-exp f32
        [batch, heads, q_seq].
      backward: (q, k, v, d_out, log-sum-exp, correction f32 [batch, heads, q_seq], visibility) ->
        gradients of q, k and v [batch, seq, heads, feature]; f32 or the dtype of the operands.
    """

    multiples: Callable[[int, int, bool], tuple[int, int]]
    to_heads: Callable[[jax.Array], jax.Array]
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Marks | jax.Array,
    scale: float,
    backend: Backend,
) -> jax.Array:
    """Attention by a backend, for any lengths; see `pallas_kernels.flash_attention`."""
    q_seq, kv_seq = q.shape[1], k.shape[1]
    in_order = not isinstance(visibility, Marks)
    q_step, kv_step = backend.multiples(q_seq, kv_seq, in_order)
    by_query = partial(_lengthen, -q_seq % q_step)
    by_key = partial(_lengthen, -kv_seq % kv_step)
    if in_order:
        visibility = by_query(0, visibility)  # at the end, where no token looks
    else:
        visibility = Marks(
            by_query(0, visibility.segments),
            by_query(NOTHING, visibility.positions),
            by_key(0, visibility.kv_segments),
            by_key(NEVER, visibility.kv_positions),
        )
    out = _attention(by_query(0, q), by_key(0, k), by_key(0, v), visibility, scale, backend)
    return out[:, :q_seq]


def _lengthen(pad, value, x):
    """Appends ``pad`` tokens to [batch, seq, ...]."""
    return jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), constant_values=value)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, visibility, scale, backend):
    return _forward(q, k, v, visibility, scale, backend)[0]


def _forward(q, k, v, visibility, scale, backend):
    # scaling queries once is cheaper than scaling every score
    heads = backend.to_heads(q * scale), backend.to_heads(k), backend.to_heads(v)
    out, lse = backend.forward(*heads, visibility)
    out, lse = map(checkpoint_name, (out.astype(v.dtype), lse), RESIDUALS)
    return out, (*heads, out, lse, visibility)


def _backward(scale, backend, residuals, d_out):
    q, k, v, out, lse, visibility = residuals
    # sum_k p dp, the softmax Jacobian's rank-one term, from the outputs alone
    correction = jnp.einsum("bqhd,bqhd->bhq", out, d_out, preferred_element_type=jnp.float32)
    heads = q, k, v, backend.to_heads(d_out)
    dq, dk, dv = backend.backward(*heads, lse, correction, visibility)
    return (dq * scale).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_forward, _backward)
