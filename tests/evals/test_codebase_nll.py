import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.data.config import Source
from c2.data.readers import Document, Limits, read
from c2.data.tokenizer import train
from c2.evals.codebase_nll import codebase_nll, rolling_nll, stream

VOCAB = 50


@st.composite
def settings_and_tokens(draw):
    window = draw(st.integers(2, 12))
    return {
        "window": window,
        "stride": draw(st.integers(1, window - 1)),
        "batch_size": draw(st.integers(1, 4)),
        "tokens": np.array(draw(st.lists(st.integers(0, VOCAB - 1), max_size=60)), np.int32),
    }


@given(settings_and_tokens())
@settings(max_examples=100, deadline=None)
def test_uniform_model(case):
    def uniform(tokens):
        return np.full((len(tokens), tokens.shape[1] - 1), -math.log(VOCAB), np.float32)

    scored = max(len(case["tokens"]) - 1, 0)
    assert rolling_nll(logprobs=uniform, **case) == pytest.approx(scored * math.log(VOCAB))


@given(settings_and_tokens(), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_bigram_model(case, seed):
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(VOCAB), VOCAB)
    table = np.log(np.maximum(probabilities, 1e-30))

    def bigram(tokens):
        return table[tokens[:, :-1], tokens[:, 1:]]

    tokens = case["tokens"].tolist()
    expected = -sum(table[a, b] for a, b in pairwise(tokens))
    assert rolling_nll(logprobs=bigram, **case) == pytest.approx(expected)


@given(settings_and_tokens())
@settings(max_examples=60, deadline=None)
def test_each_token_is_scored_once_with_enough_context(case):
    count, window = len(case["tokens"]), case["window"]
    case["tokens"] = np.arange(1, count + 1)  # a token tells its place
    for place in range(2, count + 1):

        def once(tokens, place=place):
            assert tokens.shape == (case["batch_size"], window) and tokens.dtype == np.int32
            return -(tokens[:, 1:] == place).astype(float)

        def context(tokens, place=place):
            return -np.where(tokens[:, 1:] == place, np.arange(1, window), 0.0)

        assert rolling_nll(logprobs=once, **case) == 1
        least = min(place - 1, window - case["stride"])
        assert least <= rolling_nll(logprobs=context, **case) <= min(place - 1, window - 1)


def test_window_as_long_as_the_text_sees_all_of_it():
    tokens = np.arange(1, 9)
    calls = []

    def scorer(batch):
        calls.append(batch)
        return np.zeros((len(batch), batch.shape[1] - 1))

    rolling_nll(tokens, scorer, window=8, stride=4, batch_size=2)
    [batch] = calls
    assert batch.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [0] * 8]
    calls.clear()
    rolling_nll(tokens, scorer, window=5, stride=2, batch_size=3)
    assert np.concatenate(calls).tolist() == [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7], [4, 5, 6, 7, 8]]


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_illegal_stride(stride):
    with pytest.raises(ConfigError, match=f"^stride: {stride} does not fit window 8; legal: 1"):
        rolling_nll(np.arange(9), lambda tokens: tokens, window=8, stride=stride)


def test_code_base():
    files, _ = read(Source(path="stdlib:json"), Limits((".py",), 10**6))
    tokenizer = train([file.text for file in files], 600)
    end = tokenizer.special("end")

    def uniform(tokens):
        return np.full((len(tokens), tokens.shape[1] - 1), -math.log(600))

    result = codebase_nll(files[::-1], tokenizer, uniform, window=64, stride=32, batch_size=4)
    tokens = [end]
    for file in files:  # which `read` has sorted
        tokens += [*tokenizer.encode(file.text), end]
    assert stream(files[::-1], tokenizer).tolist() == tokens
    assert result.tokens == len(tokens) - 1
    assert result.bytes == sum(len(file.text.encode()) for file in files)
    assert result.nats == pytest.approx(result.tokens * math.log(600))
    assert result.nats_per_token == pytest.approx(math.log(600))
    assert result.bits_per_byte == pytest.approx(result.nats / result.bytes / math.log(2))


def test_bytes_are_those_of_utf8():
    tokenizer = train(["é"], 512)
    files = [Document("s", "m.py", "éé", "")]
    result = codebase_nll(files, tokenizer, lambda t: np.zeros((len(t), 7)), window=8, stride=4)
    assert (result.bytes, result.nats) == (4, 0)
