"""What the kernels for NVIDIA GPUs share: how programs, copies and computation are laid out.

A program owns a tile of rows of one head and walks through the blocks of the other side that its
`BlockPlan` lists, those that need no mask first. Some warpgroups compute, with rows of their own;
one more, which needs few registers, keeps a ring of blocks in shared memory filled (Shah et al.
2024).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.block_plan import BlockPlan
from pallas_kernels.flash_attention.marks import Marks, in_order

MAX_QK, MAX_V = 192, 128  # features, for which tiles fit into shared memory
LOG2E = math.log2(math.e)
NOTHING_SEEN = -1e30  # peak of no scores; finite, so that differences of peaks are numbers


class Tiling(NamedTuple):
    """How the work of a kernel is cut.

    Attributes:
      warpgroups: that compute, in a program.
      rows: that each of them owns.
      block: rows of the other side in a step.
      stages: blocks in the ring; what fits into shared memory.
    """

    warpgroups: int
    rows: int
    block: int
    stages: int

    @property
    def tile(self) -> int:
        """Rows that a program owns."""
        return self.warpgroups * self.rows


def launch(
    compute: Callable,
    plan: BlockPlan,
    owned: Sequence[jax.Array],
    streamed: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    tiling: Tiling,
    scratch: Sequence[Any] = (),
) -> Sequence[jax.Array]:
    """Computes tiles of the results from those of ``owned`` and planned blocks of ``streamed``.

    Args:
      compute: called with references to a warpgroup's rows of ``owned`` and of the results, walk,
        the warpgroup's number, and references to ``scratch``. walk(step, carry) gives the last
        carry of step(references to a block of ``streamed``, whether to mask, carry) -> carry.
      plan: which blocks every tile visits.
      owned: arrays [batch, seq, heads, feature], [batch, heads, seq] or [batch, seq].
      streamed: such arrays.
      out_type: such arrays, with heads.
      tiling: how to cut all this.
      scratch: what else the computing warpgroups of a program share.
    """
    _, rows, block, stages = tiling
    memory = _memory(owned, tiling.warpgroups, rows), _memory(streamed, stages, block)

    def kernel(order, unmasked, visited, *refs, memory, loaded, ready, free, scratch):
        owned_refs, refs = refs[: len(owned)], refs[len(owned) :]
        streamed_refs, results = refs[: len(streamed)], refs[len(streamed) :]
        tiles, ring = memory
        row, head, tile = (jax.lax.axis_index(name) for name in ("row", "head", "tile"))
        warpgroup = jax.lax.axis_index("warpgroup")
        steps = visited[row, tile]

        @pl.when(warpgroup == tiling.warpgroups)
        def _():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, steps)
            def _(i):
                slot = jax.lax.rem(i, stages)
                here = pl.ds(order[row, tile, i] * block, block)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                for source, target in zip(streamed_refs, ring, strict=True):
                    source = _part(source, row, head, here)
                    plgpu.copy_gmem_to_smem(source, target.at[slot], ready.at[slot])

        @pl.when(warpgroup < tiling.warpgroups)
        def _():
            plgpu.set_max_registers(240, action="increase")
            here = pl.ds(tile * tiling.tile + warpgroup * rows, rows)
            mine = [ref.at[warpgroup] for ref in tiles]
            for source, target in zip(owned_refs, mine, strict=True):
                source = _part(source, row, head, here)
                plgpu.copy_gmem_to_smem(source, target, loaded.at[warpgroup])
            plgpu.barrier_wait(loaded.at[warpgroup])

            def walk(step, carry):
                def visit(masked, i, carry):
                    slot = jax.lax.rem(i, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    carry = step([ref.at[slot] for ref in ring], masked, carry)
                    plgpu.commit_smem()  # orders ordinary reads before the next copy
                    plgpu.barrier_arrive(free.at[slot])
                    return carry

                middle = unmasked[row, tile]
                carry = jax.lax.fori_loop(0, middle, partial(visit, False), carry)
                return jax.lax.fori_loop(middle, steps, partial(visit, True), carry)

            outputs = [_part(ref, row, head, here) for ref in results]
            compute(mine, outputs, walk, warpgroup, *scratch)

    batch, programs = plan.visited.shape
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(owned[0].shape[2], programs, batch),
        grid_names=("head", "tile", "row"),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "memory": memory,
            "loaded": plgpu.Barrier(num_arrivals=len(owned), num_barriers=tiling.warpgroups),
            "ready": plgpu.Barrier(num_arrivals=len(streamed), num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=stages),
            "scratch": tuple(scratch),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )(*plan, *owned, *streamed)


def _memory(arrays: Sequence[jax.Array], count: int, rows: int) -> list[Any]:
    """Shared memory for ``count`` times some rows of one head of each array."""
    swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return [
        plgpu.SMEM((count, rows, x.shape[3]), x.dtype, transforms=swizzled)
        if x.ndim == 4
        else plgpu.SMEM((count, rows), x.dtype)
        for x in arrays
    ]


def _part(ref, row, head, rows):
    """Some rows of one head of an array of a kind that `launch` takes."""
    return ref.at[{4: (row, rows, head), 3: (row, head, rows), 2: (row, rows)}[ref.ndim]]


def online_softmax(
    scores: jax.Array, seen: jax.Array | None, peak: jax.Array, norm: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Takes further keys into a softmax over keys.

    Args:
      scores: f32 [query, key].
      seen: bool [query, key], or None if all are.
      peak: f32 [query]; the greatest score so far, times log2(e); at first `NOTHING_SEEN`.
      norm: f32 [query]; sum of all weights so far; at first 0.

    Returns:
      Weights of these keys, the factor on all sums over previous ones, the new peak and norm.
    """
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, scores.max(1) * LOG2E)
    weights = jnp.exp2(scores * LOG2E - along(0, new_peak, scores.shape))
    decay = jnp.exp2(peak - new_peak)
    return weights, decay, new_peak, norm * decay + weights.sum(1)


