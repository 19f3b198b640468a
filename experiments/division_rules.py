"""NVFP4 and MXFP8 by the arithmetic of published code: what each does where the rule divides.

In real numbers all rules of a format are the same. Here each NVFP4 rule is a sequence of IEEE f32
operations, bit for bit on every platform. A plain ``/`` would not be: under jit XLA:CPU replaces a
division by a broadcast with a product, which is one more rule, `as_compiled`. Inputs must be
finite, intermediate results normal numbers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import float_bits as fb
from pallas_kernels import nvfp4
from pallas_kernels.nvfp4 import NVFP4
from pallas_kernels.nvfp4.rounding import BLOCK, RANGE

IEEE = "IEEE division"
BF16 = ml_dtypes.bfloat16


def divide(x: jax.Array | float, y: jax.Array | float) -> jax.Array:
    """IEEE division by positive numbers, with broadcasting."""
    x, y = jnp.broadcast_arrays(jnp.float32(x), jnp.float32(y))
    bits = fb.from_float(x)
    size = fb.divide(fb.magnitude(bits), fb.from_float(y))
    return fb.as_float(size | bits & jnp.int32(-(2**31)))


def _maxima(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """F32 [..., block, 16], and the maxima [..., block, 1] of blocks and [..., 1, 1] of tokens."""
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    block_amax = jnp.abs(x).max(-1, keepdims=True)
    amax = block_amax.max(-2, keepdims=True)
    return x, block_amax, jnp.where(amax == 0, RANGE, amax)  # then the outer scale is 1


def _e4m3(ratio: jax.Array) -> jax.Array:
    """Codes of block scales."""
    return fb.encode_e4m3(fb.from_float(jnp.minimum(ratio, fb.E4M3_MAX)))


def _pack(quotients: jax.Array, scales: jax.Array, g: jax.Array) -> NVFP4:
    """Rounds quotients [..., block, 16] to E2M1, to nearest with ties to even, saturating."""
    size = jnp.abs(quotients)
    above = sum((size > tie).astype(jnp.uint8) for tie in (0.25, 1.25, 2.5, 5.0))
    at_least = sum((size >= tie).astype(jnp.uint8) for tie in (0.75, 1.75, 3.5))
    code = jnp.where(scales == 0, 0, above + at_least) + 8 * jnp.signbit(quotients)
    codes = fb.pack_nibbles(code.astype(jnp.uint8).reshape(*code.shape[:-2], -1))
    return NVFP4(codes, scales[..., 0].astype(jnp.uint8), g[..., 0, 0])


def _scales(block_amax: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rule's block scales, as codes, outer scale g and divisor s * g (1 where it is zero)."""
    g = divide(amax, RANGE)
    codes = _e4m3(divide(divide(block_amax, 6), g))
    return codes, g, jnp.where(codes == 0, 1, fb.decode_e4m3(codes) * g)


def ieee(x: jax.Array) -> NVFP4:
    """The rule of `pallas_kernels.nvfp4.quantize`: x / (s * g)."""
    x, block_amax, amax = _maxima(x)
    codes, g, d = _scales(block_amax, amax)
    return _pack(divide(x, d), codes, g)


def as_compiled(x: jax.Array) -> NVFP4:
    """The rule in plain jnp: the division is whatever the compiler makes of it."""
    x, block_amax, amax = _maxima(x)
    g = amax / RANGE
    codes = _e4m3(block_amax / 6 / g)
    return _pack(x / jnp.where(codes == 0, 1, fb.decode_e4m3(codes) * g), codes, g)


def reciprocal(ulps: int) -> Callable[[jax.Array], NVFP4]:
    """Multiplies with 1 / (s * g), off by units in the last place."""

    def rule(x: jax.Array) -> NVFP4:
        x, block_amax, amax = _maxima(x)
        codes, g, d = _scales(block_amax, amax)
        return _pack(x * fb.as_float(fb.from_float(divide(1, d)) + ulps), codes, g)

    return rule


def jax_nn(x: jax.Array) -> NVFP4:
    """Order of jax.nn: everything is divided by g first, (x / g) / s."""
    x, _, amax = _maxima(x)
    g = divide(amax, RANGE)
    x = divide(x, g)
    codes = _e4m3(divide(jnp.abs(x).max(-1, keepdims=True), 6))
    return _pack(divide(x, jnp.where(codes == 0, 1, fb.decode_e4m3(codes))), codes, g)


