"""Rotary position embedding with YaRN scaling (Peng et al. 2023, as DeepSeek-V3 applies it)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from c2.models.config import RopeConfig, YarnConfig


def inverse_frequencies(cfg: RopeConfig, features: int) -> np.ndarray:
    """Angular velocity of each feature pair, float64 [features // 2].

    YaRN leaves fast pairs alone, divides slow ones by ``factor`` and blends those between: a pair
    counts as fast when it turns more than ``beta_fast`` times within the original context.
    """
    plain = cfg.theta ** -(np.arange(0, features, 2, dtype=np.float64) / features)
    if cfg.yarn is None:
        return plain
    yarn = cfg.yarn

    def pair_with(turns: float) -> float:
        wavelength = yarn.original_context / (turns * 2 * math.pi)
        return features * math.log(wavelength) / (2 * math.log(cfg.theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), features - 1)
    if low == high:
        high += 0.001  # the published rule: a step instead of a division by zero
    slow = np.clip((np.arange(features // 2) - low) / (high - low), 0, 1)
    return plain / yarn.factor * slow + plain * (1 - slow)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def attention_scale(yarn: YarnConfig | None, features: int) -> float:
    """Factor on query-key products: ``features ** -0.5``, sharpened by YaRN's m squared."""
    scale = features**-0.5
    if yarn is None or not yarn.mscale_all_dim:
        return scale
    return scale * _temperature(yarn.factor, yarn.mscale_all_dim) ** 2


def tables(positions: jax.Array, cfg: RopeConfig, features: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for positions [..., seq], each f32 [..., seq, features // 2]."""
    frequencies = jnp.asarray(inverse_frequencies(cfg, features), jnp.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    amplitude = 1.0
    if cfg.yarn is not None:
        yarn = cfg.yarn
        amplitude = _temperature(yarn.factor, yarn.mscale) / _temperature(
            yarn.factor, yarn.mscale_all_dim
        )
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, cfg: RopeConfig) -> jax.Array:
    """Rotates feature pairs by their position's angles; features keep their places.

    Args:
      x: [batch, seq, heads, features].
      cos: [batch, seq, features // 2].
      sin: [batch, seq, features // 2].
      cfg: its ``layout`` says which features form a pair.
    """
    lead, cos, sin = x.shape[:-1], cos[..., None, :], sin[..., None, :]
    axis = -1 if cfg.layout == "neighbours" else -2
    pairs = x.astype(jnp.float32).reshape(*lead, *((-1, 2) if axis == -1 else (2, -1)))
    first, second = jnp.moveaxis(pairs, axis, 0)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis)
    return turned.reshape(x.shape).astype(x.dtype)
