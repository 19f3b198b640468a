"""Public entry points of MXFP8."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import float_bits as fb
from pallas_kernels import group_rows
from pallas_kernels.mxfp8 import rounding, tpu, xla

Impl = Literal["xla", "tpu", "gpu", "interpret"]


class MXFP8(NamedTuple):
    """A tensor in blocks of 32 elements along one axis.

    Attributes:
      codes: uint8, E4M3, in the tensor's shape.
      scales: uint8, E8M0 (2**(code - 127), 255 is NaN): that shape with the axis 32 times shorter.
    """

    codes: jax.Array
    scales: jax.Array


def quantize(x: jax.Array, axis: int = -1, *, impl: Impl = "xla") -> MXFP8:
    """Rounds to MXFP8 with the least scale at which no element saturates (RCEIL).

    A block's scale is 2**ceil(log2(amax / 448)), at least 2**-127; an element's code is
    e4m3(x / scale), to nearest with ties to even. Every implementation gives the same bytes, exact
    for all inputs including subnormal numbers, and a block's bytes depend on nothing but the block.

    Zeros keep their sign, a block of zeros has scale code 0. A NaN makes scale and codes of its
    block NaN (255, 0x7F). Otherwise an infinity gives scale code 254 and the largest code, which
    decode to infinity.

    Args:
      x: bf16 or f32.
      axis: the axis along which a product with the tensor sums: blocks lie along it. Its length
        must be a multiple of 32. For operands summed over another axis, quantise again from ``x``;
        transposed codes are not the codes of the transpose.
      impl: "xla" (default, on every platform), "tpu", "gpu" (Hopper and Blackwell), or "interpret"
        (the TPU kernel run by jax, for tests).

    Raises:
      ValueError: if the axis has another length or ``impl`` is unknown.
      TypeError: for other dtypes.
      NotImplementedError: from all but "xla", unless ``axis`` is one of the last two, or if x is
        empty; from "gpu", if it is not made of its tiles.
    """
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} of x {x.shape} does not exist")
    axis %= x.ndim
    if x.shape[axis] % rounding.BLOCK:
        raise ValueError(f"x {x.shape}: axis {axis} must be a multiple of {rounding.BLOCK} long")
    if impl not in get_args(Impl):
        raise ValueError(f"impl {impl!r}; legal are {', '.join(map(repr, get_args(Impl)))}")
    if impl == "xla":
        return MXFP8(*xla.quantize(x, axis))
    along = axis + 2 - x.ndim
    if along < 0:
        raise NotImplementedError(
            f"{impl} with blocks along axis {axis} of {x.ndim}; the last 2 are"
        )
    matrix = x.reshape(-1, x.shape[-1])  # blocks divide the axis, so each stays in its matrix
    if impl == "gpu":
        from pallas_kernels.mxfp8 import gpu  # slow to import, and of use to few

        codes, scales = gpu.quantize(matrix, along)
    else:
        codes, scales = tpu.quantize(matrix, along, interpret=impl == "interpret")
    per_block = *x.shape[:axis], x.shape[axis] // rounding.BLOCK, *x.shape[axis + 1 :]
    return MXFP8(codes.reshape(x.shape), scales.reshape(per_block))


def quantize_groups(
    x: jax.Array, group_sizes: jax.Array, *, impl: Impl = "xla"
) -> tuple[MXFP8, jax.Array]:
    """Quantises each group of rows along the rows, with no block in two groups.

    Groups, such as the tokens of one expert, come out padded with zero rows to multiples of 32:
    the result is that of quantising each on its own.

    Args:
      x: bf16 or f32 [rows, features], the groups one after another. Rows behind the last group
        are ignored, whatever they hold.
      group_sizes: int32 [group], not negative, at most ``rows`` in total.
      impl: as in `quantize`.

    Returns:
      The padded groups, codes [32 * (rows // 32 + group), features], zeros behind the last; and
      their sizes, int32 [group], multiples of 32.
    """
    padded, sizes = group_rows.pad(x, group_sizes, rounding.BLOCK)
    return quantize(padded, 0, impl=impl), sizes


def dequantize(q: MXFP8, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The numbers that codes stand for; exact in f32 and bf16.

    Those below 2**-126, which only blocks with scale codes below 10 can hold, become zero where
    the hardware flushes subnormal numbers.
    """
    # the axis that is shorter for scales; an empty tensor need not show it
    pairs = zip(q.codes.shape, q.scales.shape, strict=True)
    axis = next((i for i, (n, blocks) in enumerate(pairs) if n != blocks), None)
    if axis is None:
        return jnp.zeros(q.codes.shape, dtype)
    blocks = (*q.scales.shape[: axis + 1], rounding.BLOCK, *q.scales.shape[axis + 1 :])
    exponent = jnp.expand_dims(q.scales.astype(jnp.int32), axis + 1) - 127
    half = exponent >> 1  # two factors: 2**-127 itself is subnormal
    value = fb.decode_e4m3(q.codes).reshape(blocks)
    value = value * fb.as_float(half + 127 << 23) * fb.as_float(exponent - half + 127 << 23)
    value = jnp.where(exponent == rounding.NAN_SCALE - 127, jnp.nan, value)
    return value.reshape(q.codes.shape).astype(dtype)
