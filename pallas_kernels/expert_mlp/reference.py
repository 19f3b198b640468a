"""Routed experts as their formula says: every expert on every token, then a weighted sum."""

import jax
import jax.numpy as jnp


def expert_mlp(
    x: jax.Array, routes: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Same contract as `pallas_kernels.expert_mlp.expert_mlp`."""
    gate = jnp.einsum("td,edf->tef", x, gate_up[:, :, 0].astype(x.dtype))
    up = jnp.einsum("td,edf->tef", x, gate_up[:, :, 1].astype(x.dtype))
    outputs = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, down.astype(x.dtype))
    chosen = jax.nn.one_hot(routes, gate_up.shape[0]) * weights[..., None]  # negative id: zeros
    return jnp.einsum("tke,ted->td", chosen, outputs).astype(x.dtype)
