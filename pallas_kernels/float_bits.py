"""Exact f32 arithmetic on bit patterns: what block-scaled formats need from it, by integers.

Compilers and chips disagree about floats. Division on GPUs and TPUs is an approximation, XLA:CPU
and TPUs flush subnormal numbers to zero, casts to 8-bit types saturate on one backend and give NaN
on another. Integer arithmetic is the same everywhere, so everything here works on patterns: int32
arrays that hold the bits of non-negative f32 numbers. Patterns compare like the numbers they stand
for, infinity above all numbers and NaN above infinity.

Where a float operation does appear, its result is either exact on every backend or need only be
roughly right; the comment there says which.
"""

import jax
import jax.numpy as jnp
import numpy as np

INF, NAN = 0x7F800000, 0x7FC00000
ONE = 0x3F800000
MIN_NORMAL = 0x00800000
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
_MANTISSA = 0x007FFFFF
_DIGIT = 13  # bits of a quotient that one step of the division finds


def pattern(value: float) -> int:
    """Bits of a non-negative f32 constant."""
    return int(np.float32(value).view(np.int32))


def native_bits(x: jax.Array) -> jax.Array:
    """Bits of a bf16 or f32 array, sign included, as signed integers of the same width.

    Raises:
      TypeError: for any other dtype.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"x is {x.dtype}; bfloat16 and float32 can be quantised")
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))


def widen(bits: jax.Array) -> jax.Array:
    """Bits of bf16 or f32 numbers -> bits of the same numbers in f32, int32."""
    # a bf16 is the upper half of an f32; a float conversion might flush subnormal numbers
    return bits.astype(jnp.int32) << 16 if bits.dtype.itemsize == 2 else bits


def narrow(patterns: list[jax.Array], dtype: jnp.dtype) -> list[jax.Array]:
    """Rounds patterns down to those of bf16 if that is the dtype.

    A bf16 number exceeds an f32 number if and only if its bits exceed the narrowed pattern.
    """
    return [(p >> 16).astype(jnp.int16) if dtype == jnp.bfloat16 else p for p in patterns]


def magnitude(bits: jax.Array) -> jax.Array:
    """Clears the sign."""
    return bits & jnp.iinfo(bits.dtype).max


def as_float(bits: jax.Array) -> jax.Array:
    """Int32 patterns -> the f32 numbers they stand for."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def from_float(x: jax.Array) -> jax.Array:
    """F32 numbers -> their bits, int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def decompose(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finite patterns -> (m, e) of the numbers m * 2**e with 2**23 <= m < 2**24.

    Zero has no such form and comes out as 2**-276, below all f32 numbers.
    """
    subnormal = bits < MIN_NORMAL  # m * 2**-149 with m < 2**23, which converts without rounding
    normal = jnp.where(subnormal, from_float(bits.astype(jnp.float32)), bits)
    exponent = (normal >> 23) - jnp.where(subnormal, 150 + 149, 150)
    return normal & _MANTISSA | MIN_NORMAL, exponent


def compose(m: jax.Array, e: jax.Array, width: int, *, down: bool = False) -> jax.Array:
    """Pattern of m * 2**e, rounded once to f32, subnormal numbers included.

    Args:
      m: int32 in [2**(width - 1), 2**(width + 1)).
      e: int32, such that the result is finite.
      width: at least 26, or 24 for rounding down; at most 27.
      down: rounds to the greatest f32 not above, instead of to nearest with ties to even.
    """
    drop = jnp.maximum(width + (m >> width) - 24, -149 - e)
    shift = jnp.minimum(drop, 30)  # leaves nothing of 28 bits, rounded or not
    if not down:
        m += (1 << shift - 1) - 1 + (m >> shift & 1)
    # the leading bit of m, if it has all 24, counts one exponent up
    return (e + drop + 149 << 23) + (m >> shift)


