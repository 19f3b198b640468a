"""NVFP4's decisions, on bit patterns: the outer scale, a block's scale, an element's code.

An element's code is e2m1(fl(x / d)) with d = fl(s * g). That quotient is never formed: it grows
with x, so the elements of a block with at least code i are those above some border, which follows
from d by integer arithmetic. A block has seven borders, an element takes seven comparisons.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import float_bits as fb

BLOCK = 16
RANGE = 6.0 * fb.E4M3_MAX  # the largest element times the largest block scale


class _Tie(NamedTuple):
    """A border m * 2**e between two E2M1 numbers; ``up`` if a quotient on it gets the upper code.

    The even code wins, and even are the codes 0, 2, 4, 6. m is odd with ``width`` bits.
    """

    m: int
    e: int
    width: int
    up: bool


# The ties but for powers of two. 0.25 is a quarter of 1, whose border is d itself.
TIES = (
    _Tie(3, -2, 2, True),  # 0.75
    _Tie(7, -1, 3, True),  # 3.5, and 1.75
    _Tie(5, 0, 3, False),  # 5, and 2.5 and 1.25
)


def outer_scale(amax: jax.Array) -> jax.Array:
    """Pattern of g = fl(amax / 2688) from patterns; 1 where that is zero, NaN if not finite."""
    g = fb.divide(amax, jnp.full_like(amax, fb.pattern(RANGE)))
    return jnp.where(amax >= fb.INF, fb.NAN, jnp.where(g == 0, fb.ONE, g))


def sixths(block_amax: jax.Array) -> jax.Array:
    """Patterns of fl(amax_block / 6), by half of the work of a division by any number.

    The mantissa is divided by 3 in two digits. Dividends below 49152 times 43691 fit int32, and
    2**17 divides the product to the exact integer part.
    """
    m, e = fb.decompose(block_amax)
    high = (m >> 9) * 43691 >> 17
    rest = (m - (3 * high << 9)) << 4  # the quotient gets 4 bits more, 26 at least
    low = rest * 43691 >> 17
    quotient = (high << 13) + low
    quotient = jnp.where(rest != 3 * low, quotient | 1, quotient)  # to odd, as `fb.divide` does
    return jnp.where(block_amax == 0, 0, fb.compose(quotient, e - 1 - 4, 26))


def block_scales(sixths: jax.Array, g: jax.Array) -> jax.Array:
    """E4M3 codes of s = e4m3(min(fl(sixth / g), 448)), NaN where g is."""
    ratio = jnp.minimum(fb.divide(sixths, g), fb.pattern(fb.E4M3_MAX))
    return jnp.where(g == fb.NAN, fb.E4M3_NAN, fb.encode_e4m3(ratio))


def divisors(scales: jax.Array, g: jax.Array) -> jax.Array:
    """Patterns of d = fl(s * g) from E4M3 codes of s and patterns of g.

    Infinity where s is zero or NaN, so that all quotients are zeros. Elsewhere d > 0, even if g is
    subnormal: s > 0 means that fl(amax_block / 6) is at least 2**-149, and rounding to E4M3 leaves
    two thirds of it to s * g.
    """
    # the four significant bits of s times the 24 of g: 27 or 28
    s, s_e = fb.decompose(fb.from_float(fb.decode_e4m3(scales)))
    m, e = fb.decompose(g)
    d = fb.compose((s >> 20) * m, s_e + 20 + e, 27)
    return jnp.where((scales == 0) | (scales == fb.E4M3_NAN), fb.INF, d)


def bases(d: jax.Array) -> list[jax.Array]:
    """Per tie t, the pattern of the greatest x whose fl(x / d) is still on the lower side; and d.

    With u the tie's unit in the last place, fl(q) > t if and only if q > t + u/2, and fl(q) >= t if
    and only if q >= t - u/2: t is even, so half-way cases round to it. (No tie that rounds up is a
    power of two, below which the unit would be smaller.) With d = m * 2**e and t = k * 2**j, k of w
    bits, u/2 is 2**(j + w - 25). Close to t * d, which is at least 2**(23 + e + j), every x is an
    integer in units of 2**(e + j), so both conditions read x > n with an integer n next to
    k * m -+ m * 2**(w - 25).
    """
    m, e = fb.decompose(d)
    found = [d]
    for tie in TIES:
        half_unit = m >> 25 - tie.width
        n = tie.m * m - half_unit - 1 if tie.up else tie.m * m + half_unit
        found.append(fb.compose(n, e + tie.e, 23 + tie.width, down=True))
    return found


def borders(bases: Sequence[jax.Array]) -> list[jax.Array]:
    """All seven in order, from `bases` as they are or narrowed to bf16.

    The rest are halves and quarters of these: rounding down twice is rounding down. An infinite d
    has borders above everything.
    """
    one, b_0_75, b_3_5, b_5 = bases
    b_2_5 = _half(b_5)
    found = [_half(_half(one)), b_0_75, _half(b_2_5), _half(b_3_5), b_2_5, b_3_5, b_5]
    infinity = fb.INF >> _dropped_bits(one)
    return [jnp.where(one == infinity, jnp.iinfo(one.dtype).max, b) for b in found]


def _half(bits: jax.Array) -> jax.Array:
    """The pattern of half the number, rounded down."""
    octave = fb.MIN_NORMAL >> _dropped_bits(bits)
    # below the second octave patterns count units of the last place
    return jnp.where(bits < 2 * octave, bits >> 1, bits - octave)


def _dropped_bits(bits: jax.Array) -> int:
    return 32 - 8 * bits.dtype.itemsize


def element_codes(bits: jax.Array, borders: Sequence[jax.Array]) -> jax.Array:
    """E2M1 codes of the bits of bf16 or f32 numbers: how many borders are exceeded, and the sign.

    Bits and borders are integers of the same width.
    """
    size = fb.magnitude(bits)
    code = sum((size > border).astype(bits.dtype) for border in borders)
    return code | bits >> 8 * bits.dtype.itemsize - 4 & 8
