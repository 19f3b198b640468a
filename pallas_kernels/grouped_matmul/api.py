"""Public entry point of the grouped matmul."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import recipe
from pallas_kernels.nvfp4 import NVFP4

Precision = Literal["native", "mxfp8", "nvfp4"]
Impl = Literal["xla", "tpu", "hopper", "blackwell", "interpret"]


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array | NVFP4,
    group_sizes: jax.Array,
    *,
    precision: Precision = "native",
    impl: Impl = "xla",
) -> jax.Array:
    """Multiplies every row with the matrix of its group: ``out[r] = lhs[r] @ rhs[g(r)]``.

    Rows are sorted by group; groups may have any size, zero included. Rows behind the last group
    give zeros and get zero gradients, whatever they hold. Differentiable in ``lhs`` and ``rhs``.

    Sums are f32; within a block of MXFP8, the tensor cores of "hopper" keep about 14 bits. A row of
    the result and of the gradient of ``lhs`` depends, bit for bit, on that row and its matrix
    alone: not on other rows, their number or the sizes of groups. The gradient of a matrix depends
    on the rows of its group alone; a NaN elsewhere does not reach it.

    Under "mxfp8" and "nvfp4" the operands of each of the three products (this one and the two of
    the backward pass) are rounded from those given here, in the dtype of ``lhs``, in blocks along
    the axis that the product sums over. Under "nvfp4" only the forward product is NVFP4, with an
    outer scale per row of ``lhs`` and per output column of ``rhs``, which multiply the f32 sums
    once; the backward products are MXFP8, as in the report's section on kernels. Blocks along the
    rows, for the gradient of ``rhs``, start anew in every group. Rounding is differentiated as the
    identity.

    Args:
      lhs: bf16 or f32 [rows, k].
      rhs: [group, k, n]; another dtype than that of ``lhs``, as of f32 master weights, is rounded
        to it first. Under "nvfp4" also [group, n, k] that is quantised already, as by an engine's
        publisher; such a product has no gradient.
      group_sizes: int32 [group], not negative, at most ``rows`` in total.
      precision: "native" (the dtype of ``lhs``), "mxfp8" or "nvfp4".
      impl: "xla" (default, on every platform; made for CPUs), "tpu", "hopper", "blackwell", or
        "interpret" (the TPU kernels run by jax, for tests).

    Returns:
      [rows, n] in the dtype of ``lhs``. Gradients have the dtypes of their arguments.

    Raises:
      ValueError: if shapes disagree, or ``precision`` or ``impl`` is unknown.
      TypeError: if ``lhs`` is neither bf16 nor f32, or sizes are no integers.
      NotImplementedError: if blocks do not divide k or n; if an operand is too wide for "tpu"; from
        "hopper" and "blackwell", if tiles do not divide the shapes, or native operands are f32.
    """
    if isinstance(rhs, NVFP4):
        return _with_codes(lhs, rhs, group_sizes, precision, impl)
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1] or not rhs.shape[0]:
        raise ValueError(f"lhs {lhs.shape} and rhs {rhs.shape} must be [rows, k] and [group, k, n]")
    if group_sizes.shape != rhs.shape[:1]:
        raise ValueError(f"group_sizes {group_sizes.shape} must be [group] of rhs {rhs.shape}")
    if lhs.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"lhs is {lhs.dtype}; legal are bfloat16 and float32")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes is {group_sizes.dtype}; legal are integers")
    if impl not in get_args(Impl):
        raise ValueError(f"impl {impl!r}; legal are {', '.join(map(repr, get_args(Impl)))}")
    if precision not in recipe.BLOCKS:
        raise ValueError(
            f"precision {precision!r}; legal are {', '.join(map(repr, recipe.BLOCKS))}"
        )
    blocks = recipe.BLOCKS[precision]
    if any(size % block for size, block in zip(rhs.shape[1:], blocks, strict=True)):
        raise NotImplementedError(
            f"{precision} with k, n = {rhs.shape[1:]}; they must be multiples of {blocks}"
        )
    lhs, rhs, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes, jnp.int32)
    return recipe.grouped_matmul(lhs, rhs, sizes, precision, impl)


def _with_codes(lhs, rhs, group_sizes, precision, impl):
    groups, _, half = rhs.codes.shape
    if precision != "nvfp4":
        raise ValueError(f"rhs is NVFP4, but precision is {precision!r}; legal for it: 'nvfp4'")
    if lhs.ndim != 2 or lhs.shape[1] != 2 * half or group_sizes.shape != (groups,):
        raise ValueError(
            f"lhs {lhs.shape}, codes of rhs {rhs.codes.shape} and group_sizes {group_sizes.shape} "
            "must be [rows, k], [group, n, k / 2] and [group]"
        )
    return recipe.quantised_matmul(lhs, rhs, jnp.asarray(group_sizes, jnp.int32), impl)
