"""Routed experts on a CPU where tokens are few, as in decoding."""

from functools import partial

import jax
import jax.numpy as jnp

from c2.models import ModelConfig, moe
from pallas_kernels.expert_mlp import expert_mlp

FEW = 128  # tokens; above, blocks of rows of one expert keep the products of fewer rows busy


def mixture(x, p, real, routes, cfg: ModelConfig):
    """`c2.models.moe.moe`, with `batched` where it is faster."""
    few = x.shape[0] * x.shape[1] <= FEW and cfg.kernels == "xla"
    chosen = batched if few and cfg.moe.precision == "native" else expert_mlp
    return moe.moe(x, p, real, routes, cfg, mlp_of_experts=chosen)


def batched(x, routes, weights, gate_up, down, *, precision: str, impl: str) -> jax.Array:
    """`pallas_kernels.expert_mlp.expert_mlp` in native precision, forward only.

    Every expert takes a fixed number of its tokens at a time, twice its average share, and one
    product over all experts reads the weights where they lie; a loop over experts would copy
    each one's first. Whoever is left over comes next time.
    """
    del precision, impl
    (tokens, top_k), (experts, embed, _, ffw) = routes.shape, gate_up.shape
    rows = min(tokens, max(8, 2 * -(-tokens * top_k // experts)))
    chosen = jax.nn.one_hot(routes, experts, dtype=jnp.int32).sum(1)  # [tokens, expert], 0 or 1
    place = jnp.cumsum(chosen, axis=0) - 1  # a token's place among those of its expert
    waves = -(-tokens // rows)
    target = jnp.where(chosen > 0, place, waves * rows)
    token = jnp.zeros((experts, waves * rows), jnp.int32)
    everyone = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], target.shape)
    token = token.at[jnp.arange(experts), target].set(everyone, mode="drop")
    gate_up = gate_up.reshape(experts, embed, 2 * ffw).astype(x.dtype)

    def wave(i, out):
        mine = jax.lax.dynamic_slice_in_dim(token, i * rows, rows, axis=1)
        hidden = _dot(x[mine], gate_up)
        gate, up = jnp.split(hidden.astype(x.dtype), 2, axis=-1)
        y = _dot(jax.nn.silu(gate) * up, down.astype(x.dtype)).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, y, i * rows, axis=1)

    used = -(-chosen.sum(0).max() // rows)
    out = jnp.zeros((experts, waves * rows, embed), x.dtype)
    out = jax.lax.fori_loop(0, used, wave, out)
    expert = jnp.maximum(routes, 0)
    per_route = out[expert, jnp.take_along_axis(place, expert, axis=1)]  # [tokens, top_k, embed]
    weights = jnp.where(routes < 0, 0, weights)
    mixed = jnp.einsum("tkd,tk->td", per_route, weights, preferred_element_type=jnp.float32)
    return mixed.astype(x.dtype)


_dot = partial(jnp.einsum, "erd,edf->erf", preferred_element_type=jnp.float32)
