"""Blockwise causal attention in plain XLA: the CPU path.

A row's queries are cut into spans; span i sees keys 0..i, so the upper triangle is never computed.
Spans are unrolled in the program, hence few, and long ones are walked through in strips. A strip
of one head is all that exists of the score matrix at a time: it stays in cache, and memory is
linear in the sequence length. Tokens are the last axis, the operand order for which XLA:CPU needs
no copies. The backward pass recomputes probabilities from the saved log-sum-exp (Dao et al. 2022).
"""

from functools import partial

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row without visible keys gives no NaN
MIN_STRIP = 64
MAX_STRIP = 128
SPANS = 8

_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _spans(seq: int) -> list[tuple[int, int, int]]:
    """(start, stop, strip) of each span; a strip divides its span if ``seq`` is legal."""
    length = max(MIN_STRIP, -(-seq // SPANS))
    if length > MAX_STRIP:
        length += -length % MAX_STRIP
    spans = [(start, min(start + length, seq)) for start in range(0, seq, length)]
    return [(start, stop, min(MAX_STRIP, stop - start)) for start, stop in spans]


def _mask(segment_ids, first, strip, stop):
    """What to add to scores of queries first..first+strip and keys 0..stop, f32 [query, key]."""
    queries = jax.lax.dynamic_slice_in_dim(segment_ids, first, strip)
    causal = first + jnp.arange(strip)[:, None] >= jnp.arange(stop)
    visible = causal & (queries[:, None] == segment_ids[:stop])
    # computed once, not once per head and use, as fusion would have it
    return jax.lax.optimization_barrier(jnp.where(visible, 0.0, MASKED))


def _pick(array, head, first, size):
    """array[head, :, first : first + size]."""
    shape = (1, array.shape[1], size)
    return jax.lax.dynamic_slice(array, (head, 0, first), shape)[0]


def _add(array, head, value):
    """Adds ``value`` to array[head, :, : value.shape[1]]."""
    old = _pick(array, head, 0, value.shape[1])
    return jax.lax.dynamic_update_slice(array, (old + value)[None], (head, 0, 0))


def _repeat(times, body, carry):
    """`jax.lax.fori_loop`, but never as a scan.

    Differentiating a scan over layers takes out of inner scans what does not depend on the layer
    and stacks it: the masks of all strips, as large as a score matrix.
    """

    def step(state):
        i, carry = state
        return i + 1, body(i, carry)

    return jax.lax.while_loop(lambda state: state[0] < times, step, (jnp.int32(0), carry))[1]


def _walk(strip_of_head, segment_ids, heads, carry):
    """Runs ``strip_of_head(carry, head, first, strip, stop, mask)`` over all strips and heads."""

    def strip_at(first, strip, stop, carry):
        mask = _mask(segment_ids, first, strip, stop)
        return _repeat(heads, lambda h, c: strip_of_head(c, h, first, strip, stop, mask), carry)

    for start, stop, strip in _spans(segment_ids.shape[0]):

        def strip_number(i, carry, start=start, stop=stop, strip=strip):
            return strip_at(start + i * strip, strip, stop, carry)

        strips = (stop - start) // strip
        carry = strip_number(0, carry) if strips == 1 else _repeat(strips, strip_number, carry)
    return carry


def _forward_row(q, k, v, segment_ids):
    """One row [heads, feature, seq] -> output f32 [heads, v, seq], log-sum-exp f32 [heads, seq]."""
    heads, _, seq = q.shape

    def strip_of_head(carry, head, first, strip, stop, mask):
        out, lse = carry
        keys, values = _pick(k, head, 0, stop), _pick(v, head, 0, stop)
        scores = _dot("dq,dk->qk", _pick(q, head, first, strip), keys) + mask
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        mixed = _dot("qk,dk->qd", weights.astype(v.dtype), values) / total
        lse = jax.lax.dynamic_update_slice(lse, (peak + jnp.log(total)).T, (head, first))
        return jax.lax.dynamic_update_slice(out, mixed[None], (head, first, 0)), lse

    empty = jnp.zeros((heads, seq, v.shape[1])), jnp.zeros((heads, seq))
    return _walk(strip_of_head, segment_ids, heads, empty)


def _backward_row(q, k, v, lse, correction, d_out, segment_ids):
    """Cotangents of one row: dq f32 [heads, seq, qk], dk and dv f32 [heads, feature, seq]."""
    heads, features, seq = q.shape

    def strip_of_head(carry, head, first, strip, stop, mask):
        dq, dk, dv = carry
        queries, d_mixed = _pick(q, head, first, strip), _pick(d_out, head, first, strip)
        keys, values = _pick(k, head, 0, stop), _pick(v, head, 0, stop)
        of_queries = (head, first), (1, strip)
        weights = jnp.exp(
            _dot("dq,dk->qk", queries, keys) + mask - jax.lax.dynamic_slice(lse, *of_queries).T
        )
        d_weights = _dot("dq,dk->qk", d_mixed, values)
        d_scores = weights * (d_weights - jax.lax.dynamic_slice(correction, *of_queries).T)
        weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
        dv = _add(dv, head, _dot("dq,qk->dk", d_mixed, weights))
        dk = _add(dk, head, _dot("dq,qk->dk", queries, d_scores))
        dq = jax.lax.dynamic_update_slice(
            dq, _dot("qk,dk->qd", d_scores, keys)[None], (head, first, 0)
        )
        return dq, dk, dv

    zeros = jnp.zeros((heads, seq, features)), jnp.zeros(k.shape), jnp.zeros(v.shape)
    return _walk(strip_of_head, segment_ids, heads, zeros)


def _tokens_last(x):
    """[batch, seq, heads, feature] -> [batch, heads, feature, seq]."""
    return x.transpose(0, 2, 3, 1)


def flash_attention(q, k, v, segment_ids, scale):
    """See `pallas_kernels.flash_attention.flash_attention`."""
    seq = segment_ids.shape[1]
    pad = -seq % MAX_STRIP if seq > SPANS * MAX_STRIP else 0  # long rows are whole strips

    def padded(x):  # at the end, where no token looks
        return jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))

    return _attention(*map(padded, (q, k, v, segment_ids)), scale)[:, :seq]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, segment_ids, scale):
    return _forward(q, k, v, segment_ids, scale)[0]


def _forward(q, k, v, segment_ids, scale):
    # scaling queries once is cheaper than scaling every score
    heads = _tokens_last(q * scale), _tokens_last(k), _tokens_last(v)
    out, lse = jax.lax.map(lambda row: _forward_row(*row), (*heads, segment_ids))
    out = out.astype(v.dtype).transpose(0, 2, 1, 3)
    return out, (segment_ids, *heads, out, lse)


def _backward(scale, residuals, d_out):
    segment_ids, q, k, v, out, lse = residuals
    # sum_k p dp, the softmax Jacobian's rank-one term, from the outputs alone
    correction = jnp.einsum("bqhd,bqhd->bhq", out, d_out, preferred_element_type=jnp.float32)
    rows = (q, k, v, lse, correction, _tokens_last(d_out), segment_ids)
    dq, dk, dv = jax.lax.map(lambda row: _backward_row(*row), rows)
    dq = (dq * scale).astype(q.dtype).transpose(0, 2, 1, 3)
    dk = dk.astype(k.dtype).transpose(0, 3, 1, 2)
    dv = dv.astype(v.dtype).transpose(0, 3, 1, 2)
    return dq, dk, dv, None


_attention.defvjp(_forward, _backward)
