"""Routed experts as two grouped matmuls: any precision, any backend that has one.

Assignments (token, k) are sorted by expert. Both directions of the sort are gathers, in the
gradients too: a permutation's transpose is its inverse.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul


def expert_mlp(x, routes, weights, gate_up, down, precision, impl):
    """See `pallas_kernels.expert_mlp.expert_mlp`."""
    tokens, top_k = routes.shape
    experts, embed, _, ffw = gate_up.shape
    operand = x.dtype if precision == "native" else jnp.bfloat16
    expert = jnp.where(routes < 0, experts, routes).reshape(-1)  # dropped ones come last
    order = jnp.argsort(expert, stable=True)
    place = jnp.argsort(order)
    sizes = jnp.bincount(expert, length=experts).astype(jnp.int32)

    rows = _permute(jnp.repeat(x.astype(operand), top_k, axis=0), order, place)
    hidden = grouped_matmul(
        rows, gate_up.reshape(experts, embed, 2 * ffw), sizes, precision=precision, impl=impl
    )
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    act = (jax.nn.silu(gate) * up).astype(operand)
    out = grouped_matmul(act, down, sizes, precision=precision, impl=impl)
    per_route = _permute(out, place, order).reshape(tokens, top_k, embed)
    mixed = jnp.einsum("tkd,tk->td", per_route, weights, preferred_element_type=jnp.float32)
    return mixed.astype(x.dtype)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    return x.at[order].get(mode="promise_in_bounds", unique_indices=True)


_permute.defvjp(
    lambda x, order, inverse: (_permute(x, order, inverse), (order, inverse)),
    lambda permutations, d_out: (_permute(d_out, permutations[1], permutations[0]), None, None),
)
