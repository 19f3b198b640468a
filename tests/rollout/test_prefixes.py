"""The index of kept sequences against a search through all of them, and on the device."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from c2.rollout.config import Request
from c2.rollout.prefixes import Prefixes, common
from c2.rollout.scheduler import Scheduler, run

sequences = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(np.array)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), sequences), max_size=25), st.integers(1, 3))
def test_index(calls, places):
    index, held = Prefixes(places), {}
    for adds, tokens in calls:
        if adds:
            place = index.add(tokens, tokens[:, None])
            if place is None:
                assert any(common(t, tokens) == len(tokens) for t in held.values())
            else:
                assert 0 <= place < places
                held[place] = tokens
        place, length = index.find(tokens)
        assert length == max((common(t, tokens) for t in held.values()), default=0)
        if length:
            assert common(held[place], tokens) == length
            np.testing.assert_array_equal(index.use(place, length)[:, 0], tokens[:length])
    index.clear()
    assert index.find(np.array([0, 1])) == (-1, 0)


def test_the_longest_unused_makes_room():
    index = Prefixes(2)
    a, b, c = (np.array([x, x]) for x in range(3))
    assert [index.add(x, x) for x in (a, b)] == [0, 1]
    index.use(0, 2)
    assert index.add(c, c) == 1 and index.find(b)[1] == 0 and index.find(a) == (0, 2)


def test_a_longer_sequence_takes_the_place_of_its_beginning():
    index = Prefixes(2)
    assert index.add(np.array([1, 2]), np.zeros(2)) == 0
    assert index.add(np.array([1, 2, 3]), np.zeros(3)) == 0
    assert index.add(np.array([1, 2]), np.zeros(2)) is None


def test_a_second_turn_goes_on_where_the_first_ended(
    device, model, weights, forward, expected_log_probs
):
    """Log-probabilities and routes are those of a fresh prefill, prefix routes included."""
    scheduler = Scheduler(device, device.engine, model.vocab)
    (first,) = run(scheduler, [Request(prompt=list(range(10, 25)), max_tokens=12)])
    prompt = [*first.prompt.tolist(), *first.tokens.tolist(), 7, 8, 9]
    turn = Request(prompt=prompt, max_tokens=10, id=1)
    (second,) = run(scheduler, [turn])
    assert scheduler.metrics()["prefix_tokens"] == 26  # the last token was never fed
    np.testing.assert_allclose(second.log_probs, expected_log_probs(weights[0], second), atol=1e-5)
    tokens = np.concatenate([second.prompt, second.tokens])
    np.testing.assert_array_equal(second.routes[:-1], forward(weights[0], tokens)[1][:-1])
    without = Scheduler(device, replace(device.engine, prefix_entries=0), model.vocab)
    (fresh,) = run(without, [turn])
    np.testing.assert_array_equal(fresh.tokens, second.tokens)
    np.testing.assert_allclose(fresh.log_probs, second.log_probs, atol=1e-5)
