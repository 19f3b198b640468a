"""Attention for NVIDIA Blackwell: Pallas kernels on its tensor memory (tcgen05).

The same three kernels as in `hopper`, but products stay in tensor memory, 512 columns of 128 rows,
until a warpgroup loads them. Weights and gradients of scores go back there as operands, rounded to
bf16. Sums of gradients stay there from the first block to the last; the output's is kept in
registers, where each step has to rescale it. The backward kernels have one computing warpgroup, so
matrix units wait while it computes: sums of more rows would not fit.

Tests compile them for B200 and run them by interpretation, which finds no race between threads.
They have not run on a B200 yet, so nothing is tuned.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registers
from pallas_kernels.flash_attention import block_plan, gpu
from pallas_kernels.flash_attention.marks import Marks
from pallas_kernels.flash_attention.vjp import Backend

FORWARD = gpu.Tiling(warpgroups=2, rows=128, block=64, stages=3)
BACKWARD = gpu.Tiling(warpgroups=1, rows=128, block=64, stages=3)

_CHUNK = 32  # columns that a warpgroup loads at a time from a wide sum


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Marks | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output, in the dtype of ``v``, and log-sum-exp; see `vjp.Backend`."""
    marks = gpu.checked(q, k, v, visibility)
    features = v.shape[3]

    def compute(owned, results, walk, warpgroup, *scratch):
        (q, *ids), (out, lse) = owned, results
        *matrices, done = scratch
        scores_tmem, weights_tmem, mixed_tmem = (
            ref.at[:, pl.ds(warpgroup * width, width)]
            for ref, width in zip(matrices, (FORWARD.block, FORWARD.block, features), strict=True)
        )
        done = done.at[warpgroup]

        def step(blocks, masked, carry):
            k, v, *kv_ids = blocks
            totals, peak, norm = carry
            plgpu.tcgen05_mma(scores_tmem, q, gpu.transposed(k), accumulate=False)
            _finish(done)
            scores = _load(scores_tmem)
            seen = gpu.visible(ids, kv_ids, scores.shape, 0) if masked else None
            weights, decay, peak, norm = gpu.online_softmax(scores, seen, peak, norm)
            plgpu.async_store_tmem(weights_tmem, weights.astype(v.dtype))
            plgpu.commit_tmem()
            plgpu.tcgen05_mma(mixed_tmem, weights_tmem, v, accumulate=False)
            _finish(done)
            totals = tuple(
                total * gpu.along(0, decay, total.shape) + _load(mixed_tmem.at[:, columns])
                for total, columns in zip(totals, _chunks(features), strict=True)
            )
            return totals, peak, norm

        nothing = jnp.full(lse.shape, gpu.NOTHING_SEEN, jnp.float32)
        empty = tuple(jnp.zeros((FORWARD.rows, _CHUNK), jnp.float32) for _ in _chunks(features))
        totals, peak, norm = walk(step, (empty, nothing, jnp.zeros_like(nothing)))
        norm, log_norm = gpu.end_of_softmax(peak, norm)
        registers.store(lse, log_norm)
        for total, columns in zip(totals, _chunks(features), strict=True):
            part = total / gpu.along(0, norm, total.shape)
            registers.store(out.at[:, columns], part.astype(v.dtype))

    def memory(width, dtype, **kwargs):
        shape = FORWARD.rows, FORWARD.warpgroups * width
        return plgpu.TMEM(shape, dtype, **kwargs)

    return gpu.launch(
        compute,
        block_plan.for_queries(marks, FORWARD.tile, FORWARD.block),
        owned=(q, marks.segments, marks.positions),
        streamed=(k, v, marks.kv_segments, marks.kv_positions),
        out_type=gpu.forward_types(q, v),
        tiling=FORWARD,
        scratch=(
            memory(FORWARD.block, jnp.float32),
            memory(FORWARD.block, v.dtype, packed=True),
            memory(features, jnp.float32),
            plgpu.Barrier(num_barriers=FORWARD.warpgroups, orders_tensor_core=True),
        ),
    )


