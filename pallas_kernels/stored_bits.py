"""Numbers as integers of their width, for what loops on a CPU only move.

XLA:CPU does in f32 whatever it does with bf16 numbers, even if it is only to move them: to update a
slice it converts the whole array there and back, in every iteration. Integers it leaves alone.
"""

import jax
import jax.numpy as jnp


def to_bits(x: jax.Array) -> jax.Array:
    """What is sliced and updated in loops in place of ``x``: int16 for numbers of 16 bits."""
    return jax.lax.bitcast_convert_type(x, jnp.int16) if x.dtype.itemsize == 2 else x


def from_bits(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The array of this dtype that `to_bits` was given."""
    return jax.lax.bitcast_convert_type(bits, dtype)
