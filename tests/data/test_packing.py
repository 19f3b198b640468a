import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.data.packing import best_fit, pack
from c2.data.store import from_documents


@st.composite
def stores(draw):
    """Documents of distinct tokens (1, 2, 3, ... through the whole store), prompts and sources."""
    lengths = draw(st.lists(st.integers(0, 40), max_size=30))
    prompts = [draw(st.integers(0, length)) for length in lengths]
    sources = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    tokens = np.split(np.arange(1, sum(lengths) + 1, dtype=np.uint32), np.cumsum(lengths)[:-1])
    documents = zip(tokens, prompts, sources, strict=False)
    return from_documents(documents if lengths else [], np.uint32, "mark")


def document_of(store, token):
    """Index of the document that a token is in, and its place there."""
    document = int(np.searchsorted(store.offsets, token - 1, side="right")) - 1
    return document, token - 1 - int(store.offsets[document])


@given(stores(), st.integers(1, 24))
@settings(max_examples=150, deadline=None)
def test_rows_against_the_documents(store, context):
    rows = pack(store, context)
    seen = []
    learned = []
    for number, row in enumerate(rows):
        for name, array in row.items():
            assert array.shape == (context,)
            assert array.dtype == (np.float32 if name == "loss_mask" else np.int32)
        assert set(row) == {"tokens", "targets", "positions", "segment_ids", "loss_mask"}
        used = row["segment_ids"] > 0
        assert all(not array[~used].any() for array in row.values())
        assert used[: used.sum()].all()  # padding only at the end
        last = 0
        for column in range(used.sum()):
            token, segment = int(row["tokens"][column]), int(row["segment_ids"][column])
            document, place = document_of(store, token)
            starts = segment != last
            assert segment == last + starts
            assert starts == (place % context == 0)
            assert row["positions"][column] == place % context
            assert store.sources[document] == rows.sources[number]
            follows = column + 1 < used.sum() and row["segment_ids"][column + 1] == segment
            assert row["targets"][column] == (token + 1 if follows else 0)
            wanted = follows and place + 1 >= store.prompts[document]
            assert row["loss_mask"][column] == wanted
            learned += [token + 1] if wanted else []
            seen.append(token)
            last = segment
    assert sorted(seen) == list(range(1, len(store.tokens) + 1))  # none lost, none twice
    assert len(set(learned)) == len(learned)
    assert rows.tokens == len(store.tokens)
    assert rows.dropped == 0
    assert rows.padding == pytest.approx(1 - len(seen) / max(len(rows) * context, 1))


@given(stores(), st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_overlong_documents_can_be_dropped_whole(store, context):
    rows = pack(store, context, overlong="drop")
    kept = [
        range(store.offsets[i] + 1, store.offsets[i + 1] + 1)
        for i in range(len(store.lengths))
        if store.lengths[i] <= context
    ]
    seen = [int(t) for row in rows for t in row["tokens"] if t]
    assert sorted(seen) == sorted(token for document in kept for token in document)
    assert rows.dropped == sum(store.lengths > context)


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 60))
@settings(max_examples=150, deadline=None)
def test_best_fit_wastes_little(lengths, capacity):
    lengths = np.array(lengths, int)
    rows = best_fit(lengths, capacity)
    used = np.bincount(rows, lengths).astype(int)
    assert (used <= capacity).all()
    assert sorted(set(rows)) == list(range(len(used)))
    # No two rows could be one, so at most one row is not more than half full.
    assert len(used) < 2 or np.sort(used)[:2].sum() > capacity
    np.testing.assert_array_equal(rows, best_fit(lengths, capacity))


def test_best_fit_takes_the_fullest_row_with_room():
    assert best_fit(np.array([4, 7, 6, 3, 3, 4]), 10).tolist() == [1, 0, 1, 0, 2, 2]


def test_golden_row():
    documents = [
        (np.array([11, 12, 13], np.uint16), 2, 0),  # two tokens of prompt
        (np.array([21, 22], np.uint16), 0, 0),
    ]
    rows = pack(from_documents(documents, np.uint16, ""), 6)
    [row] = rows
    expected = {
        "tokens": [11, 12, 13, 21, 22, 0],
        "targets": [12, 13, 0, 22, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0],
        "segment_ids": [1, 1, 1, 2, 2, 0],
        "loss_mask": [0, 1, 0, 1, 0, 0],
    }
    assert {name: array.tolist() for name, array in row.items()} == expected


def test_waste_on_lengths_as_in_a_corpus():
    lengths = np.random.default_rng(0).lognormal(6.5, 1.3, 1000).astype(int) + 2
    documents = [(np.ones(length, np.uint16), 0, 0) for length in lengths]
    rows = pack(from_documents(documents, np.uint16, ""), 512)
    assert rows.padding < 0.01


@given(stores(), st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_weights_of_tokens_stand_where_the_tokens_are_targets(store, context):
    store = dataclasses.replace(store, weights=np.arange(1, len(store.tokens) + 1) / 7)
    for row in pack(store, context):
        inside = row["targets"] > 0  # tokens are 1, 2, 3, ...
        np.testing.assert_allclose(row["loss_mask"], row["targets"] / 7 * inside, rtol=1e-6)
