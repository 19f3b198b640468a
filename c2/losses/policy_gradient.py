"""The policy gradient loss. It knows tokens with advantages, and neither groups nor rewards."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from c2.losses import importance, kl
from c2.losses.config import PolicyGradientConfig
from c2.losses.cross_entropy import in_chunks

Sums = dict[str, jax.Array]


def policy_gradient(
    log_probs: jax.Array,
    batch: Mapping[str, jax.Array],
    config: PolicyGradientConfig,
    *,
    axes: Sequence[str] = (),
) -> tuple[jax.Array, Sums]:
    """The sum over tokens of what descends to more reward, and sums to report.

        -weight * importance * (advantage * log pi - beta * estimate of the KL)

    with the second term only if the KL is in the loss. Divide by a denominator that was fixed
    before the step (`c2.rl.credit`), so that splitting a batch changes nothing.

    Args:
      log_probs: of the targets under the policy that learns [row, token], at the temperature that
        they were sampled at.
      batch: see `c2.rl.rows.pack`: ``weights``, ``advantages``, ``sampled``, ``segment_ids`` and,
        if there is a KL, ``reference``, all [row, token] and at the place of the token that
        predicts the target. Where the weight is 0 nothing else has any effect.
      config: the objective; its groups and norms are in advantages and weights already.
      axes: mesh axes over which the tokens of a row lie, in a manual region.

    Returns:
      The sum, and sums over the trained tokens: ``tokens``, how many; ``importance_weight``;
      ``out_of_bounds``, ratios that were truncated or left out; ``log_ratio_abs`` and ``mismatch``,
      the distance between the policies that learned and sampled, |log pi - log mu| and k3 of
      KL(mu || pi); ``kl_k1``, ``kl_k2`` and ``kl_k3`` to the reference if there is a KL.
    """
    trained = batch["weights"] > 0

    def masked(x: jax.Array) -> jax.Array:
        # before anything is computed with it: 0 times NaN is NaN, also in gradients
        return jnp.where(trained, x, 0)

    log_pi, sampled, advantages = map(masked, (log_probs, batch["sampled"], batch["advantages"]))
    constant = jax.lax.stop_gradient(log_pi)
    weights, out = importance.weights(
        constant - sampled, trained, batch["segment_ids"], config.importance, axes=axes
    )
    gain = advantages * log_pi
    sums = {
        "tokens": trained,
        "importance_weight": masked(weights),
        "out_of_bounds": out,
        "log_ratio_abs": jnp.abs(constant - sampled),
        "mismatch": kl.estimate(constant, sampled, "k3"),
    }
    if config.kl.beta:
        reference = masked(batch["reference"])
        if config.kl.placement == "loss":
            gain -= config.kl.beta * kl.estimate(reference, log_pi, config.kl.estimator)
        sums |= {f"kl_{k}": kl.estimate(reference, constant, k) for k in kl.ESTIMATORS}
    total = -(masked(batch["weights"]) * weights * gain).sum()
    return total, {name: x.sum(dtype=total.dtype) for name, x in sums.items()}


def linear_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    temperatures: jax.Array,
    *,
    chunk: int = 256,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of targets, and entropies, without the logits of a whole batch.

    Args:
      hidden: [..., embed] in the compute dtype.
      head: [embed, vocab].
      targets: int [...].
      temperatures: [...], of the distributions; above 0.
      chunk: tokens whose logits exist at a time; they are computed again for gradients.

    Returns:
      f32 [...] in nats, both; no gradient flows through the entropies.
    """
    cut = partial(in_chunks, lead=targets.ndim, chunk=chunk)

    @jax.checkpoint
    def of_chunk(tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        h, t, temperature = tokens
        logits = jnp.dot(h, head.astype(h.dtype), preferred_element_type=jnp.float32)
        log_probs = jax.nn.log_softmax(logits / temperature[:, None])
        at_target = jnp.take_along_axis(log_probs, t[:, None], axis=-1)[:, 0]
        log_probs = jax.lax.stop_gradient(log_probs)
        return at_target, -(jnp.exp(log_probs) * log_probs).sum(-1)

    # the last chunk is filled with zeros, which are no temperatures
    tokens = cut(hidden), cut(targets), jnp.where(cut(temperatures) > 0, cut(temperatures), 1)
    found = jax.lax.map(of_chunk, tokens)
    return tuple(x.reshape(-1)[: targets.size].reshape(targets.shape) for x in found)
