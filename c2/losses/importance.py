"""Weights of tokens that another policy has sampled than the one that learns.

Samples come from a policy mu, their gradient is to be that of a policy pi. The ratio pi / mu of a
whole sequence would make it exact, with a variance that grows with its length; ratios of single
tokens vary little but leave out how other tokens before, and rewards behind, have changed. Bounds
trade more bias for less variance. No gradient flows through a weight.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from c2.losses.config import ImportanceConfig


def weights(
    log_ratio: jax.Array,
    trained: jax.Array,
    segment_ids: jax.Array,
    config: ImportanceConfig,
    *,
    axes: Sequence[str] = (),
) -> tuple[jax.Array, jax.Array]:
    """Weights of tokens.

    Args:
      log_ratio: log pi - log mu of every token [row, token]; 0 where nothing is trained.
      trained: bool [row, token].
      segment_ids: int [row, token], 1 and more; the sequences of a row. A rollout that was summed
        up is several of them, each with a ratio of its own.
      config: the kind of weights.
      axes: mesh axes over which the tokens of a row lie, in a manual region.

    Returns:
      The weights, and bool where the ratio of a trained token was out of bounds, both
      [row, token].
    """
    log_ratio = jax.lax.stop_gradient(log_ratio)
    if config.kind == "off":
        return jnp.ones_like(log_ratio), jnp.zeros_like(trained)
    if config.kind == "sequence_tis":
        log_ratio = _sums(log_ratio, segment_ids, axes)
    ratio = jnp.exp(log_ratio)
    if config.kind == "mis":
        out = (ratio < config.low) | (ratio > config.high)
        return jnp.where(out, 0, ratio), out & trained
    return jnp.minimum(ratio, config.high), (ratio > config.high) & trained


def _sums(x: jax.Array, segment_ids: jax.Array, axes: Sequence[str]) -> jax.Array:
    """For every token the sum over its segment, [row, token]."""
    most = x.shape[1] * jax.lax.psum(1, axes) + 1  # segments of a row, and padding
    by_row = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, most))
    sums = jax.lax.psum(by_row(x, segment_ids), axes)
    return jnp.take_along_axis(sums, segment_ids, axis=1)
