"""Estimates from all choices of k, against listing the choices and against what they estimate."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2.evals.sampling import best_of_k, pass_at_k


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=7), st.data())
def test_best_of_k_is_the_mean_over_all_choices(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    listed = np.mean([max(choice) for choice in itertools.combinations(rewards, k)])
    np.testing.assert_allclose(best_of_k(rewards, k), listed, atol=1e-9)


@given(st.integers(1, 60), st.data())
def test_with_right_and_wrong_it_is_pass_at_k(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    rewards = np.arange(n) < c
    np.testing.assert_allclose(best_of_k(rewards, k), pass_at_k(n, c, k), atol=1e-12)


def test_known_values():
    assert pass_at_k(5, 1, 1) == pytest.approx(0.2)
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(4, 0, 4) == 0 and pass_at_k(4, 1, 4) == 1
    np.testing.assert_allclose(best_of_k([[0, 0, 1], [3, 1, 2]], 2), [2 / 3, 8 / 3])


def test_it_is_unbiased_unlike_the_plug_in_estimate():
    """Its mean is 1 - (1 - p)^k where p is the chance to be right; that of the other is not."""
    p, n, k = 0.3, 6, 4
    counts = np.random.default_rng(0).binomial(n, p, 40_000)
    exact = 1 - (1 - p) ** k
    error = 4 * 0.5 / len(counts) ** 0.5
    assert abs(np.mean([pass_at_k(n, c, k) for c in counts]) - exact) < error
    assert abs(np.mean(1 - (1 - counts / n) ** k) - exact) > 2 * error


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_counts_without_sense_are_refused(n, c, k):
    with pytest.raises(ValueError, match="legal"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("k", [0, 4])
def test_more_attempts_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match="legal: 1 to the 3"):
        best_of_k([1, 2, 3], k)
