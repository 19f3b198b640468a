"""The length penalty: concave in the effort, so that hard tasks may take long (report Fig. 6)."""

import jax
import jax.numpy as jnp


@jax.jit
def length_penalty(x: jax.Array, k: jax.Array | float, q: jax.Array | float) -> jax.Array:
    """The cost of an effort `x`, to be subtracted from the reward.

        C_{k,q}(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q))

    Its marginal cost is C' = (1 + k x)^(-q): 1 for the first unit, falling with every further
    one if q > 0. C is x for q = 0 or k = 0, log(1 + k x) / k for q = 1, and never above
    1 / (k (q - 1)) for q > 1. All of these are limits of one expression that is evaluated
    without cancellation, so C is accurate to a few float32 roundings for every k and q, at the
    limits and close to them, and so is its gradient with respect to `x`, `k` and `q`.

    Args:
      x: effort, >= 0: a weighted sum of thinking, tool-call, tool-output and final-message
        tokens, tool calls and turns.
      k: how early the marginal cost starts to fall (at x of about 1 / k), >= 0; k x finite.
      q: how fast it falls.

    Returns:
      The cost, of the broadcast shape, at least float32. NaN, as from `jnp.log`, where `x` or
      `k` is negative.
    """
    dtype = jnp.result_type(x, k, q, jnp.float32)
    return _penalty(*jnp.broadcast_arrays(*(jnp.asarray(v, dtype) for v in (x, k, q))))


@jax.custom_jvp
def _penalty(x: jax.Array, k: jax.Array, q: jax.Array) -> jax.Array:
    # With u = log(1 + k x) and z = (1 - q) u:  C = x * (u / (k x)) * (expm1(z) / z),
    # where both ratios are smooth and 1 at 0.
    u = _log1p_product(k, x)
    z = (1 - q) * u
    # exp(z) = (1 + k x) exp(-q u), and the rounding error of exp grows with its argument: take
    # the smaller one. This makes q = 0 exact; below 1 the other form would cancel.
    v = -q * u
    growth = jnp.where(z > jnp.maximum(1, -v), k * x * jnp.exp(v) + jnp.expm1(v), jnp.expm1(z))
    return x * _ratio(u, k * x) * _ratio(growth, z)


@_penalty.defjvp
def _penalty_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    # In closed form, since differentiating the ratios would bring the cancellation back.
    x, k, q = primals
    cost = _penalty(x, k, q)
    u = _log1p_product(k, x)
    slope = _log_ratio_slope((1 - q) * u)
    by_x = jnp.exp(-q * u)
    by_k = cost * (x / (1 + k * x) * ((1 - q) * slope - _log_ratio_slope(u)))
    by_q = -cost * u * slope
    return cost, by_x * tangents[0] + by_k * tangents[1] + by_q * tangents[2]


def _log1p_product(k: jax.Array, x: jax.Array) -> jax.Array:
    """log(1 + k x), which carries the NaN of bad input into the cost and its gradients."""
    return jnp.log1p(jnp.where((x >= 0) & (k >= 0), k * x, jnp.nan))


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """The quotient of two numbers that vanish together, with limit 1; never differentiated."""
    vanishes = jnp.abs(denominator) < jnp.finfo(denominator.dtype).tiny
    return jnp.where(vanishes, 1, numerator / denominator)


def _log_ratio_slope(z: jax.Array) -> jax.Array:
    """d/dz log(expm1(z) / z) = 1 / (1 - exp(-z)) - 1 / z, between 0 and 1, and 1/2 at 0."""
    small = jnp.abs(z) < 1
    t = z * z
    # Bernoulli numbers; the next term is 2e-8 z^9, below float32 rounding.
    series = 1 / 2 + z * (1 / 12 + t * (-1 / 720 + t * (1 / 30240 - t / 1209600)))
    w = jnp.where(small, 1, z)  # keeps second derivatives finite at 0
    return jnp.where(small, series, -1 / jnp.expm1(-w) - 1 / w)
