"""From logits to tokens: what is sampled from, and how one number decides."""

import math

import jax
import jax.numpy as jnp


def request_keys(seed: jax.Array, request: jax.Array) -> jax.Array:
    """One key for every slot from its request's seed and id, uint32 [slot] each."""
    return jax.vmap(lambda s, r: jax.random.fold_in(jax.random.key(s), r))(seed, request)


def token_keys(keys: jax.Array, count: jax.Array | int) -> jax.Array:
    """The keys [slot] of the tokens that follow ``count`` earlier ones, one number or [slot]."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(count, keys.shape))


def uniform(keys: jax.Array) -> jax.Array:
    """A number in [0, 1) for every key, f32 [slot]."""
    return jax.vmap(jax.random.uniform)(keys)


def distribution(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Log-probabilities f32 [slot, ..., vocab] at the slots' temperatures [slot]."""
    temperature = jnp.expand_dims(temperature, range(1, logits.ndim))
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)


def truncate(log_probs: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The distribution [slot, ..., vocab] of the most likely tokens alone, -inf for the others.

    Args:
      log_probs: of all tokens.
      top_k: int [slot], how many at most.
      top_p: [slot], as many as are needed to reach this probability, at least one.
    """
    top_k, top_p = (jnp.expand_dims(x, range(1, log_probs.ndim)) for x in (top_k, top_p))
    order = jnp.argsort(log_probs, axis=-1, stable=True, descending=True)
    rank = jnp.argsort(order, axis=-1)
    probs = jnp.exp(jnp.take_along_axis(log_probs, order, axis=-1))
    before = jnp.take_along_axis(jnp.cumsum(probs, axis=-1) - probs, rank, axis=-1)
    kept = (rank < top_k) & (before < top_p)
    return jax.nn.log_softmax(jnp.where(kept, log_probs, -jnp.inf), axis=-1)


def draw(number: jax.Array, probs: jax.Array) -> jax.Array:
    """Inverse transform sampling, int32 [slot], from ``probs`` [slot, vocab].

    One random number in [0, 1) per token instead of one per entry of the vocabulary, which costs
    as much as the model where that is small. Sums run over blocks, then within one: short ones
    lose no precision. A token of probability 0 is never drawn.
    """
    slots, vocab = probs.shape
    size = math.isqrt(vocab - 1) + 1
    padded = jnp.pad(probs, ((0, 0), (0, -vocab % size))).reshape(slots, -1, size)
    ends = jnp.cumsum(padded.sum(-1), axis=-1)
    target = (number * ends[:, -1])[:, None]
    block = (ends <= target).sum(-1, keepdims=True)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, block - 1, axis=-1), 0)
    inside = jnp.cumsum(jnp.take_along_axis(padded, block[..., None], axis=1)[:, 0], axis=-1)
    # this sum may round to less than the block's: stay below it, and a token is always found
    rest = jnp.minimum(target - before, jnp.nextafter(inside[:, -1:], jnp.float32(0)))
    return (block[:, 0] * size + (inside <= rest).sum(-1)).astype(jnp.int32)
