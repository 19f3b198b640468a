"""Post-training: what its stages cost, what is claimed of their scores, and fine-tuning."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from c2 import models
from c2.config import ConfigError
from c2.data.store import from_documents
from c2.models import presets
from c2.rl import simulated
from c2.rl.journal import Journal
from c2.rl.schedule import Job
from c2.training.loop import LoopConfig
from c2.training.metrics import MetricsLog
from experiments import post_training, post_training_configs, post_training_report
from experiments.fine_tuning import FineTuningConfig, fine_tune
from experiments.post_training_report import Mean, gain, worth
from experiments.study import Run

SMOKE = post_training_configs.smoke()


def scores(**tasks):
    return {"combination": tasks}


def test_worth_is_the_expected_best_of_k_and_leaves_failures_out():
    found = scores(a=[1, 0, 0, 0], b=[math.nan, 1, 1], c=[0, 0])
    assert worth(found, 1) == {"a": 0.25, "b": 1, "c": 0}
    assert worth(found, 2) == {"a": 0.5, "b": 1, "c": 0}
    assert worth(found, 3) == {"a": 0.75}


def test_gains_are_paired_by_task():
    before = scores(a=[0, 0], b=[1, 0], c=[1, 1], only=[1, 1])
    after = scores(a=[1, 0], b=[1, 1], c=[1, 1], other=[1, 1])
    mean = gain(after, before, 1)
    np.testing.assert_allclose(mean, (1 / 3, np.std([0.5, 0.5, 0], ddof=1) / 3**0.5))
    np.testing.assert_allclose(mean.errors, mean.value / mean.error)
    assert gain(before, before, 1).errors == 0
    assert math.isnan(Mean.of([1.0]).errors)


def verdicts(start, trained, control):
    found = {"start": start, "reinforcement": trained, "shuffled": control, "fine_tuning": control}
    columns = {"staleness": (np.array([1, 2]), np.array([0, 1]))}
    claims = post_training_report.judge(SMOKE, found, columns, 2)
    return [claim.verdict for claim in claims]


def test_claims_hold_for_a_gain_that_the_controls_lack_and_not_for_noise():
    rng = np.random.default_rng(0)

    def policy(chance):
        return scores(**{f"t{i}": (rng.random(8) < chance).astype(float).tolist()
                         for i in range(40)})  # fmt: skip

    start, trained, control = policy(0.1), policy(0.6), policy(0.1)
    assert verdicts(start, trained, control) == ["shown"] * 7
    up, best, flat, flat_best, beats, beats_best, stale = verdicts(start, control, trained)
    assert (up, best, beats, beats_best) == ("not shown",) * 4
    assert (flat, flat_best, stale) == ("not shown", "not shown", "shown")


def test_every_token_counts_a_forward_pass_and_those_learned_from_a_whole_step(tmp_path):
    rollout = simulated.rollout("t", 0, (0,))
    size = sum(len(link.tokens) for link in rollout.generations)
    with Journal(tmp_path / "journal") as journal:
        for group, rewards in enumerate(((1.0, 0.0), (0.0, 0.0), (1.0, 1.0))):
            journal.begun(group, f"t{group}", 0)
            for sample, reward in enumerate(rewards):
                journal.scored(Job(group, sample, 1), dataclasses.replace(rollout, reward=reward))
        journal.batch([0, 1])  # the third group is in no step
    found = post_training.equivalent_tokens(tmp_path / "journal")
    assert found == pytest.approx(4 * size / 3 + 2 * size)


def test_the_control_goes_on_for_as_many_tokens():
    config = post_training_configs.mini()
    phase = post_training.longer(config.fine_tuning, 60_000, rate=1e-3).phase
    assert phase.steps == round(60_000 / (phase.batch * phase.context))
    assert phase.learning_rate.peak == 1e-3
    assert post_training.longer(config.fine_tuning, 1, rate=1e-3).phase.steps == 2


def test_demonstrations_must_be_able_to_hold_a_conversation():
    phase = dataclasses.replace(SMOKE.fine_tuning.phase, context=64)
    with pytest.raises(ConfigError, match=r"fine_tuning\.phase\.context: 64; legal: .*= 448"):
        dataclasses.replace(SMOKE, fine_tuning=FineTuningConfig(phase=phase))


def test_without_evaluations_there_is_nothing_to_compare():
    rl = SMOKE.reinforcement
    without = dataclasses.replace(rl.controller, eval_every=0)
    with pytest.raises(ConfigError, match=r"reinforcement\.controller\.eval_every: 0; legal"):
        dataclasses.replace(SMOKE, reinforcement=dataclasses.replace(rl, controller=without))


def test_a_result_has_figures_tables_and_words(tmp_path):
    names = (
        "correct", "best_of_group", "effort/turns", "staleness", "entropy", "mismatch",
        "flat_groups", "sampled_tokens", "tokens_per_second", "rollouts_per_second",
    )  # fmt: skip
    for stage in ("reinforcement", "shuffled"):
        with MetricsLog(tmp_path / "agent" / stage) as log:
            for step in range(1, 9):
                log.write(step, dict.fromkeys(names, 0.5))
    found = {
        stage: {"combination": {"a": [0, 1], "b": [1, 1]}, "family": {"c": [0, 0]}}
        for stage in ("start", "reinforcement", "shuffled")
    }
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    result = post_training_report.summarise(SMOKE, found, tmp_path / "agent", run)
    assert [figure.path for figure in result.figures] == [
        f"figures/{name}.png" for name in ("reinforcement", "held_out_tasks", "health")
    ]
    assert all((tmp_path / figure.path).stat().st_size > 10_000 for figure in result.figures)
    (rows,) = result.tables.values()
    assert [(row["split"], row["tasks"], row["start"]) for row in rows] == [
        ("combination", 2, "0.750 / 1.000"), ("family", 1, "0.000 / 0.000"),
        ("all", 3, "0.500 / 0.667"),
    ]  # fmt: skip
    assert "agent/reinforcement/trajectories.html" in result.summary
    assert result.metrics["start/pass"] == 0.5


def test_fine_tuning_learns_keeps_what_it_was_given_and_is_not_done_twice(tmp_path):
    model = dataclasses.replace(
        presets.get("tiny_mla_moe"), vocab=32, hidden=16, layers=2, dense_intermediate=16
    )
    params = models.init(jax.random.key(0), model)
    before = jax.tree.map(np.asarray, params)
    row = np.arange(24, dtype=np.uint16)
    documents = from_documents([(row, 4, 0)] * 8, np.uint16, "mark")
    phase = dataclasses.replace(SMOKE.fine_tuning.phase, context=24, batch=4, steps=3)
    config = FineTuningConfig(phase=phase, loop=LoopConfig(log_every=1))
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    tuned = fine_tune(config, model, params, documents, tmp_path, run)
    jax.tree.map(np.testing.assert_array_equal, params, before)
    again = fine_tune(config, model, params, documents, tmp_path, run)
    jax.tree.map(np.testing.assert_array_equal, tuned, again)

    def likelihood(params):
        logits = models.forward(params, jnp.asarray(row[None], jnp.int32), model).logits
        return float(
            jnp.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), row[1:, None], 1).sum()
        )

    assert likelihood(tuned) > likelihood(params)
    assert Path(tmp_path / "metrics.jsonl").exists()
