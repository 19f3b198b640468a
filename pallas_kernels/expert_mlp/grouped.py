"""Routed experts as two grouped matmuls: any precision, any backend that has one.

Assignments (token, k) are sorted by expert. Both directions of the sort are gathers, in the
gradients too: a permutation's transpose is its inverse.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.nvfp4 import NVFP4

ROUTING = "routing"  # name of small results that are dear to compute, for `jax.checkpoint`


def expert_mlp(x, routes, weights, gate_up, down, precision, impl):
    """See `pallas_kernels.expert_mlp.expert_mlp`."""
    (tokens, top_k), embed = routes.shape, x.shape[1]
    experts = len(jax.tree.leaves(gate_up)[0])
    if not isinstance(gate_up, NVFP4):
        gate_up = gate_up.reshape(experts, embed, -1)
    operand = x.dtype if precision == "native" else jnp.bfloat16
    expert = jnp.where(routes < 0, experts, routes).reshape(-1)  # dropped ones come last
    order, place = sorted_by(expert, experts + 1)
    sizes = jnp.bincount(expert, length=experts).astype(jnp.int32)

    rows = _permute(jnp.repeat(x.astype(operand), top_k, axis=0), order, place)
    hidden = grouped_matmul(rows, gate_up, sizes, precision=precision, impl=impl)
    gate, up = jnp.split(hidden.astype(jnp.float32), 2, axis=-1)
    act = (jax.nn.silu(gate) * up).astype(operand)
    out = grouped_matmul(act, down, sizes, precision=precision, impl=impl)
    per_route = _permute(out, place, order).reshape(tokens, top_k, embed)
    mixed = jnp.einsum("tkd,tk->td", per_route, weights, preferred_element_type=jnp.float32)
    return mixed.astype(x.dtype)


def sorted_by(group: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """The stable permutation that sorts by group, and its inverse; int32 [n] each.

    A number of group and index together needs neither a stable sort nor a second operand, and the
    inverse no sort at all: on TPUs that compiles in a fifth of the time of two ``argsort``.

    Args:
      group: int32 [n], from 0 to groups - 1.
      groups: their number.

    Raises:
      NotImplementedError: if there are too many numbers for 32 bits.
    """
    (n,) = group.shape
    if groups * n > 1 << 32:
        raise NotImplementedError(f"{n} assignments to {groups} groups; at most 2**32 together")
    index = jnp.arange(n, dtype=jnp.uint32)
    order = jnp.sort(group.astype(jnp.uint32) * n + index, stable=False) % n
    place = (
        jnp.zeros(n, jnp.int32)
        .at[order]
        .set(index.astype(jnp.int32), mode="promise_in_bounds", unique_indices=True)
    )
    return checkpoint_name(order.astype(jnp.int32), ROUTING), checkpoint_name(place, ROUTING)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    return x.at[order].get(mode="promise_in_bounds", unique_indices=True)


_permute.defvjp(
    lambda x, order, inverse: (_permute(x, order, inverse), (order, inverse)),
    lambda permutations, d_out: (_permute(d_out, permutations[1], permutations[0]), None, None),
)
