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
MAX_BLOCKS = 8  # blocks are unrolled in the program; longer rows get longer blocks

_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _blocks(seq: int) -> list[tuple[int, int]]:
    size = max(MIN_BLOCK, -(-seq // MAX_BLOCKS))
    return [(start, min(start + size, seq)) for start in range(0, seq, size)]


def _mask(segment_ids, start, stop):
    """What to add to scores of queries start..stop and keys 0..stop, f32 [query, key]."""
    causal = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
    visible = causal & (segment_ids[start:stop, None] == segment_ids[None, :stop])
    # computed once, not once per head and use, as fusion would have it
    return jax.lax.optimization_barrier(jnp.where(visible, 0.0, MASKED))


def _forward_head(head, masks):
    """One head of one row -> output f32 [seq, v], log-sum-exp f32 [seq]."""
    q, k, v = head
    outputs, lses = [], []
    for (start, stop), mask in zip(_blocks(q.shape[1]), masks, strict=True):
        scores = _dot("dq,dk->qk", q[:, start:stop], k[:, :stop]) + mask
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        outputs.append(_dot("qk,dk->qd", weights.astype(v.dtype), v[:, :stop]) / total)
        lses.append((peak + jnp.log(total))[:, 0])
    return jnp.concatenate(outputs), jnp.concatenate(lses)


def _backward_head(head, masks):
    """Cotangents of one head of one row: dq f32 [seq, qk], dk and dv f32 [feature, seq]."""
    q, k, v, lse, correction, d_out = head
    dq = []
    dk = jnp.zeros(k.shape, jnp.float32)
    dv = jnp.zeros(v.shape, jnp.float32)
    for (start, stop), mask in zip(_blocks(q.shape[1]), masks, strict=True):
        scores = _dot("dq,dk->qk", q[:, start:stop], k[:, :stop]) + mask
        weights = jnp.exp(scores - lse[start:stop, None])
        d_weights = _dot("dq,dk->qk", d_out[:, start:stop], v[:, :stop])
        d_scores = weights * (d_weights - correction[start:stop, None])
        weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
        dv = dv.at[:, :stop].add(_dot("dq,qk->dk", d_out[:, start:stop], weights))
        dk = dk.at[:, :stop].add(_dot("dq,qk->dk", q[:, start:stop], d_scores))
        dq.append(_dot("qk,dk->qd", d_scores, k[:, :stop]))
    return jnp.concatenate(dq), dk, dv


def _over_heads(f, segment_ids, *arrays):
    """Maps ``f(head, masks)`` over batch and heads of arrays [batch, heads, ...], one at a time."""

    def row(args):
        segments, *arrays = args
        masks = [_mask(segments, *block) for block in _blocks(segments.shape[0])]
        return jax.lax.map(lambda head: f(head, masks), tuple(arrays))

    return jax.lax.map(row, (segment_ids, *arrays))


def _tokens_last(x):
    """[batch, seq, heads, feature] -> [batch, heads, feature, seq]."""
    return x.transpose(0, 2, 3, 1)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(q, k, v, segment_ids, scale):
    """See `pallas_kernels.flash_attention.flash_attention`."""
    return _forward(q, k, v, segment_ids, scale)[0]


def _forward(q, k, v, segment_ids, scale):
    # scaling queries once is cheaper than scaling every score
    heads = _tokens_last(q * scale), _tokens_last(k), _tokens_last(v)
    out, lse = _over_heads(_forward_head, segment_ids, *heads)
    out = out.astype(v.dtype).transpose(0, 2, 1, 3)
    return out, (segment_ids, *heads, out, lse)


def _backward(scale, residuals, d_out):
    segment_ids, q, k, v, out, lse = residuals
    # sum_k p dp, the softmax Jacobian's rank-one term, from the outputs alone
    correction = jnp.einsum("bqhd,bqhd->bhq", out, d_out, preferred_element_type=jnp.float32)
    arrays = (q, k, v, lse, correction, _tokens_last(d_out))
    dq, dk, dv = _over_heads(_backward_head, segment_ids, *arrays)
    dq = (dq * scale).astype(q.dtype).transpose(0, 2, 1, 3)
    dk = dk.astype(k.dtype).transpose(0, 3, 1, 2)
    dv = dv.astype(v.dtype).transpose(0, 3, 1, 2)
    return dq, dk, dv, None


flash_attention.defvjp(_forward, _backward)
