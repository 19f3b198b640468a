"""What each of the three products multiplies: the precision recipe, the same for all backends.

Low-precision operands reach a backend as the numbers that their codes stand for, which bf16 holds
exactly, as it does not the outer scales of NVFP4: those go to the product's epilogue.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import mxfp8, nvfp4
from pallas_kernels.grouped_matmul import tpu, xla

# of which k and n must be multiples; the gradient of lhs sums over n, in MXFP8
BLOCKS = {"native": (1, 1), "mxfp8": (32, 32), "nvfp4": (16, 32)}


def _backend(impl: str) -> tuple[Callable, Callable]:
    """The products that the forward pass and the gradient of lhs are, and that of rhs."""
    if impl == "xla":
        return xla.matmul, xla.weight_gradient
    interpret = impl == "interpret"
    return tuple(partial(f, interpret=interpret) for f in (tpu.matmul, tpu.weight_gradient))


def _mxfp8(x: jax.Array, axis: int) -> jax.Array:
    return mxfp8.dequantize(mxfp8.quantize(x, axis), jnp.bfloat16)


def _nvfp4(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values without their outer scales, and these."""
    q = nvfp4.quantize(x)
    values = nvfp4.dequantize(q._replace(outer_scale=jnp.ones_like(q.outer_scale)), jnp.bfloat16)
    return values, q.outer_scale


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(lhs, rhs, group_sizes, precision, impl):
    """See `pallas_kernels.grouped_matmul.grouped_matmul`."""
    return _forward(lhs, rhs, group_sizes, precision, impl)[0]


def _forward(lhs, rhs, group_sizes, precision, impl):
    matmul, _ = _backend(impl)
    weights = rhs.astype(lhs.dtype)
    match precision:
        case "native":
            out = matmul(lhs, weights, group_sizes, lhs.dtype)
        case "mxfp8":
            out = matmul(_mxfp8(lhs, 1), _mxfp8(weights, 1), group_sizes, lhs.dtype)
        case "nvfp4":
            left, row_scales = _nvfp4(lhs)
            right, column_scales = _nvfp4(weights.swapaxes(1, 2))
            scales = row_scales, column_scales
            out = matmul(left, right, group_sizes, lhs.dtype, transposed=True, scales=scales)
    return out, (lhs, rhs, group_sizes)


def _backward(precision, impl, residuals, d_out):
    lhs, rhs, group_sizes = residuals
    matmul, weight_gradient = _backend(impl)
    weights = rhs.astype(lhs.dtype)
    left, d_rows, sizes = lhs, d_out, group_sizes
    if precision != "native":
        # each along the axis that is summed over, n and then rows: from the same bf16 numbers, but
        # not the same codes
        quantized, sizes = mxfp8.quantize_groups(lhs, group_sizes)
        d_quantized, _ = mxfp8.quantize_groups(d_out, group_sizes)
        left, d_rows = (mxfp8.dequantize(q, jnp.bfloat16) for q in (quantized, d_quantized))
        d_out, weights = _mxfp8(d_out, 1), _mxfp8(weights, 2)
    d_lhs = matmul(d_out, weights, group_sizes, lhs.dtype, transposed=True)
    return d_lhs, weight_gradient(left, d_rows, sizes, rhs.dtype), None


grouped_matmul.defvjp(_forward, _backward)
