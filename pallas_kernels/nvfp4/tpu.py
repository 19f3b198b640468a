"""NVFP4 as a Pallas kernel; the maxima for the outer scale take a pass of their own before it."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import float_bits as fb
from pallas_kernels.nvfp4 import rounding

# Rows and columns of a program: the least at which TPUs tile codes and scales. What sticks out of
# the matrix is dropped.
TILE = (32, 2048)


def quantize(
    x: jax.Array, scale: str, *, tile: tuple[int, int] = TILE, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, block scales and outer scale; see `pallas_kernels.nvfp4.quantize`.

    Args:
      x: [..., n].
      scale: "token" or "tensor".
      tile: rows and columns of a program, columns a multiple of 16.
      interpret: runs the kernel step by step on any platform.
    """
    if x.size == 0:
        raise NotImplementedError(f"x {x.shape} is empty")
    matrix = x.reshape(-1, x.shape[-1])
    sizes = fb.magnitude(fb.native_bits(matrix))
    amax = sizes.max(-1, keepdims=True) if scale == "token" else sizes.max(keepdims=True)
    g = rounding.outer_scale(fb.widen(amax))
    rows, columns = tile = tuple(map(min, tile, matrix.shape))

    def kernel(x_ref, g_ref, codes_ref, scales_ref):
        bits = fb.widen(fb.native_bits(x_ref[...])).reshape(rows, -1, rounding.BLOCK)
        bits = bits.swapaxes(1, 2)  # blocks fill the lanes of a TPU, their 16 elements would not
        block_amax = fb.magnitude(bits).max(1)
        g = jnp.broadcast_to(g_ref[...], block_amax.shape)
        scales = rounding.block_scales(rounding.sixths(block_amax), g)
        borders = rounding.borders(rounding.bases(rounding.divisors(scales, g)))
        codes = rounding.element_codes(bits, [border[:, None] for border in borders])
        codes_ref[...] = codes.swapaxes(1, 2).reshape(tile).astype(jnp.uint8)
        scales_ref[...] = scales.astype(jnp.uint8)

    def spec(columns):
        return pl.BlockSpec((rows, columns), lambda i, j: (i, j))

    per_block = matrix.shape[0], matrix.shape[1] // rounding.BLOCK
    codes, scales = pl.pallas_call(
        kernel,
        grid=tuple(map(pl.cdiv, matrix.shape, tile)),
        in_specs=[spec(columns), pl.BlockSpec((rows, 1), lambda i, j: (i, 0))],
        out_specs=[spec(columns), spec(columns // rounding.BLOCK)],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in (matrix.shape, per_block)],
        interpret=interpret,  # by XLA: TPU interpretation through callbacks can hang on one core
    )(matrix, jnp.broadcast_to(g, (matrix.shape[0], 1)))
    outer = fb.as_float(g).reshape(x.shape[:-1] if scale == "token" else ())
    return fb.pack_nibbles(codes.reshape(x.shape)), scales.reshape(*x.shape[:-1], -1), outer
