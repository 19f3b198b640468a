"""Prompts: once each, hard ones more often late in training."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.records import Effort
from c2.rl.sampling_weights import OversamplingConfig, draw, kind_weights

SPENT = {
    "easy": [Effort(turns=2, thinking_tokens=100), Effort(turns=4, thinking_tokens=100)],
    "hard": [Effort(turns=9, thinking_tokens=300)],
    "new": [],
}


def test_difficulty_is_turns_and_thoughts_over_the_mean_of_kinds():
    # means: turns 3 and 9 (6), thoughts 100 and 300 (200)
    late = kind_weights(SPENT, OversamplingConfig(), progress=0.5)
    assert late == pytest.approx({"easy": 0.5, "hard": 1.5})
    assert kind_weights(SPENT, OversamplingConfig(), 0.49) == {"easy": 1, "hard": 1}
    assert kind_weights(SPENT, OversamplingConfig(start=1.0), 1.0) == {"easy": 1, "hard": 1}
    squared = kind_weights(SPENT, OversamplingConfig(power=2.0), 1.0)
    assert squared == pytest.approx({"easy": 0.25, "hard": 2.25})
    limited = kind_weights(SPENT, OversamplingConfig(power=9.0, limit=2.0), 1.0)
    assert limited == {"easy": 0.5, "hard": 2.0}
    only_turns = {"a": [Effort(turns=1)], "b": [Effort(turns=3)]}
    assert kind_weights(only_turns, OversamplingConfig(), 1.0)["b"] == pytest.approx(0.75)
    assert kind_weights({}, OversamplingConfig(), 1.0) == {}


@given(st.lists(st.floats(0.25, 4), min_size=1, max_size=30), st.integers(0, 2**31))
def test_each_prompt_comes_once_and_again_after_a_restart(weights, seed):
    weights = np.array(weights)
    used = np.zeros(len(weights), bool)
    order = []
    for _ in weights:
        order.append(draw(weights, used, seed))
        assert order[-1] == draw(weights, used.copy(), seed)
        used[order[-1]] = True
    assert sorted(order) == list(range(len(weights)))
    with pytest.raises(ValueError, match="each is used once"):
        draw(weights, used, seed)


def test_prompts_come_as_often_as_they_weigh():
    weights = np.array([0.5, 1.5, 1.0, 1.0])
    used = np.array([False, False, False, True])
    counts = np.bincount([draw(weights, used, seed) for seed in range(4000)], minlength=4)
    expected = np.array([0.5, 1.5, 1.0, 0.0]) / 3
    assert (
        np.abs(counts / 4000 - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / 4000)
    ).all()


def test_draws_of_a_run_are_independent():
    used = np.zeros(10, bool)
    pairs = []
    for seed in range(400):
        first = draw(np.ones(10), used, seed)
        second = draw(np.ones(10), used | (np.arange(10) == first), seed)
        pairs.append((first, second - (second > first)))  # the place among those that are left
    assert abs(np.corrcoef(*zip(*pairs, strict=True))[0, 1]) < 4.5 / np.sqrt(400)


@pytest.mark.parametrize("bad", [{"start": 1.5}, {"power": -1.0}, {"limit": 0.5}])
def test_bad_config(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        OversamplingConfig(**bad)
