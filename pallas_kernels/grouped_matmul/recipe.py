"""What each of the three products multiplies: the precision recipe, the same for all backends.

Low-precision operands reach a backend as codes with block scales, or as the numbers that these
stand for, which bf16 holds exactly. Not so the outer scales of NVFP4: those go to the product's
epilogue.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import group_rows, mxfp8, nvfp4
from pallas_kernels.grouped_matmul import tpu, xla
from pallas_kernels.grouped_matmul.operands import numbers
from pallas_kernels.mxfp8 import rounding

# of which k and n must be multiples; the gradient of lhs sums over n, in MXFP8
BLOCKS = {"native": (1, 1), "mxfp8": (32, 32), "nvfp4": (16, 32)}


class _Backend(NamedTuple):
    """A backend's products, both of `operands.Operand`s.

    Attributes:
      matmul: the forward pass and the gradient of lhs.
      weight_gradient: the gradient of rhs.
      multiple: that the sizes of groups must be of for the latter, filled up with zeros.
      quantisers: the backend that rounds the operands; all give the same bytes.
    """

    matmul: Callable
    weight_gradient: Callable
    multiple: int = 1
    quantisers: str = "xla"


def _backend(impl: str) -> _Backend:
    match impl:
        case "hopper":
            from pallas_kernels.grouped_matmul import hopper  # slow to import, of use to few

            return _Backend(hopper.matmul, hopper.weight_gradient, hopper.TILE)
        case "blackwell":
            from pallas_kernels.grouped_matmul import blackwell

            return _Backend(blackwell.matmul, blackwell.weight_gradient, blackwell.TILE)
        case "xla":
            products = xla.matmul, xla.weight_gradient
        case "tpu" | "interpret":
            interpret = impl == "interpret"
            products = (partial(f, interpret=interpret) for f in (tpu.matmul, tpu.weight_gradient))
    # XLA's TPU compiler would need minutes and gigabytes for large matrices
    quantisers = "tpu" if impl == "tpu" else "xla"
    return _Backend(*map(_on_numbers, products), quantisers=quantisers)


def _on_numbers(product: Callable) -> Callable:
    """Lets a product of numbers take codes."""

    def decoded(left, right, *rest, **options):
        return product(numbers(left), numbers(right), *rest, **options)

    return decoded


def _nvfp4(q: nvfp4.NVFP4) -> tuple[nvfp4.NVFP4, jax.Array]:
    """Codes without their outer scales, and these."""
    return q._replace(outer_scale=jnp.ones_like(q.outer_scale)), q.outer_scale


def quantised_matmul(lhs, rhs: nvfp4.NVFP4, group_sizes, impl):
    """The forward product under "nvfp4" with matrices [group, n, k] that are codes already."""
    matmul, *_, quantisers = _backend(impl)
    left, row_scales = _nvfp4(nvfp4.quantize(lhs, impl=quantisers))
    right, column_scales = _nvfp4(rhs)
    scales = row_scales, column_scales
    return matmul(left, right, group_sizes, lhs.dtype, transposed=True, scales=scales)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(lhs, rhs, group_sizes, precision, impl):
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    return _forward(lhs, rhs, group_sizes, precision, impl)[0]


def _forward(lhs, rhs, group_sizes, precision, impl):
    matmul, *_, quantisers = _backend(impl)
    weights = rhs.astype(lhs.dtype)
    match precision:
        case "native":
            out = matmul(lhs, weights, group_sizes, lhs.dtype)
        case "mxfp8":
            left, right = (mxfp8.quantize(x, 1, impl=quantisers) for x in (lhs, weights))
            out = matmul(left, right, group_sizes, lhs.dtype)
        case "nvfp4":
            columns = nvfp4.quantize(weights.swapaxes(1, 2), impl=quantisers)
            out = quantised_matmul(lhs, columns, group_sizes, impl)
    return out, (lhs, rhs, group_sizes)


def _backward(precision, impl, residuals, d_out):
    lhs, rhs, group_sizes = residuals
    backend = _backend(impl)
    weights = rhs.astype(lhs.dtype)
    left, d_rows, sizes = lhs, d_out, group_sizes
    in_blocks = precision != "native"
    multiple = max(backend.multiple, rounding.BLOCK if in_blocks else 1)
    if multiple > 1:
        left, sizes = group_rows.pad(lhs, group_sizes, multiple)
        d_rows, _ = group_rows.pad(d_out, group_sizes, multiple)
    if in_blocks:
        # each along the axis that is summed over, n and then rows: from the same bf16 numbers, but
        # not the same codes
        quantize = partial(mxfp8.quantize, impl=backend.quantisers)
        d_out, weights = quantize(d_out, 1), quantize(weights, 2)
        left, d_rows = quantize(left, 0), quantize(d_rows, 0)
    d_lhs = backend.matmul(d_out, weights, group_sizes, lhs.dtype, transposed=True)
    return d_lhs, backend.weight_gradient(left, d_rows, sizes, rhs.dtype), None


grouped_matmul.defvjp(_forward, _backward)
