"""Blockwise attention in plain XLA: the CPU path.

Strips of queries of one head meet spans of keys, and the scores of one such meeting are all that
exists of the score matrix at a time: they stay in cache, and memory is linear in the sequence
length. Tokens are the last axis, the operand order for which XLA:CPU needs no copies.

Tokens in order: a row's queries are cut into spans; span i sees keys 0..i, so the upper triangle
is never computed. Spans are unrolled in the program, hence few, and long ones are walked through in
strips. With positions: what a strip sees is known at run time only, so the program visits those
blocks of keys in which it may see one, and merges the softmax of a block with that of the blocks
before.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.flash_attention.marks import MASKED, UNSEEING, Marks, blocks_seen
from pallas_kernels.flash_attention.vjp import Backend

MIN_STRIP = 64
MAX_STRIP = 128
SPANS = 8
KEYS = 256  # of a block

_dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _multiples(q_seq: int, kv_seq: int, in_order: bool) -> tuple[int, int]:
    if in_order:  # long rows are whole strips
        whole = MAX_STRIP if q_seq > SPANS * MAX_STRIP else 1
        return whole, whole
    return min(MAX_STRIP, q_seq), min(KEYS, kv_seq)


def _spans(seq: int) -> list[tuple[int, int, int]]:
    """(start, stop, strip) of each span; a strip divides its span if ``seq`` is legal."""
    length = max(MIN_STRIP, -(-seq // SPANS))
    if length > MAX_STRIP:
        length += -length % MAX_STRIP
    spans = [(start, min(start + length, seq)) for start in range(0, seq, length)]
    return [(start, stop, min(MAX_STRIP, stop - start)) for start, stop in spans]


def _mask(visible):
    """What to add to scores, f32 [query, key]."""
    # computed once, not once per head and use, as fusion would have it
    return jax.lax.optimization_barrier(jnp.where(visible, 0.0, MASKED))


def _pick(array, head, first, size):
    """array[head, :, first : first + size]."""
    shape = (1, array.shape[1], size)
    return jax.lax.dynamic_slice(array, (head, 0, first), shape)[0]


def _add(array, head, first, value):
    """Adds ``value`` to array[head, :, first : first + value.shape[1]]."""
    old = _pick(array, head, first, value.shape[1])
    return jax.lax.dynamic_update_slice(array, (old + value)[None], (head, 0, first))


def _repeat(times, body, carry):
    """`jax.lax.fori_loop`, but never as a scan.

    Differentiating a scan over layers takes out of inner scans what does not depend on the layer
    and stacks it: the masks of all strips, as large as a score matrix.
    """

    def step(state):
        i, carry = state
        return i + 1, body(i, carry)

    return jax.lax.while_loop(lambda state: state[0] < times, step, (jnp.int32(0), carry))[1]


def _walk_in_order(meet, segment_ids, heads, carry):
    """Runs ``meet(carry, head, first, strip, start, keys, mask)`` over all strips and heads.

    It is for queries first..first+strip and keys start..start+keys. Here those are all keys that a
    strip may see.
    """

    def strip_at(first, strip, stop, carry):
        queries = jax.lax.dynamic_slice_in_dim(segment_ids, first, strip)
        causal = first + jnp.arange(strip)[:, None] >= jnp.arange(stop)
        mask = _mask(causal & (queries[:, None] == segment_ids[:stop]))
        return _repeat(heads, lambda h, c: meet(c, h, first, strip, 0, stop, mask), carry)

    for start, stop, strip in _spans(segment_ids.shape[0]):

        def strip_number(i, carry, start=start, stop=stop, strip=strip):
            return strip_at(start + i * strip, strip, stop, carry)

        strips = (stop - start) // strip
        carry = strip_number(0, carry) if strips == 1 else _repeat(strips, strip_number, carry)
    return carry


def _walk_blocks(meet, marks, heads, carry):
    """Runs ``meet``, see `_walk_in_order`, over all blocks in which a key may be visible."""
    (q_seq,), (kv_seq,) = marks.positions.shape, marks.kv_positions.shape
    strip, keys = min(MAX_STRIP, q_seq), min(KEYS, kv_seq)
    seen = blocks_seen(jax.tree.map(lambda x: x[None], marks), strip, keys)[0]
    visits = jnp.flatnonzero(seen, size=seen.size)

    def visit(i, carry):
        first, start = visits[i] // seen.shape[1] * strip, visits[i] % seen.shape[1] * keys
        segments, positions = (
            jax.lax.dynamic_slice_in_dim(x, first, strip)[:, None] for x in marks[:2]
        )
        kv_segments, kv_positions = (
            jax.lax.dynamic_slice_in_dim(x, start, keys) for x in marks[2:]
        )
        mask = _mask((segments == kv_segments) & (positions >= kv_positions))
        return _repeat(heads, lambda h, c: meet(c, h, first, strip, start, keys, mask), carry)

    return _repeat(seen.sum(), visit, carry)


def _merge(part, other):
    """Output and log-sum-exp over two sets of keys from those over each."""
    (out, lse), (other_out, other_lse) = part, other
    peak = jnp.maximum(lse, other_lse)
    share, other_share = jnp.exp(lse - peak), jnp.exp(other_lse - peak)
    total = share + other_share
    return (share * out + other_share * other_out) / total, peak + jnp.log(total)


def _forward_row(q, k, v, visibility):
    """One row [heads, feature, seq] -> output f32 [heads, seq, v], log-sum-exp f32 [heads, seq]."""
    heads, features, seq = q.shape[0], v.shape[1], q.shape[2]
    in_blocks = isinstance(visibility, Marks)

    def meet(carry, head, first, strip, start, keys, mask):
        out, lse = carry
        values = _pick(v, head, start, keys)
        scores = _dot("dq,dk->qk", _pick(q, head, first, strip), _pick(k, head, start, keys)) + mask
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        mixed = _dot("qk,dk->qd", weights.astype(v.dtype), values) / total
        mixed_lse = peak + jnp.log(total)
        if in_blocks:
            old = jax.lax.dynamic_slice(out, (head, first, 0), (1, strip, features))[0]
            old_lse = jax.lax.dynamic_slice(lse, (head, first), (1, strip)).T
            mixed, mixed_lse = _merge((old, old_lse), (mixed, mixed_lse))
        lse = jax.lax.dynamic_update_slice(lse, mixed_lse.T, (head, first))
        return jax.lax.dynamic_update_slice(out, mixed[None], (head, first, 0)), lse

    # what a block gives for queries that see none of its keys weighs nothing against UNSEEING
    empty = _full(q, (heads, seq, features), 0), _full(q, (heads, seq), UNSEEING)
    return _walk(meet, visibility, heads, empty)


def _backward_row(q, k, v, d_out, lse, correction, visibility):
    """Gradients of one row: dq f32 [heads, seq, qk], dk and dv f32 [heads, feature, seq]."""
    heads, features, seq = q.shape
    in_blocks = isinstance(visibility, Marks)

    def meet(carry, head, first, strip, start, keys, mask):
        dq, dk, dv = carry
        queries, d_mixed = _pick(q, head, first, strip), _pick(d_out, head, first, strip)
        span, values = _pick(k, head, start, keys), _pick(v, head, start, keys)
        of_queries = (head, first), (1, strip)
        weights = jnp.exp(
            _dot("dq,dk->qk", queries, span) + mask - jax.lax.dynamic_slice(lse, *of_queries).T
        )
        d_weights = _dot("dq,dk->qk", d_mixed, values)
        d_scores = weights * (d_weights - jax.lax.dynamic_slice(correction, *of_queries).T)
        weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
        dv = _add(dv, head, start, _dot("dq,qk->dk", d_mixed, weights))
        dk = _add(dk, head, start, _dot("dq,qk->dk", queries, d_scores))
        d_queries = _dot("qk,dk->qd", d_scores, span)[None]
        if in_blocks:
            d_queries += jax.lax.dynamic_slice(dq, (head, first, 0), d_queries.shape)
        return jax.lax.dynamic_update_slice(dq, d_queries, (head, first, 0)), dk, dv

    zeros = _full(q, (heads, seq, features), 0), _full(q, k.shape, 0), _full(q, v.shape, 0)
    return _walk(meet, visibility, heads, zeros)


def _walk(meet, visibility, heads, carry):
    walk = _walk_blocks if isinstance(visibility, Marks) else _walk_in_order
    return walk(meet, visibility, heads, carry)


def _full(like, shape, value):
    """An f32 array that, inside `jax.shard_map`, varies over the same mesh axes as ``like``."""
    return jnp.full_like(like, value, dtype=jnp.float32, shape=shape)


def _to_heads(x):
    """[batch, seq, heads, feature] -> [batch, heads, feature, seq]."""
    return x.transpose(0, 2, 3, 1)


def _forward(q, k, v, visibility):
    out, lse = jax.lax.map(lambda row: _forward_row(*row), (q, k, v, visibility))
    return out.transpose(0, 2, 1, 3), lse


def _backward(q, k, v, d_out, lse, correction, visibility):
    rows = (q, k, v, d_out, lse, correction, visibility)
    dq, dk, dv = jax.lax.map(lambda row: _backward_row(*row), rows)
    return dq.transpose(0, 2, 1, 3), dk.transpose(0, 3, 1, 2), dv.transpose(0, 3, 1, 2)


BACKEND = Backend(_multiples, _to_heads, _forward, _backward)
