"""Blockwise attention as Pallas kernels for TPUs: forward, gradient of q, gradients of k and v.

A program works on one visit: one head, one block of queries and one of keys in which a key may be
visible. The grid is as long as the list of visits, so blocks that nobody sees cost nothing. Visits
of one block of queries, or of keys for their gradients, follow each other while its sums stay on
the chip; a block that sees nothing, or is not seen, gets one visit, which writes its zeros.

Scores lie as [key, query]: what there is one of per query is a row then, which broadcasts and
adds up without moving between lanes.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_attention.marks import MASKED, UNSEEING, Marks, blocks_seen, in_order
from pallas_kernels.flash_attention.vjp import Backend

BLOCK = 512  # queries or keys of a block, fewer if there are not as many
LANES = 128


class _Plan(NamedTuple):
    """The visits of all rows of a batch, and who sees whom.

    Attributes:
      visits: int32 [visit + 1 or more], (row * outer + block) * inner + other block, in order;
        behind the last one follow numbers too large to be visits.
      count: how many visits there are.
      outer: blocks of a row whose sums stay on the chip while their visits last.
      inner: blocks of the other side.
      by_key: outer blocks are of keys.
      marks: segments and positions of queries, int32 [batch, 2, q_seq].
      kv_marks: those of keys, int32 [batch, kv_seq, 2].
    """

    visits: jax.Array
    count: jax.Array
    outer: int
    inner: int
    by_key: bool
    marks: jax.Array
    kv_marks: jax.Array

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.marks.shape[2] // (self.inner if self.by_key else self.outer)

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.kv_marks.shape[1] // (self.outer if self.by_key else self.inner)

    def spec(self, shape, place) -> pl.BlockSpec:
        """A block; place(head, row, block of queries, block of keys) says where it is."""

        def at(head, i, visits):
            owner, other = jax.lax.div(visits[i], self.inner), jax.lax.rem(visits[i], self.inner)
            row, block = jax.lax.div(owner, self.outer), jax.lax.rem(owner, self.outer)
            return place(head, row, *((other, block) if self.by_key else (block, other)))

        return pl.BlockSpec(shape, at)

    def of_queries(self, x: jax.Array) -> pl.BlockSpec:
        """A block of queries of x [batch, heads, q_seq, feature]."""
        return self.spec((None, None, self.queries, x.shape[3]), lambda h, r, i, j: (r, h, i, 0))

    def of_keys(self, x: jax.Array) -> pl.BlockSpec:
        """A block of keys of x [batch, heads, kv_seq, feature]."""
        return self.spec((None, None, self.keys, x.shape[3]), lambda h, r, i, j: (r, h, j, 0))

    def rows_of_queries(self, rows: int) -> pl.BlockSpec:
        """A block of queries of an array [batch, heads, rows, q_seq]."""
        return self.spec((None, None, rows, self.queries), lambda h, r, i, j: (r, h, 0, i))


def _plan(visibility, by_key):
    marks = visibility if isinstance(visibility, Marks) else in_order(visibility)
    q_seq, kv_seq = marks.positions.shape[1], marks.kv_positions.shape[1]
    seen = blocks_seen(marks, min(BLOCK, q_seq), min(BLOCK, kv_seq))
    seen = seen.swapaxes(1, 2) if by_key else seen
    _, outer, inner = seen.shape
    seen |= ~seen.any(-1, keepdims=True) & (jnp.arange(inner) == 0)
    visits = jnp.flatnonzero(seen, size=seen.size + 1, fill_value=seen.size)
    return _Plan(
        visits.astype(jnp.int32),
        seen.sum(dtype=jnp.int32),
        outer,
        inner,
        by_key,
        jnp.stack([marks.segments, marks.positions], 1),
        jnp.stack([marks.kv_segments, marks.kv_positions], 2),
    )


def _multiples(q_seq: int, kv_seq: int, in_order: bool) -> tuple[int, int]:
    return tuple(min(BLOCK, seq + -seq % LANES) for seq in (q_seq, kv_seq))


def _to_heads(x):
    """[batch, seq, heads, feature] -> [batch, heads, seq, feature]."""
    return x.transpose(0, 2, 1, 3)


def _forward(q, k, v, visibility, *, interpret=False):
    plan, features = _plan(visibility, by_key=False), v.shape[-1]

    def kernel(begins, ends, marks, kv_marks, q, k, v, out, lse, peak, total, mixed):
        @pl.when(begins)
        def _():
            peak[...] = jnp.full_like(peak, UNSEEING)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        scores = _scores(marks, kv_marks, q, k)
        new_peak = jnp.maximum(peak[...], scores.max(0, keepdims=True))
        weights, decay = jnp.exp(scores - new_peak), jnp.exp(peak[...] - new_peak)
        peak[...] = new_peak
        total[...] = decay * total[...] + weights.sum(0, keepdims=True)
        mixed[...] = decay * mixed[...] + _dot(v[...], weights.astype(v.dtype), (0, 0))

        @pl.when(ends)
        def _():
            sums = jnp.maximum(total[...], 1)  # less, 0, only if no key is seen
            out[...] = (mixed[...] / sums).astype(out.dtype)
            lse[...] = peak[...] + jnp.log(sums)

    row = pltpu.VMEM((1, plan.queries), jnp.float32)
    *heads, seq, _ = q.shape
    out, lse = _call(
        kernel,
        plan,
        (q, k, v),
        (plan.of_queries(q), plan.of_keys(k), plan.of_keys(v)),
        (_like(q, (*heads, features, seq), v.dtype), _like(q, (*heads, 1, seq), jnp.float32)),
        (plan.rows_of_queries(features), plan.rows_of_queries(1)),
        (row, row, pltpu.VMEM((features, plan.queries), jnp.float32)),
        interpret,
    )
    return out.transpose(0, 3, 1, 2), lse[:, :, 0]


def _backward(*arrays, interpret=False):
    dk, dv = _key_gradients(*arrays, interpret)
    return _query_gradient(*arrays, interpret).transpose(0, 3, 1, 2), _to_heads(dk), _to_heads(dv)


def _query_gradient(q, k, v, d_out, lse, correction, visibility, interpret):
    plan = _plan(visibility, by_key=False)
    *heads, seq, features = q.shape

    def kernel(begins, ends, marks, kv_marks, q, k, v, d_out, lse, correction, dq):
        @pl.when(begins)
        def _():
            dq[...] = jnp.zeros_like(dq)

        _, d_scores = _weights(marks, kv_marks, q, k, v, d_out, lse, correction)
        dq[...] += _dot(k[...], d_scores, (0, 0))

    (dq,) = _call(
        kernel,
        plan,
        *_residuals(plan, q, k, v, d_out, lse, correction),
        (_like(q, (*heads, features, seq), jnp.float32),),
        (plan.rows_of_queries(features),),
        (),
        interpret,
    )
    return dq


def _key_gradients(q, k, v, d_out, lse, correction, visibility, interpret):
    plan = _plan(visibility, by_key=True)

    def kernel(
        begins, ends, marks, kv_marks, q, k, v, d_out, lse, correction, dk, dv, dk_sum, dv_sum
    ):
        @pl.when(begins)
        def _():
            dk_sum[...] = jnp.zeros_like(dk_sum)
            dv_sum[...] = jnp.zeros_like(dv_sum)

        weights, d_scores = _weights(marks, kv_marks, q, k, v, d_out, lse, correction)
        dk_sum[...] += _dot(d_scores, q[...], (1, 0))
        dv_sum[...] += _dot(weights, d_out[...], (1, 0))

        @pl.when(ends)
        def _():
            dk[...] = dk_sum[...].astype(dk.dtype)
            dv[...] = dv_sum[...].astype(dv.dtype)

    return _call(
        kernel,
        plan,
        *_residuals(plan, q, k, v, d_out, lse, correction),
        (_like(q, k.shape, k.dtype), _like(q, v.shape, v.dtype)),
        (plan.of_keys(k), plan.of_keys(v)),
        [pltpu.VMEM((plan.keys, x.shape[-1]), jnp.float32) for x in (k, v)],
        interpret,
    )


def _residuals(plan, q, k, v, d_out, lse, correction):
    """Operands of both backward kernels and their blocks."""
    row = plan.rows_of_queries(1)
    return (
        (q, k, v, d_out, lse[:, :, None], correction[:, :, None]),
        (plan.of_queries(q), plan.of_keys(k), plan.of_keys(v), plan.of_queries(d_out), row, row),
    )


def _weights(marks, kv_marks, q, k, v, d_out, lse, correction):
    """Softmax of a block of scores, and the gradient of the scores, both [key, query]."""
    weights = jnp.exp(_scores(marks, kv_marks, q, k) - lse[...])
    d_scores = weights * (_dot(v[...], d_out[...], (1, 1)) - correction[...])
    return weights.astype(v.dtype), d_scores.astype(q.dtype)


def _scores(marks, kv_marks, q, k):
    """A block of scores [key, query], very low where a query does not see the key."""
    visible = (marks[:1] == kv_marks[:, :1]) & (marks[1:] >= kv_marks[:, 1:])
    return jnp.where(visible, _dot(k[...], q[...], (1, 1)), MASKED)


def _dot(a, b, axes):
    """Sums over one axis of each, f32 numbers in full precision."""
    full = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((axes[:1], axes[1:]), ((), ()))
    return jax.lax.dot_general(a, b, contracted, full, preferred_element_type=jnp.float32)


def _call(kernel, plan, operands, in_specs, out_shape, out_specs, scratch, interpret):
    """Runs ``kernel(begins, ends, marks, key marks, *operands, *results, *scratch)``.

    ``begins`` and ``ends`` say whether a visit is the first and the last of an outer block.
    """

    def body(visits, *refs):
        i = pl.program_id(1)
        before, owner, after = (
            jax.lax.div(visits[j], plan.inner) for j in (jnp.maximum(i - 1, 0), i, i + 1)
        )
        kernel((i == 0) | (before != owner), owner != after, *refs)

    mark_specs = (
        plan.spec((None, 2, plan.queries), lambda h, r, i, j: (r, 0, i)),
        plan.spec((None, plan.keys, 2), lambda h, r, i, j: (r, j, 0)),
    )
    return pl.pallas_call(
        body,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(operands[0].shape[1], plan.count),
            in_specs=[*mark_specs, *in_specs],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,  # by XLA: TPU interpretation through callbacks can hang on one core
    )(plan.visits, plan.marks, plan.kv_marks, *operands)


def _like(x, shape, dtype):
    """A result that, inside `jax.shard_map`, varies over the same mesh axes as ``x``."""
    varying = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


BACKEND = Backend(_multiples, _to_heads, _forward, _backward)
INTERPRETED = BACKEND._replace(
    forward=partial(_forward, interpret=True), backward=partial(_backward, interpret=True)
)
