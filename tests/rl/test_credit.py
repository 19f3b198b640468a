"""Credit: worked examples, chains, equal groups, failures, and what is logged of them."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.agent.trace import Trace
from c2.losses.config import KLConfig, PolicyGradientConfig
from c2.records import NO_ROUTE, NO_VERSION, Completion, Effort, Generation, Group, Rollout
from c2.rl.credit import assign
from c2.rl.monitor import group_metrics

PLAIN = PolicyGradientConfig(tokens_per_rollout=8)
COUNT = itertools.count(100)


def link(mask, version=3):
    """A generation with a prompt and these tokens; all tokens of a test differ."""
    mask = np.array([False, *mask])
    return Generation(
        tokens=np.array([next(COUNT) for _ in mask], np.int32),
        loss_mask=mask,
        log_probs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, version, NO_VERSION).astype(np.int32),
        temperatures=np.ones(len(mask), np.float32),
        routes=np.zeros((len(mask), 2, 1), np.int16),
    )


def rollout(reward, *masks, **fields):
    return Rollout(
        **{
            "generations": tuple(link(mask) for mask in masks),
            "outcome": "scored",
            "stop": "done",
            "correct": float(reward > 0),
            "reward": reward,
            "effort": Effort(turns=2),
            "behaviours": {"bad_calls": 0.25},
        }
        | fields
    )


def group(*rollouts):
    return Group(task="t", rollouts=rollouts)


def lost(**fields):
    return rollout(np.nan, [True], outcome="infrastructure_failure", correct=np.nan, **fields)


def coefficients(step):
    """Weight times advantage over denominator of the trained tokens of every rollout."""
    found = {}
    for row in step.rows:
        values = row.weights * row.advantages / step.denominator
        found.setdefault(row.rollout, []).extend(values[row.weights > 0])
    return list(found.values())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0.015625, -0.015625, -0.015625, 0.015625]),
        (
            {"std_norm": True, "length_norm": "rollout"},  # GRPO
            [0.124975, -0.0624875, -0.0833167, 0.24995],
        ),
        ({"length_norm": "batch"}, [0.05, -0.05, -0.05, 0.05]),  # DAPO
    ],
)
def test_worked_example(config, expected):
    """Rewards 1, 0, 0, 1 and lengths 2, 4, 3, 1."""
    rewards, lengths = [1.0, 0.0, 0.0, 1.0], [2, 4, 3, 1]
    members = [rollout(r, [True] * n) for r, n in zip(rewards, lengths, strict=True)]
    step = assign([group(*members)], dataclasses.replace(PLAIN, **config), rollouts=4)
    for values, one, n in zip(coefficients(step), expected, lengths, strict=True):
        np.testing.assert_allclose(values, [one] * n, rtol=1e-5)


CHAINS = st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.lists(CHAINS, min_size=2, max_size=5), st.sampled_from(["constant", "rollout", "batch"]))
def test_every_sampled_token_has_its_share_once_however_a_rollout_is_cut(chains, length_norm):
    config = dataclasses.replace(PLAIN, length_norm=length_norm)
    members = [rollout(float(i), *masks) for i, masks in enumerate(chains)]
    step = assign([group(*members)], config, rollouts=len(members))
    sampled = [g.tokens[g.loss_mask] for r in members for g in r.generations]
    trained = [row.tokens[row.weights > 0] for row in step.rows]
    assert [*itertools.chain(*trained)] == [*itertools.chain(*sampled)]
    assert len(set(itertools.chain(*trained))) == sum(r.sampled_tokens for r in members)
    # the same rollouts in one piece: the same baseline, and the same for every token
    whole = [rollout(float(i), list(itertools.chain(*masks))) for i, masks in enumerate(chains)]
    twin = assign([group(*whole)], config, rollouts=len(members))
    assert coefficients(step) == coefficients(twin)


@pytest.mark.parametrize(
    ("rewards", "rows"),
    [
        ([0.0] * 8, 0),
        ([1.0] * 8, 0),
        ([0.1] * 7, 0),
        ([1.0] * 7 + [1 + 1e-9], 8),
        ([0.0, 0.5, 1.0], 3),  # one of them has the mean
    ],
)
def test_equal_groups_teach_nothing_but_count(rewards, rows):
    members = group(*(rollout(r, [True, False, True]) for r in rewards))
    step = assign([members], PLAIN, rollouts=16)
    assert len(step.rows) == rows and step.denominator == 16 * 8
    pulled = assign([members], dataclasses.replace(PLAIN, kl=KLConfig(beta=0.1)), rollouts=16)
    assert len(pulled.rows) == len(rewards)


@pytest.mark.parametrize("kind", ["policy_failure", "infrastructure_failure"])
def test_who_is_to_blame_decides(kind):
    """The policy's failures are zeros in the baseline; others leave a smaller group."""
    bad = rollout(0.0, [True], correct=0.0) if kind == "policy_failure" else lost()
    bad = dataclasses.replace(bad, outcome=kind)
    good = [rollout(r, [True] * 2) for r in (1.0, 0.5, 1.0)]
    step = assign([group(good[0], bad, *good[1:])], PLAIN, rollouts=4)
    kept = [good[0], bad, *good[1:]] if kind == "policy_failure" else good
    same = assign([group(*kept)], PLAIN, rollouts=4)
    assert coefficients(step) == coefficients(same)
    assert len(step.rows) == len(kept)