def end_of_softmax(peak: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What to divide sums by, and log-sum-exp; both harmless for queries that saw nothing."""
    norm = jnp.where(norm == 0, 1.0, norm)
    return norm, peak / LOG2E + jnp.log(norm)


def probabilities(scores: jax.Array, lse: jax.Array, query_axis: int) -> jax.Array:
    """The weights again, from scores and f32 [query] log-sum-exp; f32 [query, key] or transposed.

    Those of keys that the query does not see mean nothing.
    """
    return jnp.exp2(scores * LOG2E - along(query_axis, lse * LOG2E, scores.shape))


def visible(ids: Sequence, kv_ids: Sequence, shape: tuple[int, int], query_axis: int) -> jax.Array:
    """Which keys a query sees, bool, from references to segments and positions of both."""
    segments, positions = (along(query_axis, ref[...], shape) for ref in ids)
    kv_segments, kv_positions = (along(1 - query_axis, ref[...], shape) for ref in kv_ids)
    return (segments == kv_segments) & (positions >= kv_positions)


def along(axis: int, x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A matrix of this shape from a vector that lies along an axis of it."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def transposed(ref):
    """A view of a matrix in shared memory."""
    return ref.transpose((1, 0))


def forward_types(q: jax.Array, v: jax.Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Output and log-sum-exp."""
    batch, q_seq, heads, _ = q.shape
    return (
        jax.ShapeDtypeStruct((batch, q_seq, heads, v.shape[3]), v.dtype),
        jax.ShapeDtypeStruct((batch, heads, q_seq), jnp.float32),
    )


def checked(q: jax.Array, k: jax.Array, v: jax.Array, visibility: Marks | jax.Array) -> Marks:
    """Marks from either kind of visibility.

    Raises:
      NotImplementedError: if the kernels are not made for these operands.
    """
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        raise NotImplementedError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: must be bfloat16")
    if not (q.size and k.size and v.size):
        raise NotImplementedError(f"q {q.shape}, k {k.shape}, v {v.shape}: must not be empty")
    qk, features = q.shape[3], v.shape[3]
    if qk % 64 or features % 64 or qk > MAX_QK or features > MAX_V:
        raise NotImplementedError(
            f"qk, v = {qk, features}: must be multiples of 64, at most {MAX_QK, MAX_V}"
        )
    return visibility if isinstance(visibility, Marks) else in_order(visibility)
