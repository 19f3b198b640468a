"""Blockwise causal attention in plain XLA: the CPU path.

Queries are cut into blocks; block i sees keys 0..i, so the upper triangle is never computed, and
its scores stay in cache. One batch row is processed at a time for the same reason. Inside, tokens
are the last axis: that is the operand order for which XLA:CPU needs no copies. The backward
pass recomputes probabilities from the saved log-sum-exp (Dao et al. 2022).
"""

from functools import partial

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row without visible keys gives no NaN
MIN_BLOCK = 64
MAX_BLOCKS = 16  # blocks are unrolled in the program; longer rows get longer blocks

_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _blocks(seq: int) -> list[tuple[int, int]]:
    size = max(MIN_BLOCK, -(-seq // MAX_BLOCKS))
    return [(start, min(start + size, seq)) for start in range(0, seq, size)]


def _visible(segment_ids, start, stop):
    """Which keys 0..stop the queries start..stop see, bool [query, key]."""
    causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
    return causal & (segment_ids[start:stop, None] == segment_ids[None, :stop])


def _forward_row(row):
    """One batch row -> output f32 [heads, seq, v], log-sum-exp f32 [heads, seq]."""
    q, k, v, segment_ids = row
    outputs, lses = [], []
    for start, stop in _blocks(segment_ids.shape[0]):
        scores = _dot("hdq,hdk->hqk", q[..., start:stop], k[..., :stop])
        scores = jnp.where(_visible(segment_ids, start, stop), scores, MASKED)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        outputs.append(_dot("hqk,hdk->hqd", weights.astype(v.dtype), v[..., :stop]) / total)
        lses.append((peak + jnp.log(total))[..., 0])
    return jnp.concatenate(outputs, axis=1), jnp.concatenate(lses, axis=1)


def _backward_row(row):
    """Cotangents of one batch row: dq f32 [heads, seq, qk], dk and dv f32 [heads, feature, seq]."""
    q, k, v, segment_ids, lse, correction, d_out = row
    dq = []
    dk = jnp.zeros(k.shape, jnp.float32)
    dv = jnp.zeros(v.shape, jnp.float32)
    for start, stop in _blocks(segment_ids.shape[0]):
        scores = _dot("hdq,hdk->hqk", q[..., start:stop], k[..., :stop])
        scores = jnp.where(_visible(segment_ids, start, stop), scores, MASKED)
        weights = jnp.exp(scores - lse[:, start:stop, None])
        d_weights = _dot("hdq,hdk->hqk", d_out[..., start:stop], v[..., :stop])
        d_scores = weights * (d_weights - correction[:, start:stop, None])
        weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
        dv = dv.at[..., :stop].add(_dot("hdq,hqk->hdk", d_out[..., start:stop], weights))
        dk = dk.at[..., :stop].add(_dot("hdq,hqk->hdk", q[..., start:stop], d_scores))
        dq.append(_dot("hqk,hdk->hqd", d_scores, k[..., :stop]))
    return jnp.concatenate(dq, axis=1), dk, dv


def _tokens_last(x):
    """[batch, seq, heads, feature] -> [batch, heads, feature, seq]."""
    return x.transpose(0, 2, 3, 1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(q, k, v, segment_ids, scale):
    """See `pallas_kernels.flash_attention.flash_attention`."""
    return _forward(q, k, v, segment_ids, scale)[0]


def _forward(q, k, v, segment_ids, scale):
    # scaling queries once is cheaper than scaling every score
    row = (_tokens_last(q * scale), _tokens_last(k), _tokens_last(v), segment_ids)
    out, lse = jax.lax.map(_forward_row, row)
    out = out.astype(v.dtype).transpose(0, 2, 1, 3)
    return out, (*row, out, lse)


def _backward(scale, residuals, d_out):
    *row, out, lse = residuals
    # sum_k p dp, the softmax Jacobian's rank-one term, from the outputs alone
    correction = jnp.einsum("bqhd,bqhd->bhq", out, d_out, preferred_element_type=jnp.float32)
    dq, dk, dv = jax.lax.map(_backward_row, (*row, lse, correction, _tokens_last(d_out)))
    q, k, v = row[:3]
    dq = (dq * scale).astype(q.dtype).transpose(0, 2, 1, 3)
    dk = dk.astype(k.dtype).transpose(0, 3, 1, 2)
    dv = dv.astype(v.dtype).transpose(0, 3, 1, 2)
    return dq, dk, dv, None


flash_attention.defvjp(_forward, _backward)
