"""Distillation of exact next-token distributions that never holds the logits of a whole batch.

Teacher and student are two hidden states under one head, as in multi-token prediction (report
section 3.1). As in `c2.losses.cross_entropy`, each chunk's gradients are computed while its logits
are still in cache.
"""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from c2.losses.cross_entropy import in_chunks

Divergence = Literal["forward_kl", "reverse_kl"]
DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)

_dot = partial(jnp.dot, preferred_element_type=jnp.float32)


def linear_distillation(
    student: jax.Array,
    teacher: jax.Array,
    head: jax.Array,
    mask: jax.Array,
    *,
    divergence: Divergence = "forward_kl",
    chunk: int = 256,
) -> jax.Array:
    """Sum over tokens of ``mask`` times the divergence of two next-token distributions, in nats.

    With ``p = softmax(teacher @ head)`` and ``q = softmax(student @ head)`` over the whole
    vocabulary, it is KL(p||q) ("forward_kl") or KL(q||p) ("reverse_kl"). The target is fixed: no
    gradient reaches ``teacher``, and ``head`` gets that of the student's logits only.

    Args:
      student: [..., embed] in the compute dtype.
      teacher: [..., embed].
      head: [embed, vocab].
      mask: [...], weight of each token; where it is 0, nothing of the token has any effect.
      divergence: its direction.
      chunk: tokens whose logits exist at a time.

    Returns:
      f32 scalar, to be divided by a denominator that is fixed before the step.

    Raises:
      ValueError: for an unknown divergence.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence: {divergence!r} is none of {', '.join(DIVERGENCES)}")
    cut = partial(in_chunks, lead=mask.ndim, chunk=chunk)
    tokens = cut(student), cut(teacher), cut(mask.astype(jnp.float32))
    return _summed(divergence, head.astype(student.dtype), *tokens)


def _chunk_losses(divergence, head, student, teacher):
    """Losses [tokens] of a chunk and their gradients to the student's logits [tokens, vocab]."""
    log_q = jax.nn.log_softmax(_dot(student, head))
    log_p = jax.nn.log_softmax(_dot(teacher, head))
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if divergence == "forward_kl":
        return (p * (log_p - log_q)).sum(-1), q - p
    log_ratio = log_q - log_p
    losses = (q * log_ratio).sum(-1)
    return losses, q * (log_ratio - losses[:, None])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(divergence, head, student, teacher, mask):
    def add(loss, chunk):
        s, t, m = chunk
        return loss + (_chunk_losses(divergence, head, s, t)[0] * m).sum(), None

    return jax.lax.scan(add, jnp.float32(0), (student, teacher, mask))[0]


def _forward(divergence, head, student, teacher, mask):
    def add(carry, chunk):
        loss, d_head = carry
        s, t, m = chunk
        losses, d_logits = _chunk_losses(divergence, head, s, t)
        d_logits = (d_logits * m[:, None]).astype(head.dtype)
        # transposed in memory: XLA:CPU has no fast matmul for a transposed left side
        d_head = d_head + _dot(jax.lax.optimization_barrier(s.T), d_logits)
        d_student = _dot(d_logits, head.T).astype(head.dtype)
        return (loss + (losses * m).sum(), d_head), (d_student, losses)

    start = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
    (loss, d_head), (d_student, losses) = jax.lax.scan(add, start, (student, teacher, mask))
    return loss, (d_head.astype(head.dtype), d_student, losses)


def _backward(divergence, residuals, d_loss):
    d_head, d_student, d_mask = (d * d_loss.astype(d.dtype) for d in residuals)
    return d_head, d_student, None, d_mask


_summed.defvjp(_forward, _backward)
