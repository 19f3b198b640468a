"""Gradients against differences of the expected reward, routes by hand, claims that can fail."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from c2 import models
from c2.config import ConfigError
from c2.models import moe
from c2.rl.replay import ReplayConfig
from experiments import router_replay as study
from experiments import router_replay_arms as arms
from experiments.study import Run

SMOKE = study.get_config("smoke")
EXPERTS, TOP_K = arms.TRAINER.moe.experts, arms.TRAINER.moe.top_k


@pytest.fixture(autouse=True)
def compile_fast():
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def params_and_tokens():
    params = models.init(jax.random.key(0, impl="rbg"), arms.TRAINER)
    return params, next(arms.excerpts(SMOKE, np.random.default_rng(0)))


def routes(rows=50, seed=0):
    rng = np.random.default_rng(seed)
    shape = rows, 4, arms.TRAINER.moe_layers, EXPERTS
    return rng.random(shape).argsort(-1)[..., :TOP_K].astype(np.int16)


def test_wrong_experts_are_others_and_no_row_names_one_twice():
    clean = routes()
    changed, wrong = arms.with_wrong(clean, 0.1, np.random.default_rng(1))
    assert abs(wrong.mean() - 0.1) < 0.03
    np.testing.assert_array_equal(changed[~wrong], clean[~wrong])
    for row, old, where in zip(
        *(x.reshape(-1, TOP_K) for x in (changed, clean, wrong)), strict=True
    ):
        assert len(set(row)) == TOP_K and set(row) <= set(range(EXPERTS))
        assert not set(row[where]) & set(old)
    assert len(set(changed[wrong])) == EXPERTS


def test_rows_are_lost_as_a_whole_each_by_itself():
    clean = routes()
    fewer = arms.with_missing(clean, 0.3, np.random.default_rng(1))
    lost = fewer == moe.OWN_ROUTE
    assert abs(lost.mean() - 0.3) < 0.05
    assert (lost.all(-1) == lost.any(-1)).all()
    assert (lost.any((-1, -2)) != lost.all((-1, -2))).any()  # a token, in some of its layers
    np.testing.assert_array_equal(fewer[~lost], clean[~lost])


@pytest.mark.parametrize("mode", ["none", "strict", "filter"])
def test_the_arms_are_the_modes_of_the_learner(mode):
    cfg = arms.TRAINER
    layer = jax.tree.map(lambda w: w[0], params_and_tokens()[0].moe.moe)
    rng = np.random.default_rng(0)
    x, given = rng.normal(size=(50, 4, cfg.hidden)).astype(np.float32), routes()[:, :, 0]
    real = np.ones(x.shape[:2], bool)
    slack = SMOKE.arms[{"filter": arms.FILTER}.get(mode, mode)]
    out, used = jax.jit(moe.moe, static_argnames="cfg")(x, layer, real, given, cfg=cfg, slack=slack)
    experts = jax.jit(ReplayConfig(mode=mode).experts(), static_argnums=4)
    expected, theirs = experts(x, layer, real, given, cfg)
    np.testing.assert_array_equal(np.sort(used), np.sort(theirs))
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.slow  # compiles the model's gradient, as all below that are marked
@pytest.mark.parametrize("part", ["", "embed", "router", "down", "head"])
def test_the_on_policy_gradient_descends_from_the_expected_reward(part):
    """Against differences of the probability that the text goes on as it does."""
    params, tokens = params_and_tokens()
    gradient, out = arms.on_policy(params, tokens, arms.TRAINER)
    direction = jax.tree.map_with_path(
        lambda path, g: g * (part in jax.tree_util.keystr(path)), gradient
    )
    length = optax.tree.norm(direction)
    assert length > 1e-6
    zeros = np.zeros_like(out.log_p)

    def reward(distance):
        moved = jax.tree.map(lambda p, d: p + distance * d / length, params, direction)
        # with the same experts: where others are chosen, the reward jumps
        rest = moved, tokens, out.routes, math.inf, zeros, zeros
        log_p = arms.learn(*rest, arms.TRAINER)[1].log_p
        return np.exp(np.take_along_axis(log_p, tokens[:, 1:, None], -1), dtype=float).mean()

    slope = (reward(0.003) - reward(-0.003)) / 0.006
    np.testing.assert_allclose(slope, -length, rtol=0.01)


@pytest.mark.slow
def test_a_sampler_that_is_the_trainer_has_no_mismatch(monkeypatch):
    monkeypatch.setattr(arms, "SAMPLER", arms.TRAINER)
    params, tokens = params_and_tokens()
    samples = [arms.sampled(params, tokens, np.random.default_rng(0))]
    clean = samples[0].routes
    wrong, where = arms.with_wrong(clean, 0.2, np.random.default_rng(1))
    fewer = arms.with_missing(clean, 0.2, np.random.default_rng(1))
    of = functools.partial(arms.Condition, params, exact=samples[0].gradient)
    nothing = np.zeros(clean.shape, bool)
    for slack in (0.0, math.inf):
        for given in (clean, fewer):
            same = arms.train(of(routes=[given], wrong=[nothing]), samples, slack)
            assert same.gaps.max() < 1e-4 and same.error < 1e-4 and same.cosine > 0.9999
            np.testing.assert_allclose(same.missing, (given[..., 0] < 0).mean(), rtol=1e-6)
            assert same.replaced == same.lost == 0 and math.isnan(same.found)
    strict = arms.train(of(routes=[wrong], wrong=[where]), samples, math.inf)
    assert strict.p99 > 0.01 and strict.error > 0.01 and strict.replaced == strict.found == 0
    own = arms.train(of(routes=[wrong], wrong=[where]), samples, 0.0)
    assert own.gaps.max() < 1e-4 and own.found == 1 and own.lost == 0
    np.testing.assert_allclose(own.replaced, where.mean(), rtol=1e-6)


@pytest.mark.slow
def test_smoke_variant_runs_to_a_result(tmp_path):
    result = study.run(SMOKE, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert all(np.isfinite(claim.measured) for claim in result.claims)
    (figure,) = result.figures
    assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    (rows,) = result.tables.values()
    assert len(rows) == len(arms.names(SMOKE)) * len(SMOKE.arms)
    by_arm = {row["replay"]: row for row in rows if row["routes"] == "1% wrong"}
    replaced = {arm: row["experts replaced"] for arm, row in by_arm.items()}
    assert replaced["strict"] == 0 < replaced[arms.FILTER]
    assert by_arm["none"]["of wrong ones"] > 0.9


def outcomes(strict: float, filtered: float, found: float = 1.0):
    """Measurements in which no replay has a mismatch of 1."""

    def outcome(size: float) -> arms.Outcome:
        return arms.Outcome(np.full(9, size), size, 1 - size, 0, 0, found, 1 - found)

    sizes = dict.fromkeys(SMOKE.arms, filtered) | {"none": 1.0, "strict": strict}
    found = {arm: [outcome(size)] for arm, size in sizes.items()}
    return dict.fromkeys(arms.names(SMOKE), found)


def test_each_claim_can_hold_and_fail():
    sound = outcomes(0.1, 0.1)
    wrong = arms.names(SMOKE)[1]
    good = study.judge(SMOKE, sound | {wrong: outcomes(0.5, 0.1)[wrong]})
    assert [claim.verdict for claim in good] == ["shown"] * len(good)
    bad = study.judge(SMOKE, outcomes(0.9, 1.1, found=0.5))
    assert [claim.verdict for claim in bad] == ["not shown"] * len(bad)


def test_p99_and_the_worst_seed_count():
    clean = outcomes(0.1, 0.2)["clean"]
    (other,) = clean["none"]
    assert other._replace(gaps=np.arange(101)).p99 == 99
    found = {"clean": {arm: [*seeds, other] for arm, seeds in clean.items()}}
    assert study.ratio(found, "clean", "strict", "none", "p99") == 1


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("seeds", {"seeds": 0}),
        ("pretraining", {"pretraining": -1}),
        ("wrong", {"wrong": 1.0}),
        ("missing", {"missing": 0.0}),
        ("rates", {"rates": ()}),
        ("slacks", {"slacks": (0.1,)}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}.*legal"):
        dataclasses.replace(SMOKE, **change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: full, smoke"):
        study.get_config("huge")
