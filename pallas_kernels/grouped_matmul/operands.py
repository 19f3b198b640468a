"""What backends multiply: numbers, or codes in blocks with scales."""

import jax
import jax.numpy as jnp

from pallas_kernels import mxfp8, nvfp4

Operand = jax.Array | mxfp8.MXFP8 | nvfp4.NVFP4  # the last with outer scales of 1


def numbers(x: Operand) -> jax.Array:
    """The numbers that codes stand for, which bf16 holds exactly; numbers as they are."""
    match x:
        case mxfp8.MXFP8():
            return mxfp8.dequantize(x, jnp.bfloat16)
        case nvfp4.NVFP4():
            return nvfp4.dequantize(x, jnp.bfloat16)
    return x
