"""Layouts of context parallelism: golden values, balance, and that no token is lost."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from c2.parallel.context import balanced, imbalance, pairs, zigzag


def packed(lengths, multiple):
    """Segment ids of documents one after another, padded to a multiple."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(ids, (0, -len(ids) % multiple))


def test_zigzag_golden_values():
    assert zigzag(16, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert zigzag(8, 4).ravel().tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    assert zigzag(6, 3).dtype == np.int32


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_zigzag_is_a_permutation_and_exactly_balanced(cp):
    seq, c = 24 * cp, 12
    layout = zigzag(seq, cp)
    assert layout.shape == (cp, 24)
    np.testing.assert_array_equal(np.sort(layout.ravel()), np.arange(seq))
    work = pairs(np.ones(seq, int))[layout].sum(1)
    assert (work == c * c * (2 * cp - 1) + c * (c + 1)).all()
    assert imbalance(layout, np.ones(seq, int)) == 1


@pytest.mark.parametrize(("seq", "cp"), [(7, 2), (12, 4), (0, 1), (8, 0)])
def test_what_does_not_divide_is_refused_with_the_numbers(seq, cp):
    with pytest.raises(ValueError, match=rf"seq_len {seq} .*2 \* cp = {2 * cp}"):
        zigzag(seq, cp)


@pytest.mark.parametrize(
    ("lengths", "work"),
    [([64], [1040, 1040]), ([32, 32], [528, 528]), ([40, 24], [400, 720]), ([16, 48], [784, 528])],
)
def test_zigzag_does_not_balance_packed_documents(lengths, work):
    ids = packed(lengths, 64)
    assert pairs(ids)[zigzag(64, 2)].sum(1).tolist() == work
    assert imbalance(balanced(ids, 2, chunk=2), ids) < 1.02


def test_pairs_count_earlier_tokens_of_the_document():
    assert pairs(np.array([1, 1, 1, 2, 2, 3, 0, 0])).tolist() == [1, 2, 3, 1, 2, 1, 0, 0]


@pytest.mark.parametrize("seed", range(8))
def test_packed_log_normal_documents_are_balanced(seed):
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(7, 1.2, 64)).astype(int) + 1
    ids = packed(lengths, 64 * 8)
    assert imbalance(balanced(ids, 8), ids) <= 1.05
    assert imbalance(zigzag(len(ids), 8), ids) > 1.2  # what it is needed for


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, 90), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 4, 16]),
)
def test_balanced_holds_every_token_once_in_whole_chunks(lengths, cp, chunk):
    ids = packed(lengths, chunk * cp)
    layout = balanced(ids, cp, chunk)
    assert layout.shape == (cp, len(ids) // cp) and layout.dtype == np.int32
    np.testing.assert_array_equal(np.sort(layout.ravel()), np.arange(len(ids)))
    chunks = layout.reshape(cp, -1, chunk)
    assert (chunks[..., 0] % chunk == 0).all() and (np.diff(chunks) == 1).all()
    assert (np.diff(chunks[..., 0], axis=1) > 0).all()
    # no rank can be over the mean by more than the largest chunk's work: it would have given it
    work = pairs(ids)
    loads = work[layout].sum(1)
    assert loads.max() - loads.mean() <= work.reshape(-1, chunk).sum(1).max()


def test_balanced_deals_one_document_like_zigzag():
    ids = np.ones(4 * 2 * 64, int)
    np.testing.assert_array_equal(balanced(ids, 4, chunk=64), zigzag(len(ids), 4))


def test_balanced_refuses_what_does_not_divide():
    with pytest.raises(ValueError, match=r"seq 96 .*chunk \* cp = 128"):
        balanced(np.ones(96, int), 2)
