"""Speculative sampling: cheap drafts, exact outcomes (Leviathan et al. 2023, Chen et al. 2023).

One convention: ``p`` is the model's next-token distribution, ``q`` that of the draft, both
[..., vocab] and at the temperature that is sampled at. A draft x ~ q is accepted with probability
min(1, p(x) / q(x)) and else replaced by a token from `residual`, so the result is distributed as p
whatever q is; q only decides how often the model's extra work pays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Verified(NamedTuple):
    """Outcome of `verify`: the token to emit, int32 [...], and whether it is the draft, [...]."""

    token: jax.Array
    accepted: jax.Array


def acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
    """Probability that a draft is accepted, [...]: ``sum_x min(p, q)``, 1 - total variation."""
    return jnp.minimum(p, q).sum(-1)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """What a rejected draft is replaced from, [..., vocab]: ``max(p - q, 0)``, normalised.

    Where p equals q nothing is ever rejected, and p itself is returned.
    """
    missing = jnp.maximum(p - q, 0)
    total = missing.sum(-1, keepdims=True)
    return jnp.where(total > 0, missing / jnp.where(total > 0, total, 1), p)


def verify(key: jax.Array, draft: jax.Array, p: jax.Array, q: jax.Array) -> Verified:
    """Accepts or replaces drafts, int [...], that were drawn from ``q``."""
    chance, replacement = jax.random.split(key)

    def at_draft(probs):
        return jnp.take_along_axis(probs, draft[..., None], axis=-1)[..., 0]

    uniform = jax.random.uniform(chance, draft.shape, p.dtype)
    accepted = uniform * at_draft(q) < at_draft(p)  # uniform < p / q without the division
    other = jax.random.categorical(replacement, jnp.log(residual(p, q)))
    return Verified(jnp.where(accepted, draft, other).astype(jnp.int32), accepted)


def tokens_per_step(acceptance: jax.Array | float, drafts: int = 1) -> jax.Array:
    """Expected tokens from one forward pass of the model over ``drafts`` drafted tokens.

    Each draft is accepted with the given probability if all before it were, and the model adds one
    token of its own: 1 + a + a^2 + ... + a^drafts.
    """
    return sum(jnp.power(acceptance, n) for n in range(drafts + 1))
