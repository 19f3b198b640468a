"""The estimators against exact decimal arithmetic, and what their gradients are in expectation."""

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.losses import kl


def exact(log_r: float, estimator: str) -> float:
    with localcontext() as context:
        context.prec = 60
        z = Decimal(log_r)
        return float({"k1": -z, "k2": z * z / 2, "k3": z.exp() - 1 - z}[estimator])


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_values_by_hand(estimator):
    log_p, log_q = jnp.log(jnp.array([0.2, 0.5])), jnp.log(jnp.array([0.4, 0.25]))
    half, double = np.log(0.5), np.log(2.0)
    expected = {
        "k1": [-half, -double],
        "k2": [half**2 / 2, double**2 / 2],
        "k3": [-0.5 - half, 1 - double],
    }[estimator]
    np.testing.assert_allclose(kl.estimate(log_p, log_q, estimator), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_full_relative_precision_for_every_size_of_log_r(estimator, dtype):
    size = np.logspace(-15, 1.9, 400)
    log_r = np.concatenate([-size, size]).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        values = kl.estimate(jnp.asarray(log_r), jnp.zeros_like(log_r), estimator)
    assert values.dtype == dtype
    expected = [exact(float(z), estimator) for z in log_r]
    np.testing.assert_allclose(values, expected, rtol=8 * np.finfo(dtype).eps)


@settings(max_examples=60, deadline=None)
@given(
    log_p=st.floats(-80, 0, width=32),
    log_q=st.floats(-80, 0, width=32),
)
def test_k2_and_k3_are_never_negative(log_p, log_q):
    for estimator in ("k2", "k3"):
        assert kl.estimate(jnp.float32(log_p), jnp.float32(log_q), estimator) >= 0


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_gradient_with_respect_to_log_q(estimator):
    # down to a ratio at which the powers of the series would overflow
    log_r = np.concatenate([-np.logspace(-6, 4, 200), np.logspace(-6, 1.9, 200)])
    log_p = log_r.astype(np.float32)
    gradient = jax.jit(jax.vmap(jax.grad(lambda q, p: kl.estimate(p, q, estimator))))
    z = log_p.astype(np.float64)
    expected = {"k1": np.ones_like(z), "k2": -z, "k3": -np.expm1(z)}[estimator]
    np.testing.assert_allclose(gradient(jnp.zeros_like(log_p), log_p), expected, rtol=1e-6)


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_no_mass_under_the_reference_is_an_infinite_divergence(estimator):
    assert kl.estimate(-jnp.inf, -1.0, estimator) == jnp.inf


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    log_q = jax.nn.log_softmax(jnp.array([0.5, -0.2, 0.1]))
    log_p = jax.nn.log_softmax(jnp.array([0.0, 0.3, -0.4]))
    mean = {e: float(jnp.exp(log_q) @ kl.estimate(log_p, log_q, e)) for e in kl.ESTIMATORS}
    assert mean["k1"] == pytest.approx(0.1028480374, abs=1e-7)  # KL(q||p), not KL(p||q) = .1149
    assert mean["k3"] == pytest.approx(0.1028480374, abs=1e-7)
    assert abs(mean["k2"] - 0.1028480374) > 1e-3


def test_unknown_estimator_names_the_legal_ones():
    with pytest.raises(ValueError, match="'k4' is none of k1, k2, k3"):
        kl.estimate(0.0, 0.0, "k4")
