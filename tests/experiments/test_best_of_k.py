"""What is claimed of made-up scores, what is drawn of them, and one run of every stage."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from c2.training.metrics import MetricsLog
from experiments import agents
from experiments import best_of_k as study
from experiments.study import Run
from launch.main import run_main

ATTEMPTS = 8


def policy(chances, seed):
    """Attempts at tasks of two splits with these chances."""
    rng = np.random.default_rng(seed)
    made = {f"t{i}": (rng.random(ATTEMPTS) < p).astype(float).tolist()
            for i, p in enumerate(chances)}  # fmt: skip
    names = list(made)
    half = len(names) // 2
    return {
        "combination": {name: made[name] for name in names[:half]},
        "family": {name: made[name] for name in names[half:]},
    }


def stages(start, control, trained, seeds=3):
    """Scores of policies that solve each of 80 tasks with these chances."""
    chances = {"start": start, "fine_tuning": control, "reinforcement": trained}
    return [
        {
            name: policy(np.resize(p, 80), 10 * seed + i)
            for i, (name, p) in enumerate(chances.items())
        }
        for seed in range(seeds)
    ]


def verdicts(*chances):
    return [claim.verdict == "shown" for claim in study.judge(stages(*chances), ATTEMPTS)]


def test_claims_tell_ability_from_sharpening_and_from_more_demonstrations():
    assert verdicts(0.1, 0.1, 0.5) == [True] * 4
    assert verdicts(0.1, 0.5, 0.5) == [True, True, False, False]
    assert verdicts(0.1, 0.1, 0.1) == [False] * 4
    # half of the tasks always, the others never: a larger mean, fewer tasks that are ever solved
    assert verdicts(0.3, 0.3, (1.0, 0.0)) == [True, False, True, False]


def test_a_seed_that_disagrees_undoes_a_claim():
    found = stages(0.1, 0.1, 0.5)
    found[1] = {**found[1], "start": found[1]["reinforcement"], "reinforcement": found[1]["start"]}
    assert {claim.verdict for claim in study.judge(found, ATTEMPTS)} == {"not shown"}


def test_levels_are_the_mean_over_all_choices_of_attempts():
    found = stages(0.3, 0.2, 0.4, seeds=2)
    for k in (1, 3, ATTEMPTS):
        expected = [
            np.mean([np.mean([max(chosen) for chosen in itertools.combinations(x, k)])
                     for x in seed["reinforcement"]["family"].values()])
            for seed in found
        ]  # fmt: skip
        np.testing.assert_allclose(study.levels(found, "reinforcement", "family", k), expected)
    everything = [np.mean([x for tasks in seed["start"].values() for x in tasks.values()])
                  for seed in found]  # fmt: skip
    np.testing.assert_allclose(study.levels(found, "start", study.ALL, 1), everything)


def test_a_result_has_figures_a_table_and_words(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 5):
            log.write(step, {"correct": step / 10, "best_of_group": step / 5})
    curve = study.training_curve(tmp_path)
    np.testing.assert_allclose(curve, [[0.1, 0.2, 0.3, 0.4], [0.2, 0.4, 0.6, 0.8]])
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    result = study.summarise(stages(0.1, 0.2, 0.5), [curve, curve + 0.1, curve], ATTEMPTS, run)
    assert [figure.path for figure in result.figures] == [
        "figures/best_of_k.png", "figures/training.png",
    ]  # fmt: skip
    assert all((tmp_path / figure.path).stat().st_size > 10_000 for figure in result.figures)
    (rows,) = result.tables.values()
    assert [(row["split"], row["tasks"]) for row in rows] == [
        ("combination", 40), ("family", 40), ("all", 80),
    ]  # fmt: skip
    assert abs(result.metrics["reinforcement/best_of_1"] - 0.5) < 0.05
    assert abs(result.metrics["reinforcement/best_of_8"] - (1 - 0.5**8)) < 0.02
    assert f"{result.metrics['start/best_of_1']:.2f} and" in result.summary


def test_the_comparison_needs_its_control_and_seeds_differ(tmp_path):
    config = study.get_config("smoke")
    after = dataclasses.replace(config.post_training, controls=())
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    with pytest.raises(ConfigError, match=r"post_training\.controls.*'fine_tuning'"):
        study.run(dataclasses.replace(config, post_training=after), run)
    with pytest.raises(ConfigError, match=r"^seeds: 0; legal"):
        dataclasses.replace(config, seeds=0)
    one, two = (agents.seeded(config.post_training, seed) for seed in (1, 2))
    for part in ("demonstrations", "fine_tuning", "reinforcement"):
        assert (getattr(one, part).seed, getattr(two, part).seed) == (1, 2)
    shown = [x.demonstrations.seed for post in (one, two) for x in (post, post.before)]
    assert len(set(shown)) == 4
    tasks = [x.reinforcement.tasks for x in (one, two)]
    assert dataclasses.replace(tasks[0], seed=2) == tasks[1] != tasks[0]


@pytest.mark.slow
def test_every_stage_runs_once_and_says_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setenv("C2_CACHE_DIR", str(tmp_path / "cache"))
    words = ["--config=experiments/best_of_k.py:smoke", f"--workdir={tmp_path / 'run'}"]
    assert run_main(["launch/main.py", *words, "--services=inside"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [claim["verdict"] for claim in result["claims"]] == ["not shown"] * 4
    assert len(result["figures"]) == 2
    (rows,) = result["tables"].values()
    assert [row["split"] for row in rows] == ["combination", "family", "all"]
    for stage in ("fine_tuning", "more_fine_tuning"):
        assert (tmp_path / "run" / "seed0" / stage / "checkpoints").is_dir()
