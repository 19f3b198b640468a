"""The study's closed forms against sums by hand and samples, and that its claims can fail."""

import functools

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from experiments import weight_delta as study
from experiments.study import Run

SMOKE = study.get_config("smoke")


@functools.cache
def values():
    return study.measure(SMOKE, Run(workdir=None, console=Console(quiet=True)))


def test_expected_fraction_against_numerical_integration():
    w = np.geomspace(1e-12, 0.2, 1_000_001)
    density = 2 * np.exp(-((w / 0.02) ** 2) / 2) / (0.02 * np.sqrt(2 * np.pi))
    ulp = 2.0 ** (np.floor(np.log2(w)) - 7)
    for rate, published in ((1e-8, 0.00076), (1e-6, 0.04233), (1e-5, 0.25076), (1e-3, 1.0)):
        integral = np.trapezoid(density * np.minimum(1, rate / ulp), w)
        assert study.expected_fraction(rate, 0.02) == pytest.approx(integral, rel=2e-4)
        assert study.expected_fraction(rate, 0.02) == pytest.approx(published, rel=1e-3)


def test_expected_after_two_steps_is_half_of_a_double_step():
    both = study.expected_fraction(2e-6, 0.02)
    assert study.expected_after(1, 1e-6, 0.02) == study.expected_fraction(1e-6, 0.02)
    assert study.expected_after(2, 1e-6, 0.02) == pytest.approx(both / 2)


def test_entropy_bound():
    assert study.entropy_bound(0) == 0
    assert study.entropy_bound(1) == 1 / 8  # the sign
    assert study.entropy_bound(0.5) == pytest.approx(1.5 / 8)


def test_compare_counts_changed_bf16_numbers():
    old = np.float32([1, 1, 1, 1, -2])
    new = old + np.float32([0, 0.001, 0.0079, -0.0079, 0])  # bf16 has 1 + 2^-7 and 1 - 2^-8
    changed = np.mean(old.astype(ml_dtypes.bfloat16) != new.astype(ml_dtypes.bfloat16))
    assert study.compare(new, old).fraction == changed == 0.4


def test_smoke_variant_runs_to_a_result(tmp_path):
    result = study.run(SMOKE, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert {claim.statement: claim.verdict for claim in result.claims} == {
        claim.statement: "shown" for claim in result.claims
    }
    (figure,) = result.figures
    assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    assert [len(rows) for rows in result.tables.values()] == [3, 2]


def scaled(arm, field, factor):
    return lambda v: v._replace(
        **{arm: getattr(v, arm)._replace(**{field: getattr(getattr(v, arm), field) * factor})}
    )


CORRUPTIONS = {
    "The changed fraction": scaled("rates", "fraction", 1.03),
    "After several steps": scaled("every", "fraction", 0.97),
    "At a rate of": scaled("rates", "stored", 1.25),
    "Below 10%": scaled("rates", "xor", 0.4),
    "One version every": lambda v: v._replace(
        every=v.every._replace(stored=v.every.fraction * 0 + [1, 4])
    ),
    "Readers of a chain": lambda v: v._replace(wrong=np.array([0, 1, 0])),
}


@pytest.mark.parametrize("statement", CORRUPTIONS)
def test_each_claim_can_fail(statement):
    def verdict(measured):
        claims = study.judge(SMOKE, measured)
        (claim,) = (claim for claim in claims if claim.statement.startswith(statement))
        return claim.verdict

    assert verdict(values()) == "shown"
    assert verdict(CORRUPTIONS[statement](values())) == "not shown"


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("numbers", {"numbers": 10}),
        ("seeds", {"seeds": 0}),
        ("scale", {"scale": 0.0}),
        ("rates", {"rates": (1e-5, 1e-6)}),
        ("rates", {"rates": (1e-5,)}),
        ("every", {"every": (2, 4)}),
        ("chain_steps", {"chain_steps": 0}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"{key}.*legal"):
        study.Config(**change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: full, smoke"):
        study.get_config("huge")
