"""Routed experts in plain XLA: the CPU path.

Assignments (token, k) are sorted by expert and each expert's run is padded to whole blocks of
rows. A loop over the blocks in use does everything for one block - gather its tokens, both
matmuls, the activation - while it is in cache. The block shape is fixed, so a row's result does
not depend on how many other rows its expert received. The backward pass is a second such loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.stored_bits import from_bits, to_bits


class Plan(NamedTuple):
    """Where every assignment goes.

    Attributes:
      token: int32 [blocks, rows], token of each row; rows of padding hold ``tokens``.
      slot: int32 [tokens * top_k], flat row of each assignment; ``blocks * rows`` if dropped.
      expert: int32 [blocks], the expert of each block.
      used: int32 scalar, number of blocks in use; they come first.
    """

    token: jax.Array
    slot: jax.Array
    expert: jax.Array
    used: jax.Array


def _block_rows(assignments: int, experts: int) -> int:
    """Rows of a block: about a quarter of an average expert's share, in 16..128."""
    share = assignments // (4 * experts)
    return max(16, min(128, 1 << max(share, 1).bit_length() - 1))


def plan(routes: jax.Array, experts: int) -> Plan:
    """Sorts routes [tokens, top_k] into blocks of rows with one expert each."""
    tokens, top_k = routes.shape
    assignments = tokens * top_k
    rows = _block_rows(assignments, experts)
    blocks = -(-assignments // rows) + experts  # every expert may leave one block half full

    expert = jnp.where(routes < 0, experts, routes).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    ids = jnp.arange(experts)
    first = jnp.searchsorted(expert[order], jnp.arange(experts + 1)).astype(jnp.int32)
    needed = -(-jnp.diff(first) // rows)  # blocks per expert
    end = jnp.cumsum(needed)
    begin = end - needed

    rank = jnp.arange(assignments) - first[expert[order]]  # place within the expert's run
    target = jnp.where(
        expert[order] < experts,
        jnp.append(begin, 0)[expert[order]] * rows + rank,
        blocks * rows,
    )
    slot = jnp.zeros(assignments, jnp.int32).at[order].set(target.astype(jnp.int32))
    token = jnp.full(blocks * rows, tokens, jnp.int32)
    token = token.at[target].set((order // top_k).astype(jnp.int32), mode="drop")
    owner = jnp.searchsorted(end, jnp.arange(blocks), side="right")
    return Plan(
        token=token.reshape(blocks, rows),
        slot=slot,
        expert=jnp.minimum(owner, ids[-1]).astype(jnp.int32),
        used=end[-1].astype(jnp.int32),
    )


def _pick(array: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


def _put(array: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(array, value, index, 0)


def _rows(x: jax.Array, token: jax.Array) -> jax.Array:
    return x.at[token].get(mode="fill", fill_value=0)


def _swiglu(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a.T @ b``, transposed in memory: XLA:CPU has no fast matmul for a transposed left side."""
    return _dot(jax.lax.optimization_barrier(a.T), b)


def _gather_slots(outputs: jax.Array, slot: jax.Array, top_k: int) -> jax.Array:
    """Rows of ``outputs`` [blocks, rows, embed] back in assignment order [tokens, top_k, embed]."""
    embed = outputs.shape[-1]
    return _rows(outputs.reshape(-1, embed), slot).reshape(-1, top_k, embed)


@jax.custom_vjp
def expert_mlp(x, routes, weights, gate_up, down):
    """See `pallas_kernels.expert_mlp.expert_mlp`."""
    return _forward(x, routes, weights, gate_up, down)[0]


def _matrices(gate_up, down, dtype):
    """Weights as operands: gate_up merged to [expert, embed, 2 * ffw]."""
    experts, embed, _, ffw = gate_up.shape
    return gate_up.reshape(experts, embed, 2 * ffw).astype(dtype), down.astype(dtype)


def _forward(x, routes, weights, gate_up, down):
    # the weights are saved as they came: a layer scan then need not copy them to its residuals
    saved = x, weights, gate_up, down
    gate_up, down = _matrices(gate_up, down, x.dtype)
    p = plan(routes, gate_up.shape[0])
    blocks, rows = p.token.shape

    def block(i, carry):
        outputs, hiddens = carry
        e = p.expert[i]
        hidden = _dot(_rows(x, p.token[i]), _pick(gate_up, e)).astype(x.dtype)
        out = _dot(_swiglu(hidden), _pick(down, e)).astype(x.dtype)
        return _put(outputs, to_bits(out), i), _put(hiddens, to_bits(hidden), i)

    empty = (
        to_bits(jnp.zeros((blocks, rows, x.shape[1]), x.dtype)),
        to_bits(jnp.zeros((blocks, rows, gate_up.shape[2]), x.dtype)),
    )
    outputs, hiddens = jax.lax.fori_loop(0, p.used, block, empty)
    per_route = _gather_slots(from_bits(outputs, x.dtype), p.slot, routes.shape[1])
    mixed = jnp.einsum("tkd,tk->td", per_route, weights, preferred_element_type=jnp.float32)
    return mixed.astype(x.dtype), (*saved, p, hiddens)


def _backward(residuals, d_mixed):
    x, weights, *stored, p, hiddens = residuals
    gate_up, down = _matrices(*stored, x.dtype)
    tokens, top_k = weights.shape
    blocks, rows = p.token.shape
    weight = jnp.zeros(blocks * rows, jnp.float32)
    weight = weight.at[p.slot].set(weights.reshape(-1), mode="drop").reshape(blocks, rows)

    def block(i, carry):
        dx_rows, d_weight, d_gate_up, d_down = carry
        e, w = p.expert[i], weight[i][:, None]
        dy = _rows(d_mixed, p.token[i])  # cotangent of the mixture, before the weight
        act, swiglu_vjp = jax.vjp(
            _swiglu, from_bits(_pick(hiddens, i), x.dtype).astype(jnp.float32)
        )
        d_act = _dot(dy, _pick(down, e).T)  # unweighted
        (d_hidden,) = swiglu_vjp(d_act * w)
        d_hidden = d_hidden.astype(x.dtype)
        # y . dy = act . (down dy): the weight's gradient without keeping y
        d_weight = _put(d_weight, jnp.sum(act * d_act, axis=-1), i)
        d_rows = _dot(d_hidden, _pick(gate_up, e).T).astype(x.dtype)
        dx_rows = _put(dx_rows, to_bits(d_rows), i)
        d_down = d_down.at[e].add(_dot_transposed((act * w).astype(x.dtype), dy))
        d_gate_up = d_gate_up.at[e].add(_dot_transposed(_rows(x, p.token[i]), d_hidden))
        return dx_rows, d_weight, d_gate_up, d_down

    start = (
        to_bits(jnp.zeros((blocks, rows, x.shape[1]), x.dtype)),
        jnp.zeros((blocks, rows), jnp.float32),
        jnp.zeros(gate_up.shape, jnp.float32),
        jnp.zeros(down.shape, jnp.float32),
    )
    dx_rows, d_weight, d_gate_up, d_down = jax.lax.fori_loop(0, p.used, block, start)
    per_route = _gather_slots(from_bits(dx_rows, x.dtype), p.slot, top_k)
    dx = per_route.sum(1, dtype=jnp.float32).astype(x.dtype)
    d_weights = _rows(d_weight.reshape(-1), p.slot).reshape(tokens, top_k)
    d_stored = (
        d.reshape(w.shape).astype(w.dtype) for d, w in zip((d_gate_up, d_down), stored, strict=True)
    )
    return dx, None, d_weights, *d_stored


expert_mlp.defvjp(_forward, _backward)
