"""Demonstrations as documents: weights, habits, and the same ones again."""

import dataclasses
import zipfile

import numpy as np
import pytest

from c2.config import ConfigError
from c2.data import tokenizer as tokenizers
from c2.rl.environments import EnvironmentConfig
from c2.sandbox.tasks import minirepo
from experiments import demonstrations
from experiments.demonstrations import (
    DemonstrationsConfig,
    cached_store,
    make_store,
    write_packages,
)

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
        count=60, families=("operator", "name"), slips=0.0, test_before=0.0, test_after=0.5,
        others=0.25,
    )  # fmt: skip
    store = make_store(config, tokenizer, ENVIRONMENTS)
    texts = documents(store, tokenizer)
    assert len(texts) == 60 and set(np.unique(store.weights)) == {0.25, 1.0}
    own = tokenizer.decode(store.tokens[store.weights == 1].tolist())
    assert own.count("done<|turn_end|>") == 60 and "<|user|>" not in own and "<|tool|>" not in own
    tested = sum("<|call|>run_tests" in text for text in texts)
    assert 15 < tested < 45
    assert all(text.count("<|call|>edit") == 1 for text in texts)  # nothing to repair
    first = [text.split("<|call|>")[1] for text in texts]
    assert {call.split()[0] for call in first} == {"read_file", "grep"}


def test_demonstrations_are_made_once_for_a_config_and_a_tokenizer(
    tokenizer, tmp_path, monkeypatch
):
    config, path = DemonstrationsConfig(count=4), tmp_path / "shown.npz"
    made = cached_store(config, tokenizer, ENVIRONMENTS, path)
    monkeypatch.setattr(demonstrations, "make_store", lambda *_: pytest.fail("made again"))
    again = cached_store(config, tokenizer, ENVIRONMENTS, path)
    for name in ("tokens", "offsets", "weights"):
        np.testing.assert_array_equal(getattr(made, name), getattr(again, name))
    with pytest.raises(pytest.fail.Exception, match="made again"):
        cached_store(dataclasses.replace(config, seed=1), tokenizer, ENVIRONMENTS, path)


def test_packages_are_files_of_the_corpus_and_the_same_bytes_again(tmp_path):
    one, two = tmp_path / "one.zip", tmp_path / "two.zip"
    for path in (one, two):
        write_packages(path, 130)
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        texts = [archive.read(name).decode() for name in archive.namelist()]
    assert len(texts) == 3 and sum(text.count("def ") for text in texts) == 3 * 130
    for text in texts:
        compile(text, "packages", "exec")


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
