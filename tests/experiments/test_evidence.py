"""Gains over seeds and tasks against closed forms, rank correlation against scipy."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import evidence
from experiments.evidence import Gain
from experiments.post_training_report import CLEAR, Mean


def test_gains_are_paired_by_task_and_averaged_over_seeds():
    before = [{"a": 0.0, "b": 0.5, "c": 1.0, "only": 9.0}, {"a": 0.25, "b": 0.5, "c": 0.5}]
    after = [{"a": 0.5, "b": 0.5, "c": 1.0, "other": 9.0}, {"a": 0.5, "b": 1.0, "c": 0.5}]
    found = evidence.paired(after, before)
    by_task = [(0.5 + 0.25) / 2, (0 + 0.5) / 2, 0]
    np.testing.assert_allclose(found.mean, (np.mean(by_task), scipy.stats.sem(by_task)))
    np.testing.assert_allclose(found.seeds, (0.5 / 3, 0.75 / 3))
    test = scipy.stats.ttest_1samp(by_task, 0)
    assert found.errors == pytest.approx(test.statistic)


def test_seeds_with_tasks_of_their_own_add_up_and_what_was_not_measured_is_left_out():
    found = evidence.paired(
        [{"a": 2.0, "b": 3.0, "x": math.nan}, {"c": 5.0}], [{"a": 1, "b": 1, "x": 0}, {"c": 1}]
    )
    np.testing.assert_allclose(found.mean, (7 / 3, scipy.stats.sem([1, 2, 4])))
    assert found.seeds == (1.5, 4.0)


def test_seeds_that_disagree_are_no_gain():
    assert Gain(Mean(0.2, 0.01), (0.3, 0.2, 0.1)).errors == pytest.approx(20)
    assert Gain(Mean(-0.2, 0.01), (-0.3, -0.2, -0.1)).errors == pytest.approx(-20)
    assert Gain(Mean(0.2, 0.01), (0.5, 0.2, -0.1)).errors == 0
    assert Gain(Mean(0.2, 0.01), (0.6, 0.0)).errors == 0
    assert Gain(Mean(0.2, 0.01), (0.2, math.nan)).errors == 0
    assert Gain(Mean(0.5, 0.0), (0.5, 0.5)).errors == math.inf
    assert math.isnan(Gain(Mean(0.5, math.nan), (0.5,)).errors)  # a single task


def test_a_gain_is_claimed_only_if_it_is_clear():
    clear, unclear = (Gain(Mean(0.1, 0.1 / errors), (0.1,)) for errors in (CLEAR + 0.1, CLEAR - 1))
    assert evidence.claim("Better", clear).verdict == "shown"
    assert evidence.claim("Better", unclear).verdict == "not shown"
    assert evidence.claim("Better", Gain(Mean(-0.1, 0.01), (-0.1,))).verdict == "not shown"
    assert "+0.100 with a standard error of" in evidence.claim("Better", clear).note


def test_gains_on_other_tasks_are_those_of_welch():
    rng = np.random.default_rng(0)
    sides = [[dict(enumerate(rng.normal(m, 1, 9))) for _ in range(2)] for m in (1, 0)]
    found = evidence.unpaired(*sides)
    a, b = (np.concatenate([[*x.values()] for x in side]) for side in sides)
    test = scipy.stats.ttest_ind(a, b, equal_var=False)
    assert found.mean.value / found.mean.error == pytest.approx(test.statistic)
    np.testing.assert_allclose(
        found.seeds, [np.mean([*x.values()]) - np.mean([*y.values()])
                      for x, y in zip(*sides, strict=True)],
    )  # fmt: skip


small = st.integers(0, 3)  # so that there are ties


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(small, small), min_size=3, max_size=5))
def test_a_single_seed_is_the_exact_test_of_scipy(pairs):
    x, y = np.array(pairs, float).T
    found = evidence.falls_with(x[None], y[None])
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert math.isnan(found.rho) and math.isnan(found.p)
        return
    assert found.rho == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    orders = [scipy.stats.spearmanr(x, z).statistic for z in itertools.permutations(y)]
    assert found.p == pytest.approx(np.mean(np.array(orders) <= found.rho + 1e-9))
    exact = scipy.stats.permutation_test(
        (y,), lambda z: scipy.stats.spearmanr(x, z).statistic, permutation_type="pairings",
        alternative="less", n_resamples=np.inf,
    )  # fmt: skip
    assert found.p == pytest.approx(exact.pvalue)


def test_several_seeds_are_permuted_within_each():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 2, 3))
    found = evidence.falls_with(x, y)
    rho = scipy.stats.spearmanr(x.ravel(), y.ravel()).statistic
    orders = [
        scipy.stats.spearmanr(x.ravel(), np.concatenate([a, b])).statistic
        for a in itertools.permutations(y[0])
        for b in itertools.permutations(y[1])
    ]
    assert len(orders) == 36 and found.rho == pytest.approx(rho)
    assert found.p == pytest.approx(np.mean(np.array(orders) <= rho + 1e-9))


def test_a_perfect_order_has_the_least_chance_and_what_seeds_share_is_no_evidence():
    levels = np.array([[3.0, 2.0, 1.0]] * 3)
    bits = levels + np.array([[0.0], [0.1], [0.2]])
    assert evidence.falls_with(bits, -bits) == (pytest.approx(-1), pytest.approx(1 / 216))
    assert evidence.falls_with(bits, bits).p == 1
    between = np.array([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]])  # seeds alone make the correlation
    found = evidence.falls_with(between, -between + np.array([[0, 2]]))
    assert found.rho < -0.7 and found.p == 1


def test_spread_and_missing_values():
    assert evidence.spread([0.25, 0.5, 0.75]) == "0.500 (0.250 to 0.750)"
    assert math.isnan(evidence.falls_with([[1, 2, 3]], [[1, math.nan, 2]]).p)
    assert evidence.mean({"a": 1.0, "b": math.nan, "c": 2.0}) == 1.5 and math.isnan(
        evidence.mean({})
    )
