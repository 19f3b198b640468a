"""Levels of pretraining, what is claimed of made-up points, and one run of every stage."""

import dataclasses
import json

import numpy as np
import pytest
import scipy.stats
from rich.console import Console

from c2.config import ConfigError
from experiments import agents
from experiments import perplexity_vs_rl as study
from experiments.perplexity_vs_rl import Points
from experiments.study import Run
from launch.main import run_main

MINI, SMOKE = (study.get_config(variant) for variant in study.VARIANTS)

BITS = np.array([[3.0, 2.5, 2.0], [3.1, 2.6, 2.1], [2.9, 2.4, 1.9]])


def points(trained, start=0.1):
    return Points(BITS, np.full(BITS.shape, start), np.asarray(trained, float))


def verdicts(found):
    return [claim.verdict == "shown" for claim in study.judge(found)]


def test_claims_hold_for_points_on_a_line_and_not_for_any_others():
    assert verdicts(points(1 - BITS / 4)) == [True] * 4
    assert verdicts(points(BITS / 4)) == [True, False, False, False]
    flat = np.array([[0.5, 0.4, 0.45], [0.4, 0.5, 0.41], [0.45, 0.41, 0.5]])
    assert verdicts(points(flat)) == [True, False, False, False]
    seeds_alone = np.repeat([[0.5], [0.3], [0.7]], 3, 1)  # of each as good as its bits are few
    assert verdicts(points(seeds_alone)) == [True, False, False, False]


def test_what_the_start_brings_is_not_what_rewards_add():
    line = 1 - BITS / 4
    assert verdicts(points(line + 0.1, start=line)) == [True, True, True, False]
    noise = 1e-15 * np.array([[0, 1, 2]] * 3)
    assert verdicts(points(line + 0.1, start=line - noise)) == [True, True, True, False]


def test_a_level_that_learned_nothing_from_longer_pretraining_shows():
    stuck = points(1 - BITS / 4)._replace(bits=BITS[:, [0, 0, 2]])
    assert not verdicts(stuck)[0]


def test_pretraining_is_stretched_phase_by_phase():
    config = MINI.pretraining
    for length in MINI.lengths:
        longer = study.stretched(config, length, seed=5)
        assert longer.seed == 5
        for old, new in zip(config.phases, longer.phases, strict=True):
            assert new.steps == max(2, round(length * old.steps))
            assert new.learning_rate.warmup_steps < new.steps
            same = {"steps": old.steps, "learning_rate": old.learning_rate}
            assert dataclasses.replace(new, **same) == old
    ratios = np.divide(MINI.lengths[1:], MINI.lengths[:-1])
    np.testing.assert_allclose(ratios, ratios[0])  # log-spaced


def test_all_levels_of_a_seed_have_the_same_post_training(tmp_path, monkeypatch):
    """The loop with its parts made up: which base goes where, and what becomes of its scores."""
    config = dataclasses.replace(SMOKE, seeds=2)
    seen = []

    def pretrain(pretraining, folder, run):
        steps = sum(phase.steps for phase in pretraining.phases)
        return agents.Base(None, None, folder, 8 / steps)

    def post_train(after, model, params, tokenizer, folder, run):
        seen.append((after.reinforcement.seed, after))
        where = str(folder.relative_to(tmp_path))
        trained = {
            "seed0/level0": 0.0,
            "seed0/level1": 0.5,
            "seed1/level0": 0.25,
            "seed1/level1": 1,
        }
        assert tokenizer == folder / "pretraining"
        return {
            stage: {"combination": {"t": [value, value]}, "family": {"u": [value]}}
            for stage, value in (("start", 0.0), ("reinforcement", trained[where]))
        }

    monkeypatch.setattr(study.agents, "try_sandboxes", lambda _: None)
    monkeypatch.setattr(study.agents, "pretrain", pretrain)
    monkeypatch.setattr(study, "post_train", post_train)
    result = study.run(config, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert [seed for seed, _ in seen] == [0, 0, 1, 1]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    (rows,) = result.tables.values()
    assert [row["after reinforcement"] for row in rows] == [
        "0.125 (0.000 to 0.250)", "0.750 (0.500 to 1.000)",
    ]  # fmt: skip
    bits = np.array([8 / sum(p.steps for p in study.stretched(SMOKE.pretraining, x, 0).phases)
                     for x in SMOKE.lengths])  # fmt: skip
    rho = scipy.stats.spearmanr(np.tile(bits, 2), [0, 0.5, 0.25, 1]).statistic
    assert result.metrics["rank_correlation"] == pytest.approx(rho)
    (figure,) = result.figures
    assert (tmp_path / figure.path).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("lengths", {"lengths": (1.0,)}),
        ("lengths", {"lengths": (1.0, 0.5)}),
        ("lengths", {"lengths": (0.0, 0.5)}),
        ("seeds", {"seeds": 10}),
        ("seeds", {"seeds": 0}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}.*legal"):
        dataclasses.replace(MINI, **change)


@pytest.mark.slow
def test_every_stage_runs_once_and_says_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setenv("C2_CACHE_DIR", str(tmp_path / "cache"))
    words = ["--config=experiments/perplexity_vs_rl.py:smoke", f"--workdir={tmp_path / 'run'}"]
    assert run_main(["launch/main.py", *words, "--services=inside"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    chances = [claim for claim in result["claims"] if "chance" in claim["statement"]]
    assert [claim["verdict"] for claim in chances] == ["not shown"] * 2
    (rows,) = result["tables"].values()
    assert [row["lengths of pretraining"] for row in rows] == ["0.25", "1"]
    assert (tmp_path / "run" / result["figures"][0]["path"]).stat().st_size > 10_000
