"""Partitions against published examples, brute force and the bound that none can beat."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from c2.parallel import balance
from c2.parallel.balance import Cost, imbalance, partition


def loads(costs, parts):
    return sorted(float(np.asarray(costs, float)[part].sum()) for part in parts)


def test_published_examples():
    """Karmarkar and Karp's method finds 16/14 where the longest first finds 17/13."""
    costs = np.array([8.0, 7, 6, 5, 4])
    assert loads(costs, balance._differencing(costs, 2)) == [14, 16]
    assert loads(costs, balance._longest_first(costs, 2)) == [13, 17]
    assert loads(costs, partition(costs, 2)) == [14, 16]
    costs = np.array([10.0, 9, 7, 5, 3, 2, 1])
    assert loads(costs, partition(costs, 3)) == [12, 12, 13]


def test_cost_of_a_long_sequence_is_attention():
    """48,851 is where attention of a Kimi K2 mixture layer costs as much as the rest."""
    cost = Cost(quadratic=1, linear=48_851)
    assert cost(np.array([48_851])) == 2 * 48_851**2
    one_long, many_short = cost(np.array([262_144])), cost(np.full(64, 4096)).sum()
    assert one_long / many_short == pytest.approx((262_144 + 48_851) / (4096 + 48_851))


@pytest.mark.parametrize(("items", "ranks"), [(100_000, 64), (2048, 64), (300, 8)])
def test_log_normal_sequences_are_within_a_percent_of_the_bound(items, ranks):
    rng = np.random.default_rng(items)
    lengths = np.minimum(np.exp(rng.normal(8.5, 1.2, items)), 262_144)
    costs = Cost(1, 48_851)(lengths)
    parts = partition(costs, ranks)
    least = max(1, costs.max() / (costs.sum() / ranks))
    assert imbalance(costs, parts) <= 1.01 * least
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(items))


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 50), max_size=8), st.integers(1, 3), st.randoms(use_true_random=False)
)
def test_small_partitions_against_brute_force(costs, ranks, random):
    parts = partition(np.array(costs, float), ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(costs)))
    best = min(
        max(sum(c for c, r in zip(costs, owner, strict=True) if r == rank) for rank in range(ranks))
        for owner in itertools.product(range(ranks), repeat=len(costs))
    )
    # Graham's bound for the longest first; the better of two is no worse
    assert best <= loads(costs, parts)[-1] <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9
    shuffled = random.sample(costs, len(costs))
    assert loads(shuffled, partition(np.array(shuffled, float), ranks)) == loads(costs, parts)


def test_ranks_without_items_stay_empty():
    assert [part.tolist() for part in partition(np.array([3.0]), 3)].count([]) == 2
    assert imbalance(np.array([]), partition(np.array([]), 2)) == 1


@pytest.mark.parametrize("costs", [[-1.0], [np.nan], [np.inf]])
def test_bad_costs_are_refused(costs):
    with pytest.raises(ValueError, match="finite and not negative"):
        partition(np.array(costs), 2)
    with pytest.raises(ValueError, match="ranks = 0"):
        partition(np.array([1.0]), 0)
