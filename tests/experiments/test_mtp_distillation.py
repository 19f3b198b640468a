"""A small run of the study, that each of its claims can fail, and its statistics."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from experiments import mtp_distillation as study
from experiments.speculative_check import Check, excess
from experiments.study import Run

SMOKE = study.get_config("smoke")
FORWARD, LABELS, REVERSE = study.NAMES


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What one module per loss shows; it takes its time to compile four steps."""
    folder = tmp_path_factory.mktemp("study")
    config = replace(SMOKE, seeds=1)
    return config, study.measure(config, Run(workdir=folder, console=Console(quiet=True)))


@pytest.mark.slow
def test_acceptance_rises_with_every_loss(measured):
    config, values = measured
    assert config.steps == [0, 20, 40]
    for rates in values.acceptance.values():
        assert rates.shape == (1, 3)
        start, middle, end = rates[0]
        assert middle > start + 0.1 and end > middle
    starts = {rates[0, 0] for rates in values.acceptance.values()}
    assert len(starts) == 1  # the same module, before it is trained by one loss or the other


@pytest.mark.slow
def test_samples_agree_with_theory(measured):
    _, values = measured
    for check in values.checks.values():
        assert check.sampled == pytest.approx(check.analytic, rel=0.01)
        assert check.output < 4
        assert check.drafts > 10  # the drafts themselves are distributed otherwise


@pytest.mark.slow
def test_what_was_measured_is_reported(measured, tmp_path, monkeypatch):
    config, values = measured
    monkeypatch.setattr(study, "measure", lambda config, run: values)
    result = study.run(config, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert len(result.claims) == 5
    (figure,) = result.figures
    assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    rows, checks = result.tables.values()
    assert [row["loss"] for row in rows] == [row["loss"] for row in checks]
    assert rows[0]["step 20"].startswith(f"{values.acceptance[FORWARD][0, 1]:.3f} (")
    assert result.metrics["acceptance/hard_labels"] == values.acceptance[LABELS][0, -1]


def ideal():
    """Values of two seeds with which all claims hold."""
    ahead, behind = [[0.2, 0.6, 0.7]] * 2, [[0.2, 0.4, 0.5]] * 2
    check = Check(analytic=0.7, sampled=0.701, output=1.0, drafts=500.0)
    curves = (ahead, behind, behind)
    acceptance = {n: np.array(c) for n, c in zip(study.NAMES, curves, strict=True)}
    return study.Values(acceptance, dict.fromkeys(study.NAMES, check))


def with_curve(loss, *seeds):
    values = ideal()
    return values._replace(acceptance=values.acceptance | {loss: np.array(seeds)})


def with_check(**changes):
    values = ideal()
    spoilt = values.checks[REVERSE]._replace(**changes)
    return values._replace(checks=values.checks | {REVERSE: spoilt})


CORRUPTIONS = {
    "At step": with_curve(FORWARD, [0.2, 0.6, 0.7], [0.2, 0.39, 0.7]),
    "Distillation gets": with_curve(FORWARD, [0.2, 0.6, 0.7], [0.2, 0.41, 0.51]),
    "Distillation makes": with_curve(FORWARD, [0.2, 0.6, 0.7], [0.51, 0.6, 0.7]),
    "Sampled drafts": with_check(sampled=0.708),
    "Speculative output": with_check(output=4.1),
}


@pytest.mark.parametrize("statement", CORRUPTIONS)
def test_each_claim_can_fail(statement):
    def verdict(values):
        claims = study.judge(SMOKE, values)
        (claim,) = (claim for claim in claims if claim.statement.startswith(statement))
        return claim.verdict

    assert verdict(ideal()) == "shown"
    assert verdict(CORRUPTIONS[statement]) == "not shown"


def test_steps_to_reach_a_rate():
    steps, rates = [0, 10, 30], np.array([0.1, 0.3, 0.5])
    for target, expected in ((0.05, 0), (0.1, 0), (0.2, 5), (0.3, 10), (0.45, 25), (0.6, np.inf)):
        assert study.steps_to_reach(steps, rates, target) == pytest.approx(expected)


def test_excess_of_true_and_of_false_samples():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(300, 0.1), size=50)  # most tokens are rare
    counts = np.array([rng.multinomial(2000, p) for p in probs])
    assert abs(excess(counts, probs)) < 4
    assert excess(counts, np.roll(probs, 1, axis=0)) > 100
    slightly = 0.9 * probs + 0.1 * probs.mean(0)
    assert excess(counts, slightly) > 10


def test_excess_in_closed_form():
    """One context, all tokens common: (20^2 / 100 + 20^2 / 100 - 1) / sqrt(2)."""
    counts, probs = np.array([[120, 80]]), np.array([[0.5, 0.5]])
    assert excess(counts, probs) == pytest.approx((8 - 1) / np.sqrt(2))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model.mtp", {"model": replace(SMOKE.model, mtp=2)}),
        ("seeds", {"seeds": 0}),
        ("context", {"context": 2}),
        ("compare_at", {"compare_at": 40}),
        ("evaluate_at", {"evaluate_at": (0,)}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}: .*legal: "):
        replace(SMOKE, **change)


def test_the_full_variant_is_a_mixture_of_half_a_million_parameters():
    config = study.get_config()
    assert config.model.moe_layers and config.compare_at == 150
    shapes = jax.tree.leaves(study.spec(config.model).replace(mtp=()))
    assert 0.4e6 < sum(spec.size for spec in shapes) < 0.8e6
