"""The two grouped products as Pallas kernels for NVIDIA Hopper (sm_90a), on wgmma.

Numbers are bf16; the sums stay in the tensor cores' f32 accumulators. MXFP8 goes in as codes: the
instruction knows no scales, so every block of 32 products is summed on its own, and added to the
total in f32 with the scales of its row and column. Inside a block the tensor cores of Hopper keep
about 14 bits (DeepSeek-V3 report, section 3.3.2). For every pass of the tensor cores over a tile
the other cores need two, so the product takes about as long as in bf16; what FP8 saves is memory
and the traffic of unpacking. NVFP4, which Hopper cannot multiply, is unpacked to bf16.

All of it compiles for an H100; none has run on one. See `gpu` for what else is shown, and how.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mxfp8, registers
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.operands import Operand, numbers

TILE = gpu.TILE
_LAYOUT = plgpu.Layout.WGMMA


def matmul(
    lhs: Operand,
    rhs: Operand,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    transposed: bool = False,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.xla.matmul`."""
    chip, left, right = _operands(lhs, rhs, (1, 1 if transposed else 0))
    return gpu.matmul(chip, left, right, group_sizes, dtype, scales)


def weight_gradient(
    lhs: Operand, d_out: Operand, group_sizes: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """See `gpu.weight_gradient`."""
    chip, left, right = _operands(lhs, d_out, (0, 0))
    return gpu.weight_gradient(chip, left, right, group_sizes, dtype)


def _operands(
    lhs: Operand, rhs: Operand, axes: tuple[int, int]
) -> tuple[gpu.Chip, gpu.Operand, gpu.Operand]:
    """The way to multiply them, and both as it takes them; ``axes`` are summed over."""
    if isinstance(lhs, mxfp8.MXFP8):
        # the narrower tile leaves registers for the sum of a block next to the total
        left, right = codes(lhs, axes[0], TILE), codes(rhs, axes[1], TILE // 2)
        return gpu.Chip(_sum_blocks, _LAYOUT), left, right
    return gpu.Chip(_sum, _LAYOUT), _bf16(lhs, axes[0]), _bf16(rhs, axes[1])


def _bf16(x: Operand, axis: int) -> gpu.Operand:
    values = numbers(x)
    if values.dtype != jnp.bfloat16:
        raise NotImplementedError(f"operands are {values.dtype}; bfloat16 and codes are supported")
    return gpu.Operand(values, axis, 64)


def codes(x: mxfp8.MXFP8, axis: int, tile: int) -> gpu.Operand:
    """Codes along the last axis, as FP8 must be, and f32 scales [..., tile, block, feature]."""
    elements, scales = x if axis == 1 else (y.swapaxes(-1, -2) for y in x)
    *leading, features, blocks = scales.shape
    powers = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    powers = jnp.pad(powers, (*((0, 0),) * len(leading), (0, -features % tile), (0, 0)))
    powers = powers.reshape(*leading, -1, tile, blocks).swapaxes(-1, -2)
    values = jax.lax.bitcast_convert_type(elements, jnp.float8_e4m3fn)
    return gpu.Operand(values, 1, 32, powers, tile)


def _sum(lhs, rhs, steps, refs, blocks) -> jax.Array:
    """Sums of bf16 products, see `gpu.Chip`."""

    def total(acc):
        def step(_, a, b):
            plgpu.wgmma(acc, a if lhs.axis == 1 else a.T, b.T if rhs.axis == 1 else b)
            plgpu.wgmma_wait(1)  # the blocks of the step before are about to be overwritten

        _pipeline(step, steps, blocks, 3)(*refs)
        return acc[...]

    return pl.run_scoped(total, plgpu.ACC((lhs.tile, rhs.tile)))


def _sum_blocks(lhs, rhs, steps, refs, blocks) -> jax.Array:
    """Sums of FP8 products under block scales, see `gpu.Chip`."""
    shape = lhs.tile, rhs.tile

    def step(_, a, row_scales, b, column_scales, total):
        def block(acc):
            plgpu.wgmma(acc, a, b.T)
            return acc[...]

        def spread(ref, axis):
            vector = plgpu.layout_cast(ref[0, 0], _LAYOUT.reduce(1 - axis))
            return registers.spread(vector, shape, (axis,), _LAYOUT)

        scales = spread(row_scales, 0) * spread(column_scales, 1)
        plgpu.commit_smem()  # all threads have read them; what they are in may be overwritten
        return total + pl.run_scoped(block, plgpu.ACC(shape)) * scales

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _LAYOUT)
    return _pipeline(step, steps, blocks, 6, zeros)(*refs)


def _pipeline(step, steps, blocks, stages, carry=None):
    return plgpu.emit_pipeline(
        step, grid=(steps,), in_specs=blocks, max_concurrent_steps=stages, init_carry=carry
    )
