"""MXFP8's two decisions, on bit patterns: a block's scale and an element's code.

Scaling by a power of two moves exponents and rounds nothing, so neither needs a float operation
whose result could depend on the backend.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import float_bits as fb

BLOCK = 32
INF_SCALE, NAN_SCALE = 254, 255


def scale_codes(amax: jax.Array) -> jax.Array:
    """RCEIL: E8M0 codes of 2**ceil(log2(amax / 448)), int32, from patterns of block maxima.

    With amax = m * 2**e, 1 <= m < 2, the power is e - 8, one more where m exceeds 448 / 2**8 =
    1.75. On the pattern this is a carry into the exponent. The rule by f32 division gives the same
    codes but for one number: the quotient of the next above 448 * 2**-127 is subnormal and rounds
    to 2**-127.
    """
    above_1_75 = (1 << 23) - 1 - 0x600000
    codes = jnp.maximum((amax + above_1_75 >> 23) - 8, 0)  # code 0, 2**-127, is the least
    codes = jnp.where(amax >= fb.INF, INF_SCALE, codes)
    return jnp.where(amax > fb.INF, NAN_SCALE, codes)


def element_codes(bits: jax.Array, scales: jax.Array) -> jax.Array:
    """E4M3 codes, int32, of f32 bits ``bits`` under the E8M0 codes ``scales`` of their blocks."""
    size = fb.magnitude(bits)
    # Moves exponents by 127 - scale. A subnormal number is an integer in units of 2**-149, which
    # converts exactly; if the scale is above 128 it can't come near the least code.
    normal = size + (127 - scales << 23)
    subnormal = fb.from_float(size.astype(jnp.float32)) + (
        127 - 149 - jnp.minimum(scales, 128) << 23
    )
    scaled = jnp.maximum(jnp.where(size < fb.MIN_NORMAL, subnormal, normal), 0)
    codes = fb.encode_e4m3(scaled)  # never saturates: RCEIL keeps finite blocks within 448
    codes = jnp.where(size == fb.INF, fb.E4M3_NAN - 1, codes)
    codes = codes | bits >> 24 & 0x80
    return jnp.where(scales == NAN_SCALE, fb.E4M3_NAN, codes)
