"""NVFP4 with x * (1 / y) for every x / y, as in a port that trusts fast division. For ablations.

Each product is off by at most one unit in the last place or so, which no error norm notices; but
numbers that sit exactly on a tie, and in bf16 many do, can end on its other side.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import float_bits as fb
from pallas_kernels.nvfp4 import rounding


def quantize(x: jax.Array, scale: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, block scales and outer scale; see `pallas_kernels.nvfp4.quantize`."""
    bits = fb.widen(fb.native_bits(x))
    bits = bits.reshape(*x.shape[:-1], x.shape[-1] // rounding.BLOCK, rounding.BLOCK)
    sizes = fb.magnitude(bits).max(-1)  # a maximum of patterns, which finds every NaN
    blocks, block_amax = fb.as_float(bits), fb.as_float(sizes)
    amax = fb.as_float(sizes.max(-1 if scale == "token" else None, initial=0))
    g = jnp.where(amax == 0, 1, _divide(amax, jnp.float32(rounding.RANGE)))
    g = jnp.where(jnp.isfinite(amax), g, jnp.nan)
    ratio = jnp.minimum(_divide(_divide(block_amax, jnp.float32(6)), g[..., None]), fb.E4M3_MAX)
    scales = jnp.where(jnp.isnan(ratio), fb.E4M3_NAN, fb.encode_e4m3(fb.from_float(ratio)))
    d = fb.decode_e4m3(scales) * g[..., None]
    quotients = fb.from_float(_divide(blocks, d[..., None]))
    # the borders between quotients are those between elements of a block with d = 1
    unusable = (scales == 0) | (scales == fb.E4M3_NAN)
    borders = rounding.borders(rounding.bases(jnp.where(unusable, fb.INF, fb.ONE)[..., None]))
    codes = rounding.element_codes(quotients, borders).astype(jnp.uint8)
    return fb.pack_nibbles(codes.reshape(x.shape)), scales.astype(jnp.uint8), g


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    # the barrier keeps XLA from turning the product back into a division
    return x * jax.lax.optimization_barrier(1 / y)
