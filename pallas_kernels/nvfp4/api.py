"""Public entry points of NVFP4."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import float_bits as fb
from pallas_kernels.nvfp4 import reciprocal, rounding, tpu, xla

Scale = Literal["token", "tensor"]
Impl = Literal["xla", "tpu", "gpu", "interpret", "reciprocal"]


class NVFP4(NamedTuple):
    """A tensor [..., n] in blocks of 16 elements along its last axis.

    Attributes:
      codes: uint8 [..., n // 2], two E2M1 codes each, the even element in the low nibble.
      block_scales: uint8 [..., n // 16], E4M3.
      outer_scale: f32 [...], one per token, or [] for the whole tensor.
    """

    codes: jax.Array
    block_scales: jax.Array
    outer_scale: jax.Array


def quantize(x: jax.Array, scale: Scale = "token", *, impl: Impl = "xla") -> NVFP4:
    """Rounds to NVFP4 by a fixed rule, bit for bit.

    With every operation an IEEE f32 operation, rounded to nearest with ties to even:

        g = fl(amax / 2688), or 1 where that is zero     outer scale
        s = e4m3(min(fl(fl(amax_block / 6) / g), 448))   block scale
        code = e2m1(fl(x / fl(s * g)))                   saturating

    Elements of a block whose s rounds to zero get a zero of their sign. All implementations but
    "reciprocal" give exactly these bytes on every platform, for all inputs including subnormal
    numbers. Under "token" they depend on the token alone.

    A NaN or an infinity makes the outer scale, and all block scales below it, NaN; codes are zeros
    then. Under "token" this marks the token, under "tensor" everything.

    Args:
      x: bf16 or f32 [..., n] with n a multiple of 16.
      scale: whether amax is that of a token (all but the last axis index tokens) or of the tensor.
      impl: "xla" (default, on every platform), "tpu", "gpu" (Hopper and Blackwell), "interpret"
        (the TPU kernel run by jax, for tests), or "reciprocal": x * (1 / y) for every x / y, which
        is *wrong* in a few codes of ten thousand. It shows what fast division does to a model.

    Raises:
      ValueError: if n is no multiple of 16, or ``scale`` or ``impl`` is unknown.
      TypeError: for other dtypes.
      NotImplementedError: from kernels, if x is empty; from "gpu", if it is not made of its tiles.
    """
    if x.ndim == 0 or x.shape[-1] % rounding.BLOCK:
        raise ValueError(f"x {x.shape}: the last axis must be a multiple of {rounding.BLOCK} long")
    if scale not in ("token", "tensor"):
        raise ValueError(f"scale {scale!r}; legal are 'token' and 'tensor'")
    match impl:
        case "xla":
            return NVFP4(*xla.quantize(x, scale))
        case "tpu" | "interpret":
            return NVFP4(*tpu.quantize(x, scale, interpret=impl == "interpret"))
        case "gpu":
            from pallas_kernels.nvfp4 import gpu  # slow to import, and of use to few

            return NVFP4(*gpu.quantize(x, scale))
        case "reciprocal":
            return NVFP4(*reciprocal.quantize(x, scale))
    raise ValueError(f"impl {impl!r}; legal are 'xla', 'tpu', 'gpu', 'interpret' and 'reciprocal'")


def dequantize(q: NVFP4, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The numbers that codes stand for, [..., n], rounded once in f32 by the outer scale.

    With an outer scale of 1 the result is exact in f32 and bf16: such operands leave the true
    outer scale to the f32 result of their product.
    """
    codes = fb.unpack_nibbles(q.codes)
    blocks = fb.decode_e2m1(codes).reshape(*q.block_scales.shape, rounding.BLOCK)
    value = blocks * fb.decode_e4m3(q.block_scales)[..., None]
    return (value.reshape(codes.shape) * q.outer_scale[..., None]).astype(dtype)
