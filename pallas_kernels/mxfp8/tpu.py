"""MXFP8 as a Pallas kernel: one read of the input, one write of codes and scales."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import float_bits as fb
from pallas_kernels.mxfp8 import rounding, xla

# Rows and columns of a program for blocks along axis 0 and 1: with 32 x 128 scales, the least at
# which TPUs tile them, or more. What sticks out of the matrix is dropped.
TILES = (1024, 256), (32, 4096)


def quantize(
    x: jax.Array, axis: int, *, tile: tuple[int, int] | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Codes and scales; see `pallas_kernels.mxfp8.quantize`.

    Args:
      x: any shape if ``axis`` is the last, [rows, columns] if it is the first.
      axis: not negative.
      tile: rows and columns of a program, a multiple of 32 along the blocks.
      interpret: runs the kernel step by step on any platform.
    """
    if x.size == 0:
        raise NotImplementedError(f"x {x.shape} is empty")
    if axis == x.ndim - 1:
        matrix, along = x.reshape(-1, x.shape[-1]), 1
    elif x.ndim == 2:
        matrix, along = x, 0
    else:
        raise NotImplementedError(f"blocks along axis {axis} of {x.ndim}: the last, or 0 of 2")

    def kernel(x_ref, codes_ref, scales_ref):
        wide = fb.as_float(fb.widen(fb.native_bits(x_ref[...])))  # TPUs compute in 32 bits
        codes_ref[...], scales_ref[...] = xla.quantize(wide, along)

    def shorter(shape):
        return tuple(n // rounding.BLOCK if i == along else n for i, n in enumerate(shape))

    tile = tuple(map(min, tile or TILES[along], matrix.shape))
    shapes = matrix.shape, shorter(matrix.shape)
    here = pl.BlockSpec(tile, lambda i, j: (i, j))
    codes, scales = pl.pallas_call(
        kernel,
        grid=tuple(map(pl.cdiv, matrix.shape, tile)),
        in_specs=[here],
        out_specs=[here, pl.BlockSpec(shorter(tile), lambda i, j: (i, j))],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes],
        interpret=interpret,  # by XLA: TPU interpretation through callbacks can hang on one core
    )(matrix)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], -1) if along else scales