def key_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    correction: jax.Array,
    visibility: Marks | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of keys and values, in their dtypes; see `vjp.Backend`."""
    marks = gpu.checked(q, k, v, visibility)

    def compute(owned, results, walk, _, *scratch):
        k, v, *kv_ids = owned
        scores_tmem, d_weights_tmem, weights_tmem, d_scores_tmem, dk, dv, done = scratch
        _clear(dk, dv)

        def step(blocks, masked, carry):
            q, d_out, lse, correction, *ids = blocks
            plgpu.tcgen05_mma(scores_tmem, k, gpu.transposed(q), accumulate=False)
            plgpu.tcgen05_mma(d_weights_tmem, v, gpu.transposed(d_out), accumulate=False)
            _finish(done)
            scores = _load(scores_tmem)  # [key, query]
            weights = gpu.probabilities(scores, lse[...], 1)
            if masked:
                weights = jnp.where(gpu.visible(ids, kv_ids, scores.shape, 1), weights, 0.0)
            d_weights = _load(d_weights_tmem)
            d_scores = weights * (d_weights - gpu.along(1, correction[...], scores.shape))
            plgpu.async_store_tmem(weights_tmem, weights.astype(v.dtype))
            plgpu.async_store_tmem(d_scores_tmem, d_scores.astype(q.dtype))
            plgpu.commit_tmem()
            plgpu.tcgen05_mma(dv, weights_tmem, d_out)
            plgpu.tcgen05_mma(dk, d_scores_tmem, q)
            _finish(done)
            return carry

        walk(step, ())
        _store(results, (dk, dv), k.dtype)

    product = BACKWARD.rows, BACKWARD.block
    return gpu.launch(
        compute,
        block_plan.for_keys(marks, BACKWARD.block, BACKWARD.tile),
        owned=(k, v, marks.kv_segments, marks.kv_positions),
        streamed=(q, d_out, lse, correction, marks.segments, marks.positions),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        tiling=BACKWARD,
        scratch=(
            plgpu.TMEM(product, jnp.float32),
            plgpu.TMEM(product, jnp.float32),
            plgpu.TMEM(product, v.dtype, packed=True),
            plgpu.TMEM(product, q.dtype, packed=True),
            plgpu.TMEM((BACKWARD.rows, k.shape[3]), jnp.float32),
            plgpu.TMEM((BACKWARD.rows, v.shape[3]), jnp.float32),
            plgpu.Barrier(orders_tensor_core=True),
        ),
    )


def query_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    correction: jax.Array,
    visibility: Marks | jax.Array,
) -> jax.Array:
    """Gradient of queries; see `vjp.Backend`."""
    marks = gpu.checked(q, k, v, visibility)

    def compute(owned, results, walk, _, *scratch):
        q, d_out, lse, correction, *ids = owned
        scores_tmem, d_weights_tmem, d_scores_tmem, dq, done = scratch
        _clear(dq)

        def step(blocks, masked, carry):
            k, v, *kv_ids = blocks
            plgpu.tcgen05_mma(scores_tmem, q, gpu.transposed(k), accumulate=False)
            plgpu.tcgen05_mma(d_weights_tmem, d_out, gpu.transposed(v), accumulate=False)
            _finish(done)
            scores = _load(scores_tmem)
            weights = gpu.probabilities(scores, lse[...], 0)
            if masked:
                weights = jnp.where(gpu.visible(ids, kv_ids, scores.shape, 0), weights, 0.0)
            d_weights = _load(d_weights_tmem)
            d_scores = weights * (d_weights - gpu.along(0, correction[...], scores.shape))
            plgpu.async_store_tmem(d_scores_tmem, d_scores.astype(k.dtype))
            plgpu.commit_tmem()
            plgpu.tcgen05_mma(dq, d_scores_tmem, k)
            _finish(done)
            return carry

        walk(step, ())
        _store(results, (dq,), jnp.float32)

    product = BACKWARD.rows, BACKWARD.block
    (dq,) = gpu.launch(
        compute,
        block_plan.for_queries(marks, BACKWARD.tile, BACKWARD.block),
        owned=(q, d_out, lse, correction, marks.segments, marks.positions),
        streamed=(k, v, marks.kv_segments, marks.kv_positions),
        out_type=[jax.ShapeDtypeStruct(q.shape, jnp.float32)],
        tiling=BACKWARD,
        scratch=(
            plgpu.TMEM(product, jnp.float32),
            plgpu.TMEM(product, jnp.float32),
            plgpu.TMEM(product, k.dtype, packed=True),
            plgpu.TMEM((BACKWARD.rows, q.shape[3]), jnp.float32),
            plgpu.Barrier(orders_tensor_core=True),
        ),
    )
    return dq


def _backward(*args):
    dk, dv = key_gradients(*args)
    return query_gradient(*args), dk, dv


def _chunks(width):
    return [pl.ds(first, _CHUNK) for first in range(0, width, _CHUNK)]


def _finish(barrier):
    """Waits for all matmuls that this warpgroup has issued."""
    plgpu.tcgen05_commit_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _load(ref):
    value = plgpu.async_load_tmem(ref)
    plgpu.wait_load_tmem()
    return value


def _clear(*sums):
    for ref in sums:
        for columns in _chunks(ref.shape[1]):
            plgpu.async_store_tmem(ref.at[:, columns], jnp.zeros((len(ref), _CHUNK), jnp.float32))
    plgpu.commit_tmem()


def _store(results, sums, dtype):
    for result, total in zip(results, sums, strict=True):
        for columns in _chunks(total.shape[1]):
            registers.store(result.at[:, columns], _load(total.at[:, columns]).astype(dtype))


BACKEND = Backend(
    multiples=lambda q_seq, kv_seq, in_order: (FORWARD.tile, FORWARD.tile),
    to_heads=lambda x: x,
    forward=forward,
    backward=_backward,
)