def torchao(x: jax.Array) -> NVFP4:
    """Order of torchao: x * ((1 / g) / s). Without its least block scale of 2**-6."""
    x, block_amax, amax = _maxima(x)
    codes, g, _ = _scales(block_amax, amax)
    s = jnp.where(codes == 0, 1, fb.decode_e4m3(codes))
    return _pack(x * divide(divide(1, g), s), codes, g)


def transformer_engine(coefficient: str) -> Callable[[jax.Array], NVFP4]:
    """TransformerEngine: x times a coefficient, block scales by products too.

    Args:
      coefficient: with e = 2688 / amax, "reference" is 1 / (s * (1 / e)); "early" is e / s, as
        its tuned kernels had it first; "bf16" is the reference rounded to bf16, as by its
        ``use_fast_math``.
    """

    def rule(x: jax.Array) -> NVFP4:
        x, block_amax, amax = _maxima(x)
        e = divide(RANGE, amax)
        g = divide(1, e)
        codes = _e4m3(block_amax * (e * jnp.float32(1 / 6)))
        s = jnp.where(codes == 0, 1, fb.decode_e4m3(codes))
        factor = divide(e, s) if coefficient == "early" else divide(1, s * g)
        if coefficient == "bf16":
            factor = jax.lax.reduce_precision(factor, exponent_bits=8, mantissa_bits=7)
        return _pack(x * factor, codes, g)

    return rule


# The first is the yardstick.
RULES: dict[str, Callable[[jax.Array], NVFP4]] = {
    IEEE: ieee,
    "x * rcp": reciprocal(0),
    "x * rcp, -1 ulp": reciprocal(-1),
    "x * rcp, +1 ulp": reciprocal(1),
    "x * rcp, -2 ulp": reciprocal(-2),
    "x * rcp, +2 ulp": reciprocal(2),
    "jax.nn: (x / g) / s": jax_nn,
    "torchao: x * ((1 / g) / s)": torchao,
    "TE: x * (1 / (s * (1 / e)))": transformer_engine("reference"),
    "TE, early: x * (e / s)": transformer_engine("early"),
    "TE, fast: bf16 coefficient": transformer_engine("bf16"),
    "x * (1 / y) for every x / y": functools.partial(nvfp4.quantize, impl="reciprocal"),
    "plain jnp, as compiled here": as_compiled,
}


class Codes(NamedTuple):
    """What a path does to a matrix; shares of its elements, against the IEEE rule."""

    changed: float
    upwards: float  # of those changed: to a larger magnitude
    scales: float  # of the blocks: another block scale
    rmse: float  # relative error of the rounded numbers


# --- MXFP8: the scale codes of block maxima, f32, in numpy ---


def scale_from_ratio(ratio: np.ndarray) -> np.ndarray:
    """E8M0 codes of f32 ratios amax / 448, rounded up to a power of two, by their bits."""
    bits = ratio.view(np.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = np.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return np.minimum(exponent + up, 254)


def scale_by_log(amax: np.ndarray, dtype: type, base_2: bool) -> np.ndarray:
    """E8M0 codes by ceil(log2(amax / 448)), every operation rounded to ``dtype``.

    Without ``base_2`` the logarithm is ln(x) / ln(2), as that of jax is.
    """
    ratio = (amax / np.float32(448)).astype(dtype)
    with np.errstate(divide="ignore"):  # subnormal maxima may round to 0
        power = np.log2(ratio) if base_2 else np.log(ratio) / np.log(dtype(2))
    return np.clip(np.ceil(power), -127, 127).astype(np.int32) + 127


def scale_by_product(amax: np.ndarray, ulps: int) -> np.ndarray:
    """E8M0 codes by amax * fl(1 / 448), the constant off by units in the last place."""
    constant = (np.float32(1 / 448).view(np.int32) + np.int32(ulps)).view(np.float32)
    return scale_from_ratio(amax * constant)


SCALE_PATHS = {
    "IEEE amax / 448": lambda amax: scale_from_ratio(amax / np.float32(448)),
    **{
        f"amax * fl(1 / 448), {ulps:+d} ulp": functools.partial(scale_by_product, ulps=ulps)
        for ulps in range(-2, 3)
    },
    "ceil(log2) in f32": functools.partial(scale_by_log, dtype=np.float32, base_2=True),
    "ceil(log2) in bf16": functools.partial(scale_by_log, dtype=BF16, base_2=True),
    "ceil(ln / ln 2) in bf16": functools.partial(scale_by_log, dtype=BF16, base_2=False),
}
