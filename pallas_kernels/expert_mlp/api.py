"""Public entry point of the routed experts."""

import jax
import jax.numpy as jnp

from pallas_kernels.expert_mlp import xla


def expert_mlp(
    x: jax.Array, routes: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Computes ``sum_k weights[k] * down[e_k] (silu(gate[e_k] x) * up[e_k] x)`` per token.

    Args:
      x: [tokens, embed].
      routes: int32 [tokens, top_k], the experts e_k of each token; a negative id routes nowhere.
      weights: f32 [tokens, top_k].
      gate_up: [expert, embed, 2, ffw], gate first.
      down: [expert, ffw, embed].

    Returns:
      [tokens, embed] in the dtype of ``x``. A token's value does not depend on the other tokens,
      bit for bit. Differentiable in all arguments but ``routes``.

    Raises:
      ValueError: if shapes disagree.
    """
    experts, embed, two, ffw = gate_up.shape
    if two != 2 or down.shape != (experts, ffw, embed) or x.shape[1:] != (embed,):
        raise ValueError(f"x {x.shape}, gate_up {gate_up.shape}, down {down.shape} disagree")
    if routes.shape != weights.shape or routes.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"routes {routes.shape} and weights {weights.shape} must be [tokens, top_k] for "
            f"x {x.shape}"
        )
    return xla.expert_mlp(x, routes.astype(jnp.int32), weights.astype(jnp.float32), gate_up, down)
