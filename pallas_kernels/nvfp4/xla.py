"""NVFP4 in plain XLA: the CPU path, and the default everywhere."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels import float_bits as fb
from pallas_kernels.nvfp4 import rounding


def quantize(x: jax.Array, scale: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, block scales and outer scale; see `pallas_kernels.nvfp4.quantize`."""
    block_amax = _once(_block_amax, x)
    g = _once(rounding.outer_scale, block_amax.max(-1 if scale == "token" else None, initial=0))
    scales = _once(_block_scales, block_amax, g)
    d = _once(_divisors, scales, g)
    codes = _once(_element_codes, x, *_once(partial(_borders, dtype=x.dtype), d))
    return fb.pack_nibbles(codes.reshape(x.shape)), scales, fb.as_float(g)


def _blocks(x: jax.Array) -> jax.Array:
    """Bits in the input's width, [..., blocks, 16]: for bf16 half the bytes and twice the lanes."""
    blocks = (*x.shape[:-1], x.shape[-1] // rounding.BLOCK, rounding.BLOCK)
    return fb.native_bits(x).reshape(blocks)


def _block_amax(x: jax.Array) -> jax.Array:
    return fb.widen(jnp.max(fb.magnitude(_blocks(x)), axis=-1))


def _block_scales(block_amax: jax.Array, g: jax.Array) -> jax.Array:
    g = jnp.broadcast_to(g[..., None], block_amax.shape)
    return rounding.block_scales(block_amax, g).astype(jnp.uint8)


def _divisors(scales: jax.Array, g: jax.Array) -> jax.Array:
    return rounding.divisors(scales, g[..., None])


def _borders(d: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    return fb.narrow(rounding.borders(d), dtype)


def _element_codes(x: jax.Array, *borders: jax.Array) -> jax.Array:
    codes = rounding.element_codes(_blocks(x), [border[..., None] for border in borders])
    return codes.astype(jnp.uint8)


def _once(f: Callable, *args):
    """Calls f such that XLA:CPU stores its results instead of computing them anew for every use.

    The CPU compiler drops optimisation barriers before it fuses, and would fuse all that is
    computed per block into the loop over elements, at several times the cost. It respects calls
    that it may not inline. Other compilers decide well without help.
    """

    def apart(*args):
        inside = jax.jit(set_xla_metadata(inlineable=None)(f))
        with set_xla_metadata(inlineable="false"):
            return inside(*args)

    return jax.lax.platform_dependent(*args, cpu=apart, default=f)
