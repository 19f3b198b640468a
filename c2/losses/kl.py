"""Per-sample estimators of the KL divergence to a reference policy (report section 3, Fig. 4).

One convention everywhere: `q` is the side that was sampled from (the policy), `p` the reference,
`r = p(x) / q(x)`, and the target is KL(q||p) = E_{x~q}[-log r].
"""

import math

import jax
import jax.numpy as jnp

from c2.losses.config import ESTIMATORS, Estimator

# Enough terms of exp(z) - 1 - z = z^2/2! + z^3/3! + ... for float64 at |z| = 1.
_SERIES = tuple(1 / math.factorial(n) for n in range(18, 1, -1))


def estimate(log_p: jax.Array, log_q: jax.Array, estimator: Estimator) -> jax.Array:
    """One estimate of KL(q||p) per sample `x ~ q`.

        k1 = -log r               unbiased, any sign; its variance grows slowly
        k2 = (log r)^2 / 2        biased, never negative
        k3 = (r - 1) - log r      unbiased, never negative; its variance explodes as p and q part

    These are estimates of the *value*. Their derivative is another matter: `k1` must not be
    differentiated as a loss, because E_{x~q}[grad k1] = E_{x~q}[grad log q] = 0 whatever p is.
    As a reward, `stop_gradient(k1) * grad log q(x)`, it has the gradient of KL(q||p), as has `k2`
    differentiated as a loss; `k3` as a loss has the gradient of the opposite divergence, KL(p||q).

    Args:
      log_p: log-probability of the samples under the reference, any shape.
      log_q: log-probability under the policy that they were drawn from, same shape; finite.
      estimator: "k1" (what the report uses), "k2" or "k3".

    Returns:
      The estimates in nats, of the broadcast shape. Where p has no mass (`log_p` = -inf) they
      are +inf.

    Raises:
      ValueError: for an unknown estimator.

    Source: Schulman, "Approximating KL Divergence" (2020).
    """
    log_r = jnp.asarray(log_p) - jnp.asarray(log_q)
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return jnp.square(log_r) / 2
        case "k3":
            return _expm1_minus(log_r)
    raise ValueError(f"estimator: {estimator!r} is none of {', '.join(ESTIMATORS)}")


def _expm1_minus(z: jax.Array) -> jax.Array:
    """exp(z) - 1 - z to full relative precision, hence never negative.

    `expm1` alone is not enough: expm1(z) - z still cancels to nothing once |z| is about 1e-7.
    """
    small = jnp.abs(z) < 1
    s = jnp.where(small, z, 0)  # keeps the series, and its gradient, finite for large z
    series = jnp.zeros_like(s)
    for coefficient in _SERIES:
        series = series * s + coefficient
    return jnp.where(small, jnp.square(s) * series, jnp.expm1(z) - z)
