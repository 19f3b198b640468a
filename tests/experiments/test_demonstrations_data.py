"""Demonstrations as documents: weights, habits, and the same ones again."""

import dataclasses

import numpy as np
import pytest

from c2.config import ConfigError
from c2.data import tokenizer as tokenizers
from c2.rl.environments import EnvironmentConfig
from c2.sandbox.tasks import minirepo
from experiments.demonstrations import DemonstrationsConfig, make_store

ENVIRONMENTS = EnvironmentConfig(syntax="plain")


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for i in range(20) for text in minirepo.draw(i).files.values()]
    return tokenizers.train(texts, 400)


def documents(store, tokenizer):
    cuts = zip(store.offsets, store.offsets[1:], strict=False)
    return [tokenizer.decode(store.tokens[a:b].tolist()) for a, b in cuts]


def test_the_agents_own_tokens_count_and_habits_are_as_asked(tokenizer):
    config = DemonstrationsConfig(
        count=60, families=("operator", "name"), test_before=0.0, test_after=0.5, others=0.25
    )
    store = make_store(config, tokenizer, ENVIRONMENTS)
    texts = documents(store, tokenizer)
    assert len(texts) == 60 and set(np.unique(store.weights)) == {0.25, 1.0}
    own = tokenizer.decode(store.tokens[store.weights == 1].tolist())
    assert own.count("done<|turn_end|>") == 60 and "<|user|>" not in own and "<|tool|>" not in own
    tested = sum("<|call|>run_tests" in text for text in texts)
    assert 15 < tested < 45
    assert all(text.count("<|call|>edit") == 1 for text in texts)  # none repairs its own edit
    first = [text.split("<|call|>")[1] for text in texts]
    assert all(call.startswith("read_file") for call in first)


def test_the_same_config_gives_the_same_bytes(tokenizer):
    config = DemonstrationsConfig(count=5)
    one, two = (make_store(config, tokenizer, ENVIRONMENTS) for _ in range(2))
    other = make_store(dataclasses.replace(config, seed=1), tokenizer, ENVIRONMENTS)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    assert one.fingerprint == two.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("field", "value"), [("count", 0), ("test_after", 1.5), ("families", ()), ("families", ("x",))]
)
def test_a_config_without_sense_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}: .*legal"):
        DemonstrationsConfig(**{field: value})