def test_a_group_with_one_score_or_none_teaches_nothing():
    groups = [group(lost(), rollout(1.0, [True])), group(lost(), lost()), group()]
    step = assign(groups, PLAIN, rollouts=6)
    assert step.rows == () and step.denominator == 48
    assert assign(groups, dataclasses.replace(PLAIN, length_norm="batch"), rollouts=6)[1] == 1


def test_overlong_rollouts_are_learned_from_unless_masked():
    members = [rollout(r, [True], stop=s) for r, s in ((1.0, "done"), (0.0, "tokens"))]
    assert len(assign([group(*members)], PLAIN, rollouts=2).rows) == 2
    masked = assign([group(*members)], dataclasses.replace(PLAIN, mask_overlong=True), rollouts=2)
    (row,) = masked.rows
    assert row.advantages.tolist() == [0, 0.5]  # the other one is still in the baseline


@pytest.mark.parametrize(
    ("stop", "overlong"),
    [("done", False), ("lost", False), ("agent", False), ("cut", True), ("context", True)]
    + [(budget, True) for budget in ("turns", "tokens", "deadline")],
)
def test_what_is_overlong(stop, overlong):
    assert rollout(0.0, [True], stop=stop).overlong == overlong


def test_the_oldest_version_is_that_of_a_token_that_was_sampled():
    links = (link([True, False], 7), link([False], 1), link([True, True], 5))
    assert rollout(0.0, generations=links).oldest_version == 5
    assert rollout(0.0, [False]).oldest_version == NO_VERSION


# --- Tokens are never made from text again ---

WORDS = {1: "a", 2: "b", 3: "ab", 4: "<think>", 5: "</think>", 6: "?"}  # "ab" is 3, or 1 and 2


def encode(text):
    """The usual encoding: the longest word first."""
    ids = []
    while text:
        fits = [(len(word), i) for i, word in WORDS.items() if text.startswith(word)]
        ids.append(max(fits)[1])
        text = text[max(fits)[0] :]
    return ids


@pytest.mark.parametrize("strips_thoughts", [False, True])
def test_tokens_are_trained_as_they_were_sampled(strips_thoughts):
    turns = [[4, 1, 5, 1, 2], [3], [1, 2]]  # the policy writes "ab" in both ways
    trace, sent = Trace(), []
    for turn in turns:
        # A chat template that forgets the thoughts of earlier turns changes what comes before.
        history = [t[t.index(5) + 1 :] if strips_thoughts and 5 in t else t for t in sent]
        prompt = [6, *itertools.chain(*([*t, 6] for t in history))]
        trace.add(
            Completion(
                prompt=np.array(prompt, np.int32),
                tokens=np.array(turn, np.int32),
                log_probs=np.full(len(turn), -0.5, np.float32),
                versions=np.zeros(len(turn), np.int32),
                forced=np.zeros(len(turn), bool),
                routes=np.full((len(prompt) + len(turn), 1, 1), NO_ROUTE, np.int16),
                temperature=1.0,
                finish="stop",
            )
        )
        sent.append(turn)
    one = rollout(1.0, generations=trace.generations)
    step = assign([group(one, rollout(0.0, [True]))], PLAIN, rollouts=2)
    mine = [row for row in step.rows if row.rollout == 0]
    assert len(mine) == 1 + strips_thoughts
    trained = [row.tokens[row.weights > 0].tolist() for row in mine]
    sampled = [*itertools.chain(*turns)]
    assert [*itertools.chain(*trained)] == sampled
    # as text they would have come back as other tokens
    assert encode("".join(WORDS[i] for i in sampled)) != sampled


def test_what_is_logged():
    groups = [
        group(rollout(1.5, [True] * 3, correct=1.0), rollout(-0.5, [True], stop="turns"), lost()),
        group(rollout(0.0, [True], [True]), rollout(0.0, [True], outcome="policy_failure")),
        group(lost()),
    ]
    metrics = group_metrics(groups)
    expected = {
        "reward": 0.25,
        "correct": 0.25,
        "overlong": 0.25,
        "policy_failure": 0.25,
        "links": 1.25,
        "sampled_tokens": 7 / 4,
        "lost": 2 / 6,
        "best_of_group": 0.5,
        "flat_groups": 0.5,
        "effort/turns": 2,
        "behaviour/bad_calls": 0.25,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert np.isnan(group_metrics([])["reward"])
