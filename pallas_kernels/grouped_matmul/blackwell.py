"""The two grouped products as Pallas kernels for NVIDIA Blackwell (sm_100a), on tcgen05.

Numbers are bf16. MXFP8 and NVFP4 go in as codes, with their block scales in the tensor cores' own
order (`scale_layout`), which the instruction applies; the outer scales of NVFP4 multiply the sums
once. A tile of rows starts at a multiple of 128 whatever the groups, so the scales of all rows are
reordered at once; for the gradient of ``rhs`` every group begins with a tile.

All of it compiles for a B200; none has run on one. jax's interpreter does not know block scales:
that every step reads the codes and scales it should is tested apart from the kernels. See `gpu` for
what else is shown, and how.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mxfp8, nvfp4, scale_layout
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.operands import Operand

TILE = gpu.TILE


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
    left, right = operand(lhs, 1), operand(rhs, 1 if transposed else 0)
    return gpu.matmul(_CHIP, left, right, group_sizes, dtype, scales)


def weight_gradient(
    lhs: Operand, d_out: Operand, group_sizes: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """See `gpu.weight_gradient`."""
    return gpu.weight_gradient(_CHIP, operand(lhs, 0), operand(d_out, 0), group_sizes, dtype)


def operand(x: Operand, axis: int) -> gpu.Operand:
    """Codes as the floats that they are, block scales in the tensor cores' order."""
    bits = jax.lax.bitcast_convert_type
    match x:
        case mxfp8.MXFP8(codes, scales):
            scales = scale_layout.swizzle(scales if axis == 1 else scales.swapaxes(-1, -2))
            scales = bits(scales, jnp.float8_e8m0fnu)
            return gpu.Operand(bits(codes, jnp.float8_e4m3fn), axis, 128, scales)
        case nvfp4.NVFP4(codes, scales, _):
            scales = bits(scale_layout.swizzle(scales), jnp.float8_e4m3fn)
            pairs = bits(codes, jnp.float4_e2m1fn)  # [..., 2], the low nibble first
            return gpu.Operand(pairs.reshape(*codes.shape[:-1], -1), axis, 256, scales)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"operands are {x.dtype}; bfloat16 and codes are supported")
    return gpu.Operand(x, axis, 64)


def _sum(lhs, rhs, steps, refs, blocks) -> jax.Array:
    """See `gpu.Chip`."""

    def total(acc, done, *scales):
        def step(indices, *tiles):
            (i,) = indices
            a, b = tiles[0], tiles[len(lhs.arrays)]
            for source, scale in zip(tiles[1::2], scales, strict=True) if scales else ():
                plgpu.async_copy_scales_to_tmem(source, scale)  # the product waits for them
            plgpu.tcgen05_mma(
                acc,
                a if lhs.axis == 1 else a.T,
                b.T if rhs.axis == 1 else b,
                done.at[jax.lax.rem(i, 2)],
                accumulate=i > 0,
                **dict(zip(("a_scale", "b_scale"), scales, strict=False)),
            )

            @pl.when(i > 0)
            def _():  # the blocks of the step before are about to be overwritten
                plgpu.barrier_wait(done.at[jax.lax.rem(i - 1, 2)])

        plgpu.emit_pipeline(step, grid=(steps,), in_specs=blocks, max_concurrent_steps=3)(*refs)

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_wait(done.at[jax.lax.rem(steps - 1, 2)])

        @pl.when(steps == 0)
        def _():
            plgpu.async_store_tmem(acc, jnp.zeros(acc.shape, acc.dtype))
            plgpu.commit_tmem()

        return plgpu.async_load_tmem(acc)

    return pl.run_scoped(
        total,
        plgpu.TMEM((lhs.tile, rhs.tile), jnp.float32),
        plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        *(_scales_of_a_step(x) for x in (lhs, rhs) if x.scales is not None),
    )


def _scales_of_a_step(x: gpu.Operand):
    blocks = scale_layout.COLUMNS * x.scales.shape[-3] * x.depth // x.summed
    layout = plgpu.TMEMLayout.SCALES_LAYOUT
    return plgpu.TMEM((x.tile, blocks), x.scales.dtype, layout=layout)


_CHIP = gpu.Chip(_sum, plgpu.Layout.TCGEN05)
