"""Next-token cross-entropy that never holds the logits of a whole batch.

At a vocabulary of 164k, logits of one 32k sequence take 21 GB. The head is therefore applied to
chunks of tokens, and since the loss is a sum, each chunk's gradients are computed while its
logits are still in cache: three matmuls instead of the four of recomputation.
"""

from functools import partial

import jax
import jax.numpy as jnp

_dot = partial(jnp.dot, preferred_element_type=jnp.float32)


def linear_cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, *, chunk: int = 256
) -> jax.Array:
    """Sum over tokens of ``-mask * log softmax(hidden @ head)[target]``, in nats.

    Args:
      hidden: [..., embed] in the compute dtype.
      head: [embed, vocab].
      targets: int [...].
      mask: [...], weight of each token; where it is 0, nothing of the token has any effect.
      chunk: tokens whose logits exist at a time.

    Returns:
      f32 scalar. Divide by a denominator that is fixed before the step (`c2.training.step`), so
      that splitting a batch changes neither loss nor gradient.
    """
    cut = partial(in_chunks, lead=targets.ndim, chunk=chunk)
    weights = mask.astype(jnp.float32)
    return _summed(cut(hidden), head.astype(hidden.dtype), cut(targets), cut(weights))


def in_chunks(x: jax.Array, *, lead: int, chunk: int) -> jax.Array:
    """Cuts tokens into pieces for `jax.lax.scan`: [..., features] -> [chunks, chunk, features].

    Args:
      x: an array with ``lead`` token axes in front, and any others.
      lead: how many axes count tokens.
      chunk: tokens in a piece; all tokens if there are fewer. The last piece is filled with zeros.
    """
    x = x.reshape(-1, *x.shape[lead:])
    size = min(chunk, len(x))
    x = jnp.pad(x, [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, size, *x.shape[1:])


def token_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probability of each target, f32 [...], for logits [..., vocab]."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _chunk_losses(hidden, head, targets):
    """Losses [tokens] of a chunk; its softmax and one-hot targets [tokens, vocab] for gradients."""
    logits = _dot(hidden, head)
    peak = logits.max(-1, keepdims=True)
    unnormalised = jnp.exp(logits - peak)
    total = unnormalised.sum(-1, keepdims=True)
    hit = jnp.arange(logits.shape[-1]) == targets[:, None]
    at_target = jnp.where(hit, logits, 0).sum(-1)
    return jnp.log(total[:, 0]) + peak[:, 0] - at_target, unnormalised / total, hit


@jax.custom_vjp
def _summed(hidden, head, targets, mask):
    def add(loss, chunk):
        h, t, m = chunk
        return loss + (_chunk_losses(h, head, t)[0] * m).sum(), None

    return jax.lax.scan(add, jnp.float32(0), (hidden, targets, mask))[0]


def _forward(hidden, head, targets, mask):
    def add(carry, chunk):
        loss, d_head = carry
        h, t, m = chunk
        losses, probs, hit = _chunk_losses(h, head, t)
        d_logits = ((probs - hit) * m[:, None]).astype(h.dtype)
        # transposed in memory: XLA:CPU has no fast matmul for a transposed left side
        d_head = d_head + _dot(jax.lax.optimization_barrier(h.T), d_logits)
        d_hidden = _dot(d_logits, head.T).astype(h.dtype)
        return (loss + (losses * m).sum(), d_head), (d_hidden, losses)

    start = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (loss, d_head), (d_hidden, losses) = jax.lax.scan(add, start, (hidden, targets, mask))
    return loss, (d_hidden, d_head.astype(head.dtype), losses)


def _backward(residuals, d_loss):
    d_hidden, d_head, d_mask = (d * d_loss.astype(d.dtype) for d in residuals)
    return d_hidden, d_head, None, d_mask


_summed.defvjp(_forward, _backward)
