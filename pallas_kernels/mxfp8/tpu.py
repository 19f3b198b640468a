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
      x: [rows, columns].
      axis: 0 or 1.
      tile: rows and columns of a program, a multiple of 32 along the blocks.
      interpret: runs the kernel step by step on any platform.
    """
    if x.size == 0:
        raise NotImplementedError(f"x {x.shape} is empty")

    def kernel(x_ref, codes_ref, scales_ref):
        wide = fb.as_float(fb.widen(fb.native_bits(x_ref[...])))  # TPUs compute in 32 bits
        codes_ref[...], scales_ref[...] = xla.quantize(wide, axis)

    def shorter(shape):
        return tuple(n // rounding.BLOCK if i == axis else n for i, n in enumerate(shape))

    tile = tuple(map(min, tile or TILES[axis], x.shape))
    shapes = x.shape, shorter(x.shape)
    here = pl.BlockSpec(tile, lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        grid=tuple(map(pl.cdiv, x.shape, tile)),
        in_specs=[here],
        out_specs=[here, pl.BlockSpec(shorter(tile), lambda i, j: (i, j))],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes],
        interpret=interpret,  # by XLA: TPU interpretation through callbacks can hang on one core
    )(x)
