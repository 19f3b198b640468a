"""MXFP8 in plain XLA: the CPU path, and the default everywhere."""

import jax
import jax.numpy as jnp

from pallas_kernels import float_bits as fb
from pallas_kernels.mxfp8 import rounding


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales; see `pallas_kernels.mxfp8.quantize`. ``axis`` is not negative."""
    blocks = x.shape[axis] // rounding.BLOCK
    bits = fb.native_bits(x)
    bits = bits.reshape(*x.shape[:axis], blocks, rounding.BLOCK, *x.shape[axis + 1 :])
    # the maximum in the input's width: for bf16 half the bytes and twice the lanes
    amax = jnp.max(fb.magnitude(bits), axis=axis + 1, keepdims=True)
    scales = rounding.scale_codes(fb.widen(amax))
    codes = rounding.element_codes(fb.widen(bits), scales)
    return codes.astype(jnp.uint8).reshape(x.shape), scales.astype(jnp.uint8).squeeze(axis + 1)
