"""Advantages against worked examples and the statistics module."""

import statistics

import numpy as np
import pytest

from c2.losses.advantages import group_advantages

NAN = float("nan")


def test_worked_examples():
    rewards = [[1, 0, 0, 1]]
    assert group_advantages(rewards).tolist() == [[0.5, -0.5, -0.5, 0.5]]
    leave_one_out = group_advantages(rewards, baseline="leave_one_out")
    np.testing.assert_allclose(leave_one_out, [[2 / 3, -2 / 3, -2 / 3, 2 / 3]])
    # hardly different rewards: the standard deviation makes 1900 times as much of them
    tiny = [[1, 1, 1, 1.001]]
    np.testing.assert_allclose(group_advantages(tiny), [[-0.00025] * 3 + [0.00075]], atol=1e-12)
    normed = group_advantages(tiny, std_norm=True)
    np.testing.assert_allclose(normed, [[-0.469] * 3 + [1.407]], atol=1e-3)
    assert normed[0, 3] / group_advantages(tiny)[0, 3] == pytest.approx(1900, rel=0.02)


@pytest.mark.parametrize("std_norm", [False, True])
def test_against_statistics(std_norm):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(5, 7))
    for row, got in zip(rewards, group_advantages(rewards, std_norm=std_norm), strict=True):
        scale = statistics.pstdev(row) + 1e-4 if std_norm else 1
        np.testing.assert_allclose(got, [(r - statistics.fmean(row)) / scale for r in row])
    for row, got in zip(rewards, group_advantages(rewards, baseline="leave_one_out"), strict=True):
        others = [statistics.fmean(np.delete(row, i)) for i in range(7)]
        np.testing.assert_allclose(got, row - others)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("std_norm", [False, True])
@pytest.mark.parametrize(
    ("group", "zero"),
    [
        ([0.0] * 8, True),
        ([1.0] * 8, True),
        ([0.1] * 7, True),  # their float sum over 7 is not 0.1
        ([1.0] * 7 + [1 + 1e-9], False),
        ([0.0, 1.0], False),
        ([0.7, NAN, 0.7, NAN], True),
        ([NAN, 0.7], True),  # nobody to compare with
        ([NAN, 0.7, 0.2], False),
    ],
)
def test_groups_without_a_difference_by_exact_equality(group, zero, baseline, std_norm):
    advantages = group_advantages([group], baseline=baseline, std_norm=std_norm)[0]
    assert np.isnan(advantages).tolist() == np.isnan(group).tolist()
    assert (np.nan_to_num(advantages) == 0).all() == zero


def test_a_failure_is_in_no_baseline():
    with_failure = [[NAN, 3, 1, 2, NAN], [1, NAN, NAN, NAN, 0], [NAN] * 5]
    for baseline in ("mean", "leave_one_out"):
        for std_norm in (False, True):
            got = group_advantages(with_failure, baseline=baseline, std_norm=std_norm)
            for row, mine in zip(with_failure[:2], got, strict=False):
                kept = [r for r in row if r == r]
                expected = group_advantages([kept], baseline=baseline, std_norm=std_norm)[0]
                np.testing.assert_array_equal(mine[~np.isnan(row)], expected)
            assert np.isnan(got[2]).all()


@pytest.mark.parametrize(
    ("rewards", "settings", "message"),
    [
        ([1, 0], {}, "rewards: shape"),
        ([[1, np.inf]], {}, "infinite"),
        ([[1, 0]], {"baseline": "median"}, "baseline: 'median' is none of mean, leave_one_out"),
    ],
)
def test_bad_input(rewards, settings, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **settings)
