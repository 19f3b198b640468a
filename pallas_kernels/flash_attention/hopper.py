"""Attention for NVIDIA Hopper: Pallas kernels on its warpgroup matmuls (wgmma).

Forward pass, gradients of keys and values, and gradient of queries are a kernel each; `gpu` has
what they share. Products and sums are f32, in registers. The backward kernels recompute
probabilities and use no atomics: gradients are the same bits every time.

Tests compile them for H100 and run them by interpretation, which finds no race between threads.
They have not run on an H100 yet, so nothing is tuned.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registers
from pallas_kernels.flash_attention import block_plan, gpu
from pallas_kernels.flash_attention.marks import Marks
from pallas_kernels.flash_attention.vjp import Backend

FORWARD = gpu.Tiling(warpgroups=2, rows=64, block=128, stages=2)
BACKWARD = gpu.Tiling(warpgroups=2, rows=64, block=64, stages=3)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Marks | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output, in the dtype of ``v``, and log-sum-exp; see `vjp.Backend`."""
    marks = gpu.checked(q, k, v, visibility)

    def compute(owned, results, walk, _):
        (q, *ids), (out, lse) = owned, results

        def step(blocks, masked, carry):
            k, v, *kv_ids = blocks
            total, peak, norm = carry
            scores = _matmul(q, gpu.transposed(k))
            seen = gpu.visible(ids, kv_ids, scores.shape, 0) if masked else None
            weights, decay, peak, norm = gpu.online_softmax(scores, seen, peak, norm)
            mixed = _matmul(weights.astype(v.dtype), v)
            return total * gpu.along(0, decay, total.shape) + mixed, peak, norm

        nothing = jnp.full(lse.shape, gpu.NOTHING_SEEN, jnp.float32)
        empty = jnp.zeros(out.shape, jnp.float32), nothing, jnp.zeros_like(nothing)
        total, peak, norm = walk(step, empty)
        norm, log_norm = gpu.end_of_softmax(peak, norm)
        registers.store(lse, log_norm)
        registers.store(out, (total / gpu.along(0, norm, total.shape)).astype(v.dtype))

    return gpu.launch(
        compute,
        block_plan.for_queries(marks, FORWARD.tile, FORWARD.block),
        owned=(q, marks.segments, marks.positions),
        streamed=(k, v, marks.kv_segments, marks.kv_positions),
        out_type=gpu.forward_types(q, v),
        tiling=FORWARD,
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

    def compute(owned, results, walk, _):
        k, v, *kv_ids = owned

        def accumulate(dk, dv):
            def step(blocks, masked, carry):
                q, d_out, lse, correction, *ids = blocks
                scores = _matmul(k, gpu.transposed(q))  # [key, query]
                weights = gpu.probabilities(scores, lse[...], 1)
                if masked:
                    weights = jnp.where(gpu.visible(ids, kv_ids, scores.shape, 1), weights, 0.0)
                d_weights = _matmul(v, gpu.transposed(d_out))
                d_scores = weights * (d_weights - gpu.along(1, correction[...], scores.shape))
                plgpu.wgmma(dv, weights.astype(v.dtype), d_out)
                plgpu.wgmma(dk, d_scores.astype(q.dtype), q)
                plgpu.wgmma_wait(0)
                return carry

            walk(step, ())
            for result, total in zip(results, (dk, dv), strict=True):
                registers.store(result, total[...].astype(k.dtype))

        pl.run_scoped(accumulate, *(plgpu.ACC(ref.shape, jnp.float32) for ref in (k, v)))

    return gpu.launch(
        compute,
        block_plan.for_keys(marks, BACKWARD.block, BACKWARD.tile),
        owned=(k, v, marks.kv_segments, marks.kv_positions),
        streamed=(q, d_out, lse, correction, marks.segments, marks.positions),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        tiling=BACKWARD,
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

    def compute(owned, results, walk, _):
        q, d_out, lse, correction, *ids = owned

        def accumulate(dq):
            def step(blocks, masked, carry):
                k, v, *kv_ids = blocks
                scores = _matmul(q, gpu.transposed(k))
                weights = gpu.probabilities(scores, lse[...], 0)
                if masked:
                    weights = jnp.where(gpu.visible(ids, kv_ids, scores.shape, 0), weights, 0.0)
                d_weights = _matmul(d_out, gpu.transposed(v))
                d_scores = weights * (d_weights - gpu.along(0, correction[...], scores.shape))
                plgpu.wgmma(dq, d_scores.astype(k.dtype), k)
                plgpu.wgmma_wait(0)
                return carry

            walk(step, ())
            registers.store(results[0], dq[...])

        pl.run_scoped(accumulate, plgpu.ACC(q.shape, jnp.float32))

    (dq,) = gpu.launch(
        compute,
        block_plan.for_queries(marks, BACKWARD.tile, BACKWARD.block),
        owned=(q, d_out, lse, correction, marks.segments, marks.positions),
        streamed=(k, v, marks.kv_segments, marks.kv_positions),
        out_type=[jax.ShapeDtypeStruct(q.shape, jnp.float32)],
        tiling=BACKWARD,
    )
    return dq


def _backward(*args):
    dk, dv = key_gradients(*args)
    return query_gradient(*args), dk, dv


def _matmul(left, right):
    def run(product):
        plgpu.wgmma(product, left, right)
        return product[...]

    return pl.run_scoped(run, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


BACKEND = Backend(
    multiples=lambda q_seq, kv_seq, in_order: (FORWARD.tile, FORWARD.tile),
    to_heads=lambda x: x,
    forward=forward,
    backward=_backward,
)
