"""Packing of rows, and the price of the KL in them, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.losses.config import KLConfig
from c2.models import moe
from c2.rl.kl_penalty import charge
from c2.rl.rows import NO_TOKEN, Row, pack


def row(tokens, rollout=0, weights=None, seed=0, routes=(0, 0)):
    rng = np.random.default_rng(seed)
    n = len(tokens)
    return Row(
        rollout=rollout,
        tokens=np.array(tokens, np.int32),
        weights=np.array([0, *np.ones(n - 1)] if weights is None else weights),
        advantages=rng.normal(size=n),
        log_probs=-rng.exponential(size=n).astype(np.float32),
        temperatures=rng.choice([0.6, 1, 1.4], n).astype(np.float32),
        routes=rng.integers(0, 8, (n, *routes)).astype(np.int16),
    )


def test_two_rows_by_hand():
    rows = [row([5, 6, 7], routes=(1, 2)), row([8, 9], weights=[0, 0.5], seed=1, routes=(1, 2))]
    packed = pack(rows, context=6, multiple=2)
    batch = packed.batch
    expected = {
        "tokens": [5, 6, 7, 8, 9, 0],
        "targets": [6, 7, 0, 9, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0],
        "segment_ids": [1, 1, 1, 2, 2, 0],
        "weights": [1, 1, 0, 0.5, 0, 0],
    }
    for name, values in expected.items():
        assert batch[name].tolist() == [values, [0] * 6], name
    for name, of_row in (("advantages", "advantages"), ("sampled", "log_probs")):
        one, two = (getattr(r, of_row) for r in rows)
        values = [*one[1:], 0, *two[1:], 0, 0]
        np.testing.assert_array_equal(batch[name][0], np.float32(values))
    one, two = (r.temperatures for r in rows)
    np.testing.assert_array_equal(batch["temperatures"][0], [*one[1:], 1, *two[1:], 1, 1])
    assert batch["routes"].shape == (2, 6, 1, 2)
    np.testing.assert_array_equal(batch["routes"][0, :3], rows[0].routes)
    assert (batch["routes"][0, 5] == NO_TOKEN).all() and (batch["routes"][1] == NO_TOKEN).all()
    assert packed.places.tolist() == [[0, 0, 3], [0, 3, 5]]
    assert NO_TOKEN == moe.NO_TOKEN


@given(st.lists(st.integers(2, 9), min_size=1, max_size=12), st.integers(1, 3))
def test_every_row_is_there_once_and_whole(lengths, multiple):
    rows = [row(range(100 * i, 100 * i + n), rollout=i) for i, n in enumerate(lengths)]
    packed = pack(rows, context=9, multiple=multiple)
    count = len(packed.batch["tokens"])
    assert count % multiple == 0
    assert (packed.batch["segment_ids"] > 0).sum() == sum(lengths)
    for one, (at, first, end) in zip(rows, packed.places, strict=True):
        here = at, slice(first, end)
        assert packed.batch["tokens"][here].tolist() == one.tokens.tolist()
        assert len(set(packed.batch["segment_ids"][here])) == 1
        np.testing.assert_array_equal(
            packed.batch["advantages"][at, first : end - 1], np.float32(one.advantages[1:])
        )


def test_what_cannot_be_packed():
    with pytest.raises(ConfigError, match="context: 3; a row has 4 tokens"):
        pack([row([1, 2]), row([1, 2, 3, 4])], context=3)
    with pytest.raises(ValueError, match="row 1: its first token"):
        pack([row([1, 2]), row([1, 2], weights=[1, 1])], context=3)
    with pytest.raises(ValueError, match="nothing to learn"):
        pack([], context=3)


@pytest.mark.parametrize("horizon", ["to_go", "token"])
def test_the_kl_of_a_chain_by_hand(horizon):
    """Rollout 0 is a chain of two rows, one of which has a token that was not sampled."""
    rows = [
        row([1, 2, 3, 4], 0, [0, 1, 0, 1], seed=1),
        row([5, 6], 0, seed=2),
        row([7, 8, 9], 1, seed=3),
    ]
    packed = pack(rows, context=12)
    reference = np.full(packed.batch["tokens"].shape, np.nan, np.float32)
    at, first, _ = packed.places.T
    reference[at[0], first[0] : first[0] + 3] = [-1, np.nan, -2]
    reference[at[1], first[1]] = -3
    reference[at[2], first[2] : first[2] + 2] = [-4, -5]
    batch = charge(packed, reference, KLConfig(beta=0.5, horizon=horizon))
    k = [
        [rows[0].log_probs[1] + 1, 0, rows[0].log_probs[3] + 2],
        [rows[1].log_probs[1] + 3],
        [rows[2].log_probs[1] + 4, rows[2].log_probs[2] + 5],
    ]
    if horizon == "to_go":
        tail = k[0][2] + k[1][0]
        k = [[k[0][0] + tail, tail, tail], k[1], [sum(k[2]), k[2][1]]]
    for one, (i, start, end), price in zip(rows, packed.places, k, strict=True):
        learned = one.weights[1:] > 0
        got = batch["advantages"][i, start : end - 1]
        expected = one.advantages[1:] - 0.5 * np.array(price)
        np.testing.assert_allclose(got[learned], expected[learned], rtol=1e-5)
    in_loss = charge(packed, reference, KLConfig(beta=0.5, estimator="k2", placement="loss"))
    np.testing.assert_array_equal(in_loss["advantages"], packed.batch["advantages"])
    np.testing.assert_array_equal(in_loss["reference"], reference)
