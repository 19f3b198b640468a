"""The optima against brute force on the printed formulas, and that each claim can fail."""

import functools

import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from experiments import length_penalty as study
from experiments.study import Run

QUICK = study.get_config("quick")


@functools.cache
def found(k: float = 1.0) -> study.Allocation:
    return study.allocate(QUICK, np.full(len(QUICK.q), k), np.array(QUICK.q))


def penalty(x, k, q):
    return np.log1p(k * x) / k if q == 1 else ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


def test_known_efforts():
    # D = 1, 5, 20 at q = 0, 0.5, 1, 2
    expected = [[3, 6.953, 0.0854], [3, 9.323, 0], [3, 13.335, 51.622], [3, 26.077, 143.59]]
    np.testing.assert_allclose(found().effort, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found().success[2:, -1], [0.924, 0.999], atol=1e-3)


@pytest.mark.parametrize("k", [0.1, 1.0, 10.0])
def test_optima_against_brute_force(k):
    x = np.linspace(0, 400, 400_001)
    for q, price, efforts in zip(QUICK.q, found(k).price, found(k).effort, strict=True):
        assert price == pytest.approx(np.exp(-3) * (1 + 3 * k) ** q)
        for difficulty, effort in zip(QUICK.difficulties, efforts, strict=True):
            utility = -np.expm1(-x / difficulty) - price * penalty(x, k, q)
            assert effort == pytest.approx(x[utility.argmax()], abs=1.1e-3), (q, difficulty)


def test_a_local_maximum_is_not_taken_for_the_optimum():
    """At q = 0.5 the hard task has an inner maximum, but no effort is better."""
    x = np.linspace(0, 100, 100_001)
    utility = -np.expm1(-x / 20) - found().price[1] * penalty(x, 1, 0.5)
    inner = (utility[1:-1] > utility[:-2]) & (utility[1:-1] > utility[2:])
    assert inner.sum() == 1
    assert utility[1:-1][inner] < 0
    assert found().effort[1, -1] == 0


def test_gain_of_the_grid_sees_a_wrong_optimum():
    assert study.largest_gain(QUICK, found()) < 1e-12
    for shift in (-0.5, 0.5):
        effort = found().effort.copy()
        effort[3, 1] += shift
        assert study.largest_gain(QUICK, found()._replace(effort=effort)) > 1e-6


def test_first_step():
    expected = np.exp(-3 / 20) / 20 - np.exp(-3)  # the price cancels the marginal cost
    np.testing.assert_allclose(study.first_step(QUICK, found()), expected, rtol=1e-9)


def test_quick_variant_runs_to_a_result(tmp_path):
    result = study.run(QUICK, Run(workdir=tmp_path, console=Console(quiet=True)))
    verdicts = [claim.verdict for claim in result.claims]
    assert verdicts == ["shown"] * 5 + ["not shown"] * 2
    assert [figure.path for figure in result.figures] == [
        "figures/penalties.png",
        "figures/allocation.png",
        "figures/map.png",
    ]
    for figure in result.figures:
        assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    assert {len(rows) for rows in result.tables.values()} == {4, 16}


def test_each_claim_can_fail(monkeypatch):
    nothing = found()._replace(effort=0 * found().effort, success=0 * found().success)
    everything = found()._replace(effort=1 + found().effort, success=0 * found().success + 1)
    monkeypatch.setattr(study, "marginal_error", lambda config: 2e-5)
    gave_up = study.judge(QUICK, nothing, nothing, np.nan)
    assert [claim.verdict for claim in gave_up] == ["not shown"] * 4 + ["shown"] + ["not shown"] * 2
    kept = study.judge(QUICK, everything, everything, 0.0)
    assert [claim.verdict for claim in kept[3:6]] == ["shown", "not shown", "shown"]
    no_valley = QUICK.__class__(difficulties=(1.0, 5.0))  # e^(-3/5) / 5 > e^-3
    assert study.first_step(no_valley, found()).min() > 0


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("difficulties", {"difficulties": (5.0, 1.0)}),
        ("difficulties", {"difficulties": (1.0,)}),
        ("easy_effort", {"easy_effort": 0.0}),
        ("k", {"k": 0.0}),
        ("other_k", {"other_k": (1.0, -1.0)}),
        ("q", {"q": (0.0, 0.5)}),
        ("q", {"q": (0.5, 4.0)}),
        ("resolution", {"resolution": 1}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}.*legal"):
        study.Config(**change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: full, quick"):
        study.get_config("huge")
