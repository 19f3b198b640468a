"""Speculative sampling: golden values, the exact identity behind it, and samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.models.speculative import acceptance, residual, tokens_per_step, verify

P, Q = np.float32([0.5, 0.3, 0.2]), np.float32([0.2, 0.2, 0.6])
CRITICAL_2 = 13.82  # chi-square with 2 degrees of freedom: exceeded once in 1000 by chance


def test_golden_values():
    np.testing.assert_allclose(acceptance(P, Q), 0.6, rtol=1e-6)
    np.testing.assert_allclose(residual(P, Q), [0.75, 0.25, 0], rtol=1e-6)
    np.testing.assert_allclose(tokens_per_step(0.85), 1.85, rtol=1e-6)
    np.testing.assert_allclose(tokens_per_step(0.8, drafts=3), 2.952, rtol=1e-6)
    np.testing.assert_allclose(tokens_per_step(1.0, drafts=3), 4)


@st.composite
def distributions(draw):
    size = draw(st.integers(2, 8))
    weights = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1)), min_size=size, max_size=size)
    p, q = (np.float64(draw(weights.filter(any))) for _ in range(2))
    return p / p.sum(), q / q.sum()


@given(distributions())
@settings(max_examples=100, deadline=None)
def test_accepted_and_replaced_drafts_together_are_distributed_as_the_model(pair):
    p, q = pair
    with jax.enable_x64(True):
        rate, rest = np.asarray(acceptance(p, q)), np.asarray(residual(p, q))
    accepted = q * np.minimum(1, p / np.where(q > 0, q, 1))
    np.testing.assert_allclose(accepted.sum(), rate, atol=1e-12)
    np.testing.assert_allclose(rate, 1 - np.abs(p - q).sum() / 2, atol=1e-12)
    np.testing.assert_allclose(rest.sum(), 1, atol=1e-12)
    np.testing.assert_allclose(accepted + (1 - rate) * rest, p, atol=1e-12)


def samples(p, q, count=40_000):
    """Drafts from q, verified: counts of the tokens, and how many drafts were accepted."""
    draw, check = jax.random.split(jax.random.key(0))
    drafts = jax.random.categorical(draw, jnp.log(q), shape=(count,))
    p, q = (jnp.broadcast_to(x, (count, len(x))) for x in (p, q))
    result = jax.jit(verify)(check, drafts, p, q)
    kept = np.asarray(result.token) == np.asarray(drafts)
    assert kept[np.asarray(result.accepted)].all()
    return np.bincount(result.token, minlength=p.shape[1]), int(result.accepted.sum())


def test_samples_are_distributed_as_the_model():
    counts, accepted = samples(P, Q)
    expected = counts.sum() * P
    assert ((counts - expected) ** 2 / expected).sum() < CRITICAL_2
    drafted = counts.sum() * Q
    assert ((counts - drafted) ** 2 / drafted).sum() > 100 * CRITICAL_2  # and not as the drafts
    error = np.sqrt(0.6 * 0.4 / counts.sum())
    assert abs(accepted / counts.sum() - 0.6) < 4 * error


@pytest.mark.parametrize(
    ("p", "q", "rate"), [(P, P, 1.0), ([1.0, 0, 0], [0, 0.5, 0.5], 0.0), ([1.0, 0, 0], Q, 0.2)]
)
def test_edges(p, q, rate):
    """A perfect draft, one that is never right, and a model without doubt."""
    p, q = np.float32(p), np.float32(q)
    counts, accepted = samples(p, q, 4000)
    assert accepted / 4000 == pytest.approx(rate, abs=0.03)
    assert (counts[p == 0] == 0).all()
