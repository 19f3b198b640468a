"""What rollouts did, demonstrations with calls made together, claims, and one run of all stages."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest
from rich.console import Console

from c2.agent.chat import ByteTokenizer
from c2.config import ConfigError
from c2.records import Effort
from c2.rl import simulated
from c2.rl.environments import EnvironmentConfig
from c2.rl.journal import Journal
from c2.rl.rewards import LengthPenaltyConfig
from c2.rl.schedule import Job
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.minirepo import policies
from c2.sandbox.tools.schema import Call
from experiments import conduct, demonstrations
from experiments import length_penalty_rl as study
from experiments.demonstrations import DemonstrationsConfig
from experiments.study import Run
from launch.main import run_main

MINI, SMOKE = (study.get_config(variant) for variant in study.VARIANTS)


def rollout(*calls, correct=1.0, failed=False):
    """A rollout whose turns have so many calls."""
    turns = [{"event": "turn", "role": "assistant", "text": ""} for _ in calls]
    for turn, number in zip(turns, calls, strict=True):
        if number:
            turn["calls"] = [{"id": str(i), "name": "x", "arguments": {}} for i in range(number)]
    first, last = {"event": "message", "role": "user", "text": ""}, {"event": "end", "stop": "done"}
    return dataclasses.replace(
        simulated.rollout("t", 0, (0,)), correct=math.nan if failed else correct, reward=correct,
        outcome="infrastructure_failure" if failed else "scored",
        effort=Effort(turns=len(calls), calls=sum(calls)), transcript=(first, *turns, last),
    )  # fmt: skip


def test_measures_of_a_group():
    group = [rollout(1, 2, 0), rollout(1, 0, correct=0.0), rollout(3, 3, 3, failed=True)]
    found = conduct.measure(group)
    size = group[0].sampled_tokens
    expected = {"tokens": size, "turns": 2.5, "calls": 4 / 3, "parallel": 1 / 3, "correct": 0.5}
    assert found == pytest.approx(expected) and set(found) == set(conduct.MEASURES)
    silent = conduct.measure([rollout(0)])
    assert silent["turns"] == 1 and math.isnan(silent["calls"]) and math.isnan(silent["parallel"])


def test_measures_come_from_the_journal_step_by_step(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        for group, calls in enumerate(((1, 1), (2, 2), (1, 2), (9,))):
            journal.begun(group, f"t{group}", 0)
            for sample in range(2):
                journal.scored(Job(group, sample, 1), rollout(*calls))
        journal.batch([1, 0])
        journal.batch([2])  # the last group is in no step
    first, second = conduct.by_step(tmp_path / "journal")
    assert first["parallel"] == {"t1": 1, "t0": 0} and second["parallel"] == {"t2": 0.5}
    assert conduct.joined([first, second], "calls") == {"t1": 2, "t0": 1, "t2": 1.5}


def test_calls_are_made_together_where_no_answer_is_needed():
    """A script and its answers: every call gets its own, and tests are heeded."""

    def script():
        answers.append((yield Call("grep", {})))
        answers.append((yield Call("read_file", {})))
        answers.append((yield Call("edit_lines", {"first": 2})))
        answers.append((yield Call("edit_lines", {"first": 1})))
        if (yield Call("run_tests")) != "pass":
            yield Call("edit_lines", {"first": 3})

    def play(share, tested):
        agent, turns = policies.together(script(), random.Random(0), share), []
        turn = next(agent)
        while True:
            turns.append([call.name for call in turn])
            try:
                turn = agent.send([tested if c.name == "run_tests" else c.name for c in turn])
            except StopIteration:
                return turns

    answers = []
    looked, edits = [["grep"], ["read_file"]], ["edit_lines", "edit_lines"]
    assert play(1.0, "pass") == [*looked, [*edits, "run_tests"]]
    assert play(1.0, "fail") == [*looked, [*edits, "run_tests"], ["edit_lines"]]
    assert play(0.0, "pass") == [*looked, ["edit_lines"], ["edit_lines"], ["run_tests"]]


def test_tests_join_a_file_that_is_read_but_an_edit_does_not():
    task = minirepo.generate(7, "operator")
    agent = policies.together(policies.expert(task, test_before=True), random.Random(0), 1.0)
    assert [call.name for call in next(agent)] == ["read_file", "run_tests"]
    assert [call.name for call in agent.send(["", "fail"])] == ["edit_lines", "run_tests"]
    with pytest.raises(StopIteration):
        agent.send(["", "pass"])


class Words(ByteTokenizer):
    """As much of a tokenizer as demonstrations take."""

    dtype = np.uint16

    def to_json(self):
        return ""


def shown(together):
    config = DemonstrationsConfig(
        count=40, families=("operator",), slips=0.2, test_after=1.0, together=together
    )
    return demonstrations.make_store(config, Words(), EnvironmentConfig(syntax="plain"))


def calls_of_turns(store):
    texts = [Words().decode(store.tokens[a:b].tolist())
             for a, b in zip(store.offsets, store.offsets[1:], strict=False)]  # fmt: skip
    turns = [turn for text in texts for turn in text.split("<|assistant|>")[1:]]
    return np.array([turn.split("<|turn_end|>")[0].count("<|call|>") for turn in turns])


def test_demonstrations_have_as_many_calls_whether_or_not_they_are_made_together():
    without, some, always = (calls_of_turns(shown(share)) for share in (0.0, 0.5, 1.0))
    assert set(without) == {0, 1} and {0, 1, 2} <= set(some)
    assert 0.2 < (some > 1).sum() / (always > 1).sum() < 0.8
    tests = (always > 1).sum()
    assert tests >= 40  # of every conversation, those behind its edit
    assert len(always) < len(some) < len(without)


def steps(rng, tokens, parallel, groups=10):
    """A run of four steps whose last two are like this; before, both runs are the same."""

    def step(n, tokens, share):
        tasks = [f"t{n}/{i}" for i in range(groups)]
        means = {"tokens": tokens, "turns": tokens / 10, "calls": 1 + share, "parallel": share,
                 "correct": 0.5}  # fmt: skip
        return {name: {task: m * rng.uniform(0.8, 1.2) for task in tasks}
                for name, m in means.items()}  # fmt: skip

    return [step(n, *((tokens, parallel) if n >= 2 else (30, 0.1))) for n in range(4)]


def scores(rng, chance, tasks=200):
    return {"combination": {f"t{i}": (rng.random(8) < chance).astype(float).tolist()
                            for i in range(tasks)}}  # fmt: skip


CONFIG = dataclasses.replace(MINI, last=2)


def made_up(with_penalty, without=(30, 0.1, 0.5)):
    """Two runs of three seeds from (tokens, share of parallel turns, pass rate)."""
    rng = np.random.default_rng(0)
    arms = {"without": without, "with": with_penalty}
    done = {arm: [steps(rng, *x[:2]) for _ in range(3)] for arm, x in arms.items()}
    found = {arm: [scores(rng, x[2]) for _ in range(3)] for arm, x in arms.items()}
    return done, {"start": [scores(rng, 0.3) for _ in range(3)], **found}


def verdicts(*found):
    return [claim.verdict == "shown" for claim in study.judge(CONFIG, *found)]


def test_claims_hold_for_what_they_say_and_for_nothing_else():
    assert verdicts(*made_up((20, 0.4, 0.5))) == [True] * 5
    assert verdicts(*made_up((30, 0.1, 0.5))) == [False, False, False, False, True]
    assert verdicts(*made_up((40, 0.02, 0.5))) == [False, False, False, False, True]
    assert verdicts(*made_up((5, 0.1, 0.3))) == [True, True, False, False, False]  # gives up
    assert not verdicts(*made_up((30, 0.1, 0.0), without=(30, 0.1, 0.0)))[-1]  # of nothing
    both = made_up((20, 0.4, 0.5), without=(30, 0.4, 0.5))  # rewards alone teach it as well
    assert verdicts(*both) == [True, True, False, True, True]


def test_a_result_has_a_figure_a_table_and_words(tmp_path):
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    done, found = made_up((20, 0.4, 0.5))
    result = study.summarise(CONFIG, done, found, run)
    (figure,), (rows,) = result.figures, result.tables.values()
    assert (tmp_path / figure.path).stat().st_size > 10_000
    assert [row[""] for row in rows][-1] == "pass rate on held-out tasks"
    values = [float(rows[3][stage].split()[0]) for stage in ("start", "without", "with")]
    np.testing.assert_allclose(values, [0.1, 0.1, 0.4], rtol=0.1)
    tasks = [x for seed in found["with"] for x in seed["combination"].values()]
    assert rows[-1]["with"].startswith(f"{np.mean(tasks):.3f} (")
    assert rows[-1]["with"] in result.summary


def test_the_two_runs_differ_in_the_penalty_alone():
    rl = MINI.post_training.reinforcement
    used = study.penalised(rl, MINI.penalty)
    assert used != rl and used.environments.rewards.length == MINI.penalty
    assert study.penalised(used, LengthPenaltyConfig()) == rl
    assert rl.tasks.oversampling.start == 1  # else they would not have the same tasks


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("last", {"last": 0}),
        ("last", {"last": 10_000}),
        (r"penalty\.price", {"penalty": LengthPenaltyConfig()}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}.*legal"):
        dataclasses.replace(MINI, **change)


@pytest.mark.slow
def test_every_stage_runs_once_and_says_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setenv("C2_CACHE_DIR", str(tmp_path / "cache"))
    words = ["--config=experiments/length_penalty_rl.py:smoke", f"--workdir={tmp_path / 'run'}"]
    assert run_main(["launch/main.py", *words, "--services=inside"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert len(result["claims"]) == 5 and len(result["figures"]) == 1
    (rows,) = result["tables"].values()
    assert len(rows) == len(conduct.MEASURES) + 1
    for arm in ("start", "without", "with"):
        assert (tmp_path / "run" / "seed0" / arm / "scores.json").exists()
