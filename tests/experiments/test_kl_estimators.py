"""The study's numbers against closed forms, and that each of its claims can fail."""

import functools

import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from experiments import kl_estimators as study
from experiments.study import Run

QUICK = study.get_config("quick")


@functools.cache
def values():
    return study.measure(QUICK, Run(workdir=None, console=Console(quiet=True)))


def test_quadrature_gives_the_closed_forms():
    mu = np.array([0.05, 0.1, 1.0, 2.0, 4.0, 6.0])
    u = mu**2
    moments = study.quadrature(mu)
    expected = {
        "k1": (u / 2, u, 2),
        "k2": (u / 2 + u**2 / 8, (2 * u**2 + u**3) / 4, None),
        "k3": (u / 2, np.expm1(u) - u, None),
    }
    for estimator, (mean, variance, tail_squared) in expected.items():
        np.testing.assert_allclose(moments[estimator].mean, mean, rtol=1e-9)
        np.testing.assert_allclose(moments[estimator].variance, variance, rtol=1e-9)
        if tail_squared:  # k1 is Gaussian: kurtosis 3
            np.testing.assert_allclose(moments[estimator].tail ** 2, tail_squared, rtol=1e-9)


def test_tail_of_k3_against_a_large_sample():
    """Where the fourth moment is still tame, a sample must show the same kurtosis."""
    log_r = 0.3 * np.random.default_rng(0).normal(size=2_000_000) - 0.3**2 / 2
    k3 = np.expm1(log_r) - log_r
    kurtosis = np.mean((k3 - k3.mean()) ** 4) / k3.var() ** 2
    assert study.quadrature([0.3])["k3"].tail[0] ** 2 + 1 == pytest.approx(kurtosis, rel=0.1)


def test_crossover():
    u = 1.2564312086261697  # e^u - 1 = 2 u
    assert study.crossover() == pytest.approx(u / 2, abs=1e-8)


def test_quick_variant_runs_to_a_result(tmp_path):
    result = study.run(QUICK, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert {claim.statement: claim.verdict for claim in result.claims} == {
        claim.statement: "shown" for claim in result.claims
    }
    (figure,) = result.figures
    assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    assert [len(rows) for rows in result.tables.values()] == [6]


CORRUPTIONS = {
    "Schulman": lambda v: v._replace(exact=v.exact | {"k3": v.exact["k1"]}),
    "k3 becomes": lambda v: v._replace(crossover=0.6182),  # that of k2
    "Near the reference": lambda v: v._replace(exact=v.exact | {"k3": v.exact["k1"]}),
    "Far from it": lambda v: v._replace(exact=v.exact | {"k3": v.exact["k2"]}),
    "Sampled means": lambda v: v._replace(means=v.means | {"k1": v.means["k2"]}),
    "Sampled variances": lambda v: v._replace(flagged=np.zeros_like(v.flagged)),
    "At KL": lambda v: v._replace(variances=v.variances | {"k3": v.exact["k3"].variance[None]}),
}


@pytest.mark.parametrize("statement", CORRUPTIONS)
def test_each_claim_can_fail(statement):
    def verdict(measured):
        claims = study.judge(QUICK, measured, study.published_table(measured))
        (claim,) = (claim for claim in claims if claim.statement.startswith(statement))
        return claim.verdict

    assert verdict(values()) == "shown"
    assert verdict(CORRUPTIONS[statement](values())) == "not shown"


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("samples", {"samples": 10}),
        ("seeds", {"seeds": 0}),
        ("mu_min", {"mu_min": 5.0}),
        ("mu_max", {"mu_max": 7.0}),
        ("unreliable", {"unreliable": 0.0}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"{key}.*legal"):
        study.Config(**change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: full, quick"):
        study.get_config("huge")