def _reciprocal(x: jax.Array) -> jax.Array:
    """About 1 / x, 2**23 <= x < 2**24, without the division that means something else everywhere.

    Newton's steps square the relative error: the best straight line through 1 / x on an octave is
    1/17 off, then 1/289, then 2**-16.3.
    """
    r = 48 / 17 * 2.0**-24 - 32 / 17 * 2.0**-48 * x
    for _ in range(2):
        r = r * (2 - x * r)
    return r


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """Pattern of fl(x / y) as in IEEE 754: rounded to nearest, ties to even, subnormals included.

    The quotient's integer part is found in two digits of 13 bits. A digit is guessed with a float
    reciprocal, and the remainder that the guess leaves is computed modulo 2**32, which is exact
    because the true remainder is small. With a relative error of the guess below 2**-14 a digit is
    off by less than 2, and so is the quotient after the second; three comparisons settle it.

    Args:
      x: int32 patterns, finite.
      y: int32 patterns, finite and positive; the quotient must be finite.
    """
    (m, e), (divisor, divisor_e) = decompose(x), decompose(y)
    reciprocal = _reciprocal(divisor.astype(jnp.float32)) * 2.0**_DIGIT
    quotient, rest = jnp.zeros_like(m), m
    for _ in range(2):
        digit = (rest.astype(jnp.float32) * reciprocal).astype(jnp.int32)
        quotient, rest = (quotient << _DIGIT) + digit, (rest << _DIGIT) - digit * divisor
    for _ in range(2):
        negative = rest < 0
        quotient = jnp.where(negative, quotient - 1, quotient)
        rest = jnp.where(negative, rest + divisor, rest)
    above = rest >= divisor
    quotient = jnp.where(above, quotient + 1, quotient)
    inexact = rest != jnp.where(above, divisor, 0)
    # Rounding to odd at 26 bits or more: the later rounding to 24 sees the exact quotient's side
    # of every tie (Boldo and Melquiond, 2008).
    quotient = jnp.where(inexact, quotient | 1, quotient)
    return jnp.where(x == 0, 0, compose(quotient, e - divisor_e - 2 * _DIGIT, 26))


def encode_e4m3(bits: jax.Array) -> jax.Array:
    """Patterns of numbers up to 464 -> E4M3 codes without sign, int32; to nearest, ties to even."""
    rebiased = bits - (120 << 23)
    normal = rebiased + 0x7FFFF + (rebiased >> 20 & 1) >> 20
    # In the sum, units of 2**-9 are the last place: the addition rounds as wanted. A backend that
    # flushes subnormal numbers changes nothing, they are far below half a unit.
    subnormal = from_float(as_float(bits) + 2.0**14) - pattern(2.0**14)
    return jnp.where(bits < pattern(2.0**-6), subnormal, normal)


def decode_e4m3(codes: jax.Array) -> jax.Array:
    """E4M3 codes, any integer dtype -> f32; exact."""
    codes = codes.astype(jnp.int32)
    low = codes & 0x7F
    normal = as_float((low << 20) + (120 << 23))
    value = jnp.where(low < 8, low.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(low == E4M3_NAN, jnp.nan, value)
    return jnp.where(codes >= 0x80, -value, value)


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """E2M1 codes below 16, any integer dtype -> f32; exact."""
    codes = codes.astype(jnp.int32)
    low = codes & 7
    value = jnp.where(low < 2, low.astype(jnp.float32) * 0.5, as_float((low << 22) + (126 << 23)))
    return jnp.where(codes >= 8, -value, value)


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """Uint8 codes below 16 [..., n] -> bytes [..., n // 2], the even code in the low nibble."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    words = jax.lax.bitcast_convert_type(pairs, jnp.uint16)  # the first code is the low byte
    return (words | words >> 4).astype(jnp.uint8)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """Inverse of `pack_nibbles`: uint8 [..., n] -> [..., 2 * n]."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )
