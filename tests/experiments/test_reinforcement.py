"""Reinforcement learning as studies use it: its tasks, its control, its scores, and a whole run."""

import dataclasses
import io
import math

import jax
import numpy as np
import pytest
from rich.console import Console

from c2 import models
from c2.agent.harness import HarnessConfig
from c2.config import ConfigError
from c2.data import tokenizer as tokenizers
from c2.losses.config import PolicyGradientConfig
from c2.models import presets
from c2.records import Effort, Group
from c2.rl import simulated
from c2.rl.controller import ControllerConfig
from c2.rl.environments import EnvironmentConfig
from c2.rl.sampling_weights import OversamplingConfig
from c2.rl.schedule import ScheduleConfig
from c2.rl.training import TrainingConfig
from c2.rollout.config import EngineConfig
from c2.sandbox.protocol import SandboxError
from c2.sandbox.tasks import minirepo
from c2.training.metrics import read_rows
from experiments import reinforcement, repair_tasks
from experiments.reinforcement import RLConfig
from experiments.repair_tasks import Prompts, TasksConfig
from experiments.study import Run


def rollout(reward, *, failed=False):
    done = simulated.rollout("t", 0, (0,))
    outcome = "infrastructure_failure" if failed else "scored"
    return dataclasses.replace(done, reward=math.nan if failed else reward, outcome=outcome)


def test_tasks_differ_and_do_not_depend_on_what_came_before_unless_asked():
    config = TasksConfig(families=("operator", "constant"))
    ids = [Prompts(config, 10, 4)(i) for i in range(40)]
    prompts = Prompts(config, 10, 4)
    assert [prompts(i) for i in reversed(range(40))][::-1] == ids and len(set(ids)) == 40
    assert {repair_tasks.family(task) for task in ids} == {"operator", "constant"}
    assert all(minirepo.split(minirepo.from_id(task)) == "train" for task in ids[:10])


def test_hard_kinds_come_more_often_late_in_training():
    config = TasksConfig(
        families=("operator", "constant"), oversampling=OversamplingConfig(start=0.5, power=2.0)
    )
    prompts = Prompts(config, 100, 4)
    for family, turns in (("operator", 2), ("constant", 6)):
        spent = dataclasses.replace(rollout(1.0), effort=Effort(turns=turns, thinking_tokens=1))
        prompts.note(f"minirepo/{family}/1/0", spent)
    share = [
        np.mean(["constant" in prompts(i) for i in range(start, start + 100)]) for start in (0, 300)
    ]
    assert abs(share[0] - 0.5) < 0.2 and share[1] > 0.6


def test_held_out_tasks_are_of_their_splits():
    found = repair_tasks.held_out(TasksConfig(held_out=dict.fromkeys(minirepo.SPLITS, 3)))
    assert set(found) == set(minirepo.SPLITS)
    for part, ids in found.items():
        assert [minirepo.split(minirepo.from_id(task)) for task in ids] == [part] * 3


def test_shuffling_keeps_all_rewards_and_leaves_failures_alone():
    groups = [
        Group(task=f"t{g}", rollouts=tuple(rollout(10.0 * g + i, failed=i == 1) for i in range(4)))
        for g in range(3)
    ]
    mixed = reinforcement.shuffled(groups, seed=1)
    before, after = (np.array([g.rewards for g in x]) for x in (groups, mixed))
    np.testing.assert_array_equal(np.isnan(before), np.isnan(after))
    assert sorted(before[before == before]) == sorted(after[after == after])
    assert not np.array_equal(before, after, equal_nan=True)
    again = reinforcement.shuffled(groups, seed=1)
    np.testing.assert_array_equal(after, [g.rewards for g in again])


def test_scores_leave_failures_out():
    found = reinforcement.score({"a": [1, 0, math.nan, 0], "b": [0, 0, 0, 0], "c": [math.nan] * 4})
    assert found == {"pass@1": pytest.approx(1 / 6), "best": 0.5}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("families", ("x",)),
        ("held_out", {"x": 1}),
        ("held_out", {"train": 0}),
        ("families", ()),
        ("level", 9),
    ],
)
def test_tasks_that_there_are_not_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"{field}[.a-z]*: .*legal"):
        TasksConfig(**{field: value})


@pytest.mark.slow
def test_a_run_trains_evaluates_shows_and_does_not_begin_again(tmp_path):
    texts = [text for i in range(30) for text in minirepo.draw(i).files.values()]
    tokenizer = tokenizers.train(texts, 400)
    tokenizer.save(tmp_path / "tokenizer.json")
    model = dataclasses.replace(
        presets.get("tiny_mla_moe"), vocab=512, hidden=32, layers=2, dense_intermediate=64
    )
    config = RLConfig(
        controller=ControllerConfig(
            schedule=ScheduleConfig(steps=2, groups=2, group=3, slots=6, staleness=1), eval_every=2
        ),
        training=TrainingConfig(
            objective=PolicyGradientConfig(tokens_per_rollout=64), context=512, rows=2,
            inspect_every=1,
        ),
        engine=EngineConfig(slots=8, capacity=512, prefill_rows=4, prefill_chunk=64, steps=8),
        environments=EnvironmentConfig(
            harness=HarnessConfig(max_turns=3, turn_tokens=24, total_tokens=72, context=500),
            syntax="plain",
            ready=2,
        ),
        tasks=TasksConfig(held_out={"train": 1, "family": 1}),
        samples=2,
    )  # fmt: skip
    params = models.init(jax.random.key(0), model)
    told = io.StringIO()
    run = Run(workdir=tmp_path, console=Console(file=told))
    args = (config, model, params, tmp_path / "tokenizer.json", tmp_path / "rl", run)
    found = reinforcement.train(*args)
    assert set(found) == {0, 2} and set(found[2]) == {"train", "family"}
    assert [len(x) for x in found[2]["train"].values()] == [2]
    lines = read_rows(tmp_path / "rl" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["staleness"] <= 1 and line["scored"] >= 6 for line in lines)
    assert "step 2 of 2 | reward" in told.getvalue() and "version 2 | train pass" in told.getvalue()
    assert (tmp_path / "rl" / "trajectories.html").stat().st_size > 8000
    assert reinforcement.train(*args) == found  # nothing is left to do
    assert read_rows(tmp_path / "rl" / "metrics.jsonl") == lines


def test_a_machine_without_sandboxes_is_told_before_anything_else_runs(monkeypatch):
    reinforcement.try_sandboxes(EnvironmentConfig())

    def broken(_):
        raise SandboxError("user namespaces are switched off")

    monkeypatch.setattr(reinforcement, "Pool", broken)
    with pytest.raises(
        ConfigError, match=r"^pool\.backend: 'zygote' does not work here: user name"
    ):
        reinforcement.try_sandboxes(EnvironmentConfig())
