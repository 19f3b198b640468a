"""The multi-token-prediction module in packed rows: what it sees, and what it does not."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from c2 import models
from c2.models import mtp

ROWS = [[9, 14], [20], [3, 3, 16], [1, 2, 1]]
SEQ = 24


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return replace(tiny_config, layers=2, mtp=1)


@pytest.fixture(scope="module")
def batch(cfg, packed_rows):
    return packed_rows(ROWS, SEQ, cfg.vocab)


@pytest.fixture(scope="module")
def draft(cfg, random_params, batch):
    """Tokens -> the module's hidden states and routes."""
    p = random_params(cfg)
    layout = {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}

    @jax.jit
    def run(tokens):
        hidden = models.trunk(p, tokens, cfg, **layout).hidden
        return mtp.trunk(p.mtp[0], p.embed, hidden, tokens, cfg, **layout)

    return run


def bits(hidden):
    return np.asarray(hidden).view(np.uint32)


def test_has_next_knows_the_last_token_of_every_document(batch):
    expected = np.zeros((len(ROWS), SEQ), bool)
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            expected[row, start : start + length - 1] = True
            start += length
    np.testing.assert_array_equal(mtp.has_next(batch["segment_ids"]), expected)


def test_a_token_sees_itself_the_next_one_and_what_is_before(draft, batch, cfg):
    """Row 1, one document of 20: token 10 reaches the results from 9 on."""
    tokens = batch["tokens"].copy()
    tokens[1, 10] = (tokens[1, 10] + 1) % cfg.vocab
    changed = (bits(draft(batch["tokens"])[0]) != bits(draft(tokens)[0])).any(-1)
    assert not changed[1, :9].any() and changed[1, 9:19].all()
    assert not changed[[0, 2, 3]].any()


def test_another_document_changes_no_bit(draft, batch, cfg):
    real = mtp.has_next(batch["segment_ids"])
    other = (batch["segment_ids"] == 2) & (np.arange(len(ROWS))[:, None] != 1)
    rng = np.random.default_rng(0)
    tokens = np.where(other, rng.integers(cfg.vocab, size=other.shape), batch["tokens"])
    before, after = bits(draft(batch["tokens"])[0]), bits(draft(tokens)[0])
    assert (before != after).any(-1)[other & real].all()
    np.testing.assert_array_equal(after[~other & real], before[~other & real])


def test_the_last_token_of_a_document_is_routed_nowhere(draft, batch):
    routes = np.asarray(draft(batch["tokens"])[1])
    real = np.asarray(mtp.has_next(batch["segment_ids"]))
    assert (routes[~real] == -2).all() and (routes[real] >= 0).all()
