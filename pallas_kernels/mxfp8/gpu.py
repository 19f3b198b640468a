"""MXFP8 as a Mosaic GPU kernel for Hopper and Blackwell: one read of the input, one write.

A thread holds whole blocks in its registers, so that a block's maximum needs no exchange between
threads. Blocks along the last axis are consecutive bytes, one a thread; blocks along the rows lie
side by side, two a thread. Nothing passes through shared memory.

What is shown: compiled for H100 and B200 down to machine code, and byte for byte "xla" where jax
interprets it. It has not run on a chip yet.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import float_bits as fb
from pallas_kernels import registers
from pallas_kernels.mxfp8 import rounding

# What a program's four warps work on at a time, and who holds which of it, for blocks along axis 0
# and 1: tiles of 32 rows, a thread 2 columns; or of 128 blocks, a thread one, 8 elements a load.
_TILES = (32, 256), (128, 32)
_LAYOUTS = (
    plgpu.Layout.TILED(plgpu.Tiling(((32, 256), (64,), (2,))), (-3,), (-2,), -1),
    plgpu.Layout.TCGEN05_TMEM_NATIVE(8),
)


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales; see `pallas_kernels.mxfp8.quantize`.

    Args:
      x: [rows, columns]: a multiple of 4096 elements for ``axis`` 1, of 256 columns for 0.
      axis: 0 or 1.
    """
    matrix = x.reshape(-1, rounding.BLOCK) if axis else x
    tile, layout = _TILES[axis], _LAYOUTS[axis]
    if x.size == 0 or any(n % size for n, size in zip(matrix.shape, tile, strict=True)):
        raise NotImplementedError(
            f"x {x.shape}, with blocks along axis {axis} a matrix {matrix.shape}, must not be "
            f"empty and must consist of tiles {tile}"
        )
    down, across = (n // size for n, size in zip(matrix.shape, tile, strict=True))
    blocks = tile[1 - axis]  # of a tile

    def kernel(x_ref, codes_ref, scales_ref):
        program = jax.lax.axis_index("program")
        i, j = jax.lax.div(program, across), jax.lax.rem(program, across)
        here = pl.ds(i * tile[0], tile[0]), pl.ds(j * tile[1], tile[1])
        bits = fb.widen(fb.native_bits(registers.load(x_ref.at[here], layout)))
        scales = rounding.scale_codes(fb.magnitude(bits).max(axis))
        spread = registers.spread(scales, tile, [1 - axis], layout)
        codes = rounding.element_codes(bits, spread)
        registers.store(codes_ref.at[here], codes.astype(jnp.uint8))
        registers.store(scales_ref.at[i, pl.ds(j * blocks, blocks)], scales.astype(jnp.uint8))

    shapes = matrix.shape, (down, across * blocks)
    codes, scales = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes],
        grid=(down * across,),
        grid_names=("program",),
    )(matrix)
    return codes.reshape(x.shape), scales.reshape(len(x), -1) if axis else scales
