"""Tokens to the ranks that need them, and rows back: the exchanges of expert parallelism.

`dispatch` and `collect` are each other's transpose, so gradients are exchanges and gathers as well
and no scatter. A token goes once to each rank that needs it, however many of its experts are there.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mxfp8


class Link(NamedTuple):
    """Who exchanges, and how.

    Attributes:
      axes: mesh axes of the ranks, the first major.
      ragged: send only the rows in use, by `jax.lax.ragged_all_to_all`, which CPUs do not have.
        Else whole blocks: as many bytes as if every rank needed every token.
    """

    axes: tuple[str, ...]
    ragged: bool


class Addresses(NamedTuple):
    """Which ranks need which tokens of this rank.

    Attributes:
      order: int32 [rank, slot], this rank's tokens as they are sent, those that the rank needs
        first.
      slot: int32 [rank, token], where a token is in that order, if needed.
      needed: bool [rank, token].
      sent: int32 [rank], tokens that each rank gets from this one.
      received: int32 [rank], tokens that this rank gets from each.
    """

    order: jax.Array
    slot: jax.Array
    needed: jax.Array
    sent: jax.Array
    received: jax.Array


def address(needed: jax.Array, axes: tuple[str, ...]) -> Addresses:
    """Addresses from ``needed``, bool [rank, token]; ranks tell each other how much will come."""
    sent = needed.sum(1, dtype=jnp.int32)
    return Addresses(
        order=jnp.argsort(~needed, axis=1, stable=True).astype(jnp.int32),
        slot=jnp.cumsum(needed, axis=1, dtype=jnp.int32) - 1,
        needed=needed,
        sent=sent,
        received=lax.all_to_all(sent, axes, 0, 0, tiled=True),
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dispatch(x: jax.Array, to: Addresses, link: Link, quantiser: str | None = None) -> jax.Array:
    """Sends each token to the ranks that need it.

    Args:
      x: [token, embed].
      to: which ranks need which tokens.
      link: the ranks.
      quantiser: a backend of `pallas_kernels.mxfp8.quantize`: codes and scales are sent, 33 bytes
        for 32 elements, and the gradient is that of numbers that are not rounded. Else None.

    Returns:
      [rank, slot, embed] in the dtype of ``x``, the tokens from each rank. Those behind the first
      ``received`` hold anything, and no gradient is taken from them.
    """
    message = x if quantiser is None else _packed(x, quantiser)
    arrived = _spread(message, to, link)
    return arrived if quantiser is None else _unpacked(arrived, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(rows: jax.Array, to: Addresses, link: Link) -> jax.Array:
    """Sends a row for each token that `dispatch` brought back to where it is from, and sums there.

    Args:
      rows: [rank, slot, embed], in the places of the tokens.
      to: as in `dispatch`.
      link: the ranks.

    Returns:
      [token, embed] in the dtype of ``rows``: of each token the f32 sum over the ranks that needed
      it, zero if there are none.
    """
    back = _exchange(rows, to.received, to.sent, link)
    per_rank = jax.vmap(partial(jnp.take, axis=0, mode="clip"))(back, to.slot)
    kept = jnp.where(to.needed[..., None], per_rank, 0)  # slots not in use may hold a NaN
    total = kept.sum(0, dtype=jnp.float32)
    # without the barrier XLA's TPU compiler sees that bf16 is wanted and adds in bf16
    return lax.optimization_barrier(total).astype(rows.dtype)


dispatch.defvjp(
    lambda x, to, link, quantiser: (dispatch(x, to, link, quantiser), to),
    lambda link, quantiser, to, d_arrived: (collect(d_arrived, to, link), None),
)
collect.defvjp(
    lambda rows, to, link: (collect(rows, to, link), to),
    lambda link, to, d_out: (_spread(d_out, to, link), None),
)


def _spread(message: jax.Array, to: Addresses, link: Link) -> jax.Array:
    rows = message.at[to.order].get(mode="promise_in_bounds")
    return _exchange(rows, to.sent, to.received, link)


def _exchange(rows: jax.Array, sent: jax.Array, received: jax.Array, link: Link) -> jax.Array:
    """Block r of rows [rank, slot, ...] goes to rank r, whose block of this rank it becomes."""
    if len(rows) == 1:  # no other rank
        return rows
    if not link.ragged:
        return lax.all_to_all(rows, link.axes, 0, 0, tiled=True)
    ranks, slots = rows.shape[:2]
    flat = rows.reshape(ranks * slots, *rows.shape[2:])
    start = jnp.arange(ranks, dtype=jnp.int32) * slots
    there = jnp.full(ranks, lax.axis_index(link.axes) * slots, jnp.int32)
    out = lax.ragged_all_to_all(
        flat, jnp.zeros_like(flat), start, sent, there, received, axis_name=link.axes
    )
    return out.reshape(rows.shape)


def _packed(x: jax.Array, quantiser: str) -> jax.Array:
    """Codes and scales side by side: one message, uint8 [token, embed + embed / 32]."""
    return jnp.concatenate(mxfp8.quantize(x, impl=quantiser), axis=-1)


def _unpacked(message: jax.Array, dtype: jnp.dtype) -> jax.Array:
    scales = message.shape[-1] // 33
    return mxfp8.dequantize(mxfp8.MXFP8(*jnp.split(message, [32 * scales], axis=-1)), dtype)
