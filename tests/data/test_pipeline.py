from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from c2.config import ConfigError
from c2.data.packing import pack
from c2.data.pipeline import batches
from c2.data.store import from_documents

CONTEXT = 8
BATCH = 16


def make_rows(*documents_per_source, mark="mark"):
    """One document per row, filled with its own number."""
    sources = np.repeat(np.arange(len(documents_per_source)), documents_per_source)
    documents = [
        (np.full(CONTEXT, number, np.uint16), 0, source) for number, source in enumerate(sources)
    ]
    return pack(from_documents(documents, np.uint16, mark), CONTEXT)


# Not fewer: Grain's shuffle takes milliseconds per index of a very small dataset.
COUNT = 250
ROWS = make_rows(COUNT)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def numbers(batch):
    return batch["tokens"][:, 0].tolist()


def order(count, **options):
    """The numbers of the rows in each of the first `count` batches."""
    arguments = {"rows": ROWS, "batch": BATCH, "seed": 0} | options
    return [numbers(batch) for batch in take(iter(batches(**arguments)), count)]


def flat(lists):
    return list(chain.from_iterable(lists))


def assert_same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], strict=True)


def test_batch_holds_the_rows():
    [batch] = take(iter(batches(ROWS, batch=BATCH, seed=0)), 1)
    for name, array in batch.items():
        assert array.shape == (BATCH, CONTEXT)
        assert array.dtype == (np.float32 if name == "loss_mask" else np.int32)
    for index, number in enumerate(numbers(batch)):
        for name, array in ROWS[number].items():
            np.testing.assert_array_equal(batch[name][index], array)


def test_epochs_are_complete_and_shuffled_anew():
    stream = flat(order(4 * COUNT // BATCH))
    epochs = [stream[start : start + COUNT] for start in range(0, 3 * COUNT, COUNT)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seed_decides_about_the_order():
    assert order(10) == order(10)
    starts = [tuple(flat(order(2, seed=seed))) for seed in range(6)]
    assert len(set(starts)) == 6
    # A neighbouring seed is not the same order one epoch later.
    second_epoch = flat(order(2 * COUNT // BATCH))[COUNT:]
    assert tuple(second_epoch[: 2 * BATCH]) != starts[1]


@given(st.integers(0, 12), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_restored_iterator_continues_bitwise(before, lost):
    dataset = batches(ROWS, batch=BATCH, seed=3)
    iterator = iter(dataset)
    take(iterator, before)
    state = iterator.get_state()
    expected = take(iterator, 10)
    take(iterator, lost)
    iterator.set_state(state)  # back in a used iterator
    assert_same(take(iterator, 10), expected)
    fresh = iter(batches(ROWS, batch=BATCH, seed=3))
    fresh.set_state(state)
    assert_same(take(fresh, 10), expected)


def test_state_is_small_however_far():
    iterator = iter(batches(ROWS, batch=BATCH, seed=0))
    states = [iterator.get_state() for _ in take(iterator, 50)]
    assert {len(state) for state in states} == {2}
    assert all(isinstance(value, int | str) for value in states[-1].values())


def test_orbax_saves_and_restores_it(tmp_path):
    iterator = iter(batches(ROWS, batch=BATCH, seed=0))
    take(iterator, 5)
    ocp.save_checkpointables(tmp_path / "checkpoint", {"data": iterator})
    expected = take(iterator, 5)
    fresh = iter(batches(ROWS, batch=BATCH, seed=0))
    ocp.load_checkpointables(tmp_path / "checkpoint", {"data": fresh})
    assert_same(take(fresh, 5), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": make_rows(COUNT, mark="other documents")},
        {"batch": 2 * BATCH},
        {"seed": 1},
        {"rows": make_rows(COUNT - 1, 1), "weights": (2.0, 1.0)},
    ],
)
def test_state_of_other_data_is_refused(change):
    state = iter(batches(ROWS, batch=BATCH, seed=0)).get_state()
    arguments = {"rows": ROWS, "batch": BATCH, "seed": 0} | change
    with pytest.raises(ConfigError, match=r"^sources: the data have changed since"):
        iter(batches(**arguments)).set_state(state)
    with pytest.raises(ConfigError, match="the data have changed"):
        iter(batches(**arguments)).set_state({"next_index": 3})


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_partition_every_global_batch(shards):
    whole = order(5)
    parts = [order(5, shard=shard, shards=shards) for shard in range(shards)]
    for number, batch in enumerate(whole):
        assert all(len(part[number]) == BATCH // shards for part in parts)
        assert sorted(flat(part[number] for part in parts)) == sorted(batch)


def test_state_does_not_depend_on_the_number_of_shards():
    iterator = iter(batches(ROWS, batch=BATCH, seed=0))
    take(iterator, 7)
    state, expected = iterator.get_state(), numbers(next(iterator))
    shards = [iter(batches(ROWS, batch=BATCH, seed=0, shard=i, shards=2)) for i in range(2)]
    for shard in shards:
        shard.set_state(state)
    assert sorted(flat(numbers(next(shard)) for shard in shards)) == sorted(expected)


def test_weights_are_shares_of_the_rows():
    rows = make_rows(300, 100, 200)
    stream = flat(order(50, rows=rows, weights=(1.0, 2.0, 1.0)))
    source = Counter(rows.sources[stream].tolist())
    assert [source[i] / len(stream) for i in range(3)] == pytest.approx([0.25, 0.5, 0.25], abs=0.01)
    # Within a source every row is equally frequent.
    counts = Counter(number for number in stream if rows.sources[number] == 1)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_without_weights_all_rows_are_equally_frequent():
    stream = flat(order(25, rows=make_rows(300, 100)))
    assert sorted(stream) == list(range(400))


def test_source_without_documents_does_not_count():
    documents = [(np.full(CONTEXT, 1, np.uint16), 0, 1)] * BATCH
    rows = pack(from_documents(documents, np.uint16, ""), CONTEXT)
    assert order(1, rows=rows, weights=(5.0, 0.1)) == [[1] * BATCH]


def test_corpus_smaller_than_a_batch():
    message = r"^batch: 251 rows of 8 tokens, but the documents fill only 250 \(2,000 tokens\)"
    with pytest.raises(ConfigError, match=message):
        batches(ROWS, batch=251, seed=0)


@pytest.mark.parametrize("batch, shards", [(0, 1), (4, 3)])
def test_illegal_batch(batch, shards):
    with pytest.raises(ConfigError, match=f"^batch: {batch} is not legal"):
        batches(ROWS, batch=batch, seed=0, shards=shards)
