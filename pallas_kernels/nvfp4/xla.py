"""NVFP4 in plain XLA: the CPU path, and the default everywhere."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels import float_bits as fb
from pallas_kernels.nvfp4 import rounding

CHUNK = 64  # tokens at a time on CPUs: all that is computed on the way stays in the L2 cache


def quantize(x: jax.Array, scale: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, block scales and outer scale; see `pallas_kernels.nvfp4.quantize`."""
    n = x.shape[-1]
    tokens = x.reshape(math.prod(x.shape[:-1]), n)
    common = None
    if scale == "tensor":
        per_tensor = partial(_tensor_scale, call=_apart)
        common = jax.lax.platform_dependent(tokens, cpu=per_tensor, default=_tensor_scale)
    codes, scales, g = jax.lax.platform_dependent(tokens, common, cpu=_on_cpu, default=_quantize)
    outer = g.reshape(x.shape[:-1]) if common is None else common
    blocks = n // rounding.BLOCK
    return (
        codes.reshape(*x.shape[:-1], n // 2),
        scales.reshape(*x.shape[:-1], blocks),
        fb.as_float(outer),
    )


def _on_cpu(x: jax.Array, common: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    if len(x) % CHUNK or len(x) == 0:
        return _quantize(x, common, None, _apart)
    firsts = jnp.arange(0, len(x), CHUNK)
    chunks = jax.lax.map(lambda first: _quantize(x, common, first, _apart), firsts)
    return jax.tree.map(lambda chunk: chunk.reshape(len(x), *chunk.shape[2:]), chunks)


def _here(step: Callable, *args):
    return step(*args)


def _tensor_scale(x: jax.Array, call: Callable = _here) -> jax.Array:
    return rounding.outer_scale(call(_block_amax, x).max(initial=0))


def _quantize(
    x: jax.Array,
    common: jax.Array | None,
    first: jax.Array | None = None,
    call: Callable = _here,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes, block scales and patterns of the outer scales.

    Args:
      x: [tokens, n].
      common: pattern of the outer scale of all tokens, if they share one.
      first: the first token of one chunk; None for all of ``x``.
      call: how steps are called.
    """
    block_amax = call(_block_amax, x, first)
    g = call(rounding.outer_scale, block_amax.max(-1, initial=0)) if common is None else common
    g = jnp.broadcast_to(g, block_amax.shape[:1])
    scales = call(_block_scales, call(rounding.sixths, block_amax), g)
    d = call(_divisors, scales, g)
    bases = call(partial(_bases, dtype=x.dtype), d)
    codes = call(_element_codes, x, first, call(rounding.borders, bases))
    return fb.pack_nibbles(codes.reshape(len(codes), x.shape[1])), scales, g


def _blocks(x: jax.Array, first: jax.Array | None) -> jax.Array:
    """Bits in the input's width: for bf16 half the bytes and twice the lanes."""
    bits = fb.native_bits(x)
    if first is not None:
        bits = jax.lax.dynamic_slice_in_dim(bits, first, CHUNK)
    return bits.reshape(len(bits), x.shape[1] // rounding.BLOCK, rounding.BLOCK)


def _block_amax(x: jax.Array, first: jax.Array | None = None) -> jax.Array:
    blocks = _blocks(x, first)
    if blocks.dtype == jnp.int32:
        return fb.magnitude(blocks).max(-1)
    # CPUs gather the elements of many blocks into vectors: cheaper two at a time
    pairs = jax.lax.bitcast_convert_type(blocks.reshape(*blocks.shape[:2], 8, 2), jnp.int32)
    larger = jnp.maximum(fb.magnitude(pairs), fb.magnitude(pairs << 16))
    return larger.max(-1) >> 16 << 16


def _block_scales(sixths: jax.Array, g: jax.Array) -> jax.Array:
    g = jnp.broadcast_to(g[:, None], sixths.shape)
    return rounding.block_scales(sixths, g).astype(jnp.uint8)


def _divisors(scales: jax.Array, g: jax.Array) -> jax.Array:
    return rounding.divisors(scales, g[:, None])


def _bases(d: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    return fb.narrow(rounding.bases(d), dtype)


def _element_codes(
    x: jax.Array, first: jax.Array | None, borders: Sequence[jax.Array]
) -> jax.Array:
    blocks = _blocks(x, first)
    return rounding.element_codes(blocks, [b[..., None] for b in borders]).astype(jnp.uint8)


def _apart(step: Callable, *args):
    """Calls a step such that XLA:CPU stores its results, and computes them once.

    The CPU compiler drops optimisation barriers before it fuses, and would fuse all that is
    computed per block into the loop over elements, at several times the cost. It respects calls
    that it may not inline. Other compilers decide well without help.
    """
    inside = jax.jit(set_xla_metadata(inlineable=None)(step))
    with set_xla_metadata(inlineable="false"):
        return inside(*args)
