"""How Mosaic GPU kernels work on blocks in registers, in one way for all versions of jax.

Jax plans accesses to global memory thread by thread and would refuse those of small elements as
slow; it can't know that the compiler merges a thread's neighbouring ones into vectors.
"""

from collections.abc import Sequence

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_OLD = jax.__version_info__ < (0, 11)


def load(ref: jax.Ref, layout: plgpu.Layout) -> jax.Array:
    """Reads global memory such that every thread gets what ``layout`` gives it."""
    index = ((...,),) if _OLD else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store(ref: jax.Ref, x: jax.Array) -> None:
    """Every thread writes what it holds to global memory."""
    if _OLD:
        ref[...] = x
    else:
        plgpu.store(ref, x, optimized=False)


def spread(
    x: jax.Array, shape: Sequence[int], dims: Sequence[int], layout: plgpu.Layout
) -> jax.Array:
    """`jax.lax.broadcast_in_dim` along dimensions that ``layout`` gives to threads as a whole."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, shape, dims), layout)
