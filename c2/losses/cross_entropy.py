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
    embed = hidden.shape[-1]
    tokens = targets.size
    pad = -tokens % min(chunk, tokens)

    def chunked(x):
        x = jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, min(chunk, tokens), *x.shape[1:])

    return _summed(
        chunked(hidden.reshape(-1, embed)),
        head.astype(hidden.dtype),
        chunked(targets.reshape(-1)),
        chunked(mask.reshape(-1).astype(jnp.float32)),
    )


def token_log_probs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probability of each target, f32 [...], for logits [..., vocab]."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _chunk_loss(hidden, head, targets, mask):
    """Loss of one chunk, with its softmax and one-hot targets [tokens, vocab] for the gradient."""
    logits = _dot(hidden, head)
    peak = logits.max(-1, keepdims=True)
    unnormalised = jnp.exp(logits - peak)
    total = unnormalised.sum(-1, keepdims=True)
    hit = jnp.arange(logits.shape[-1]) == targets[:, None]
    at_target = jnp.where(hit, logits, 0).sum(-1)
    nll = jnp.log(total[:, 0]) + peak[:, 0] - at_target
    return (nll * mask).sum(), unnormalised / total, hit


@jax.custom_vjp
def _summed(hidden, head, targets, mask):
    def add(loss, chunk):
        h, t, m = chunk
        return loss + _chunk_loss(h, head, t, m)[0], None

    return jax.lax.scan(add, jnp.float32(0), (hidden, targets, mask))[0]


def _forward(hidden, head, targets, mask):
    def add(carry, chunk):
        loss, d_head = carry
        h, t, m = chunk
        chunk_loss, probs, hit = _chunk_loss(h, head, t, m)
        d_logits = ((probs - hit) * m[:, None]).astype(h.dtype)
        d_head = d_head + _dot(h.T, d_logits)
        return (loss + chunk_loss, d_head), _dot(d_logits, head.T).astype(h.dtype)

    start = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (loss, d_head), d_hidden = jax.lax.scan(add, start, (hidden, targets, mask))
    return loss, (d_hidden, d_head.astype(head.dtype))


def _backward(residuals, d_loss):
    d_hidden, d_head = residuals
    d_hidden = (d_hidden * d_loss).astype(d_hidden.dtype)
    return d_hidden, (d_head * d_loss).astype(d_head.dtype), None, None


_summed.defvjp(_forward, _backward)
