"""Rows for training hold exactly what was sampled, whatever the prompts do."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.agent.trace import Trace
from c2.records import NO_ROUTE, Completion


def completion(prompt, tokens, number, forced=()):
    count = len(prompt) + len(tokens)
    routes = np.full((count, 3, 2), number, np.int16)
    routes[-1:] = NO_ROUTE  # the last token was never computed
    return Completion(
        prompt=np.array(prompt, np.int32),
        tokens=np.array(tokens, np.int32),
        log_probs=np.arange(len(tokens), dtype=np.float32) / 8 - number,
        versions=np.full(len(tokens), number, np.int32),
        forced=np.array([at in forced for at in range(len(tokens))], bool),
        routes=routes,
        temperature=0.5 + number,
        finish="stop",
    )


IDS = st.lists(st.integers(0, 3), max_size=5)
# How the next prompt comes about: it goes on, or the token at the beginning is another one.
STEPS = st.lists(st.tuples(st.booleans(), IDS, IDS), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_every_sampled_token_is_learned_once_and_rows_end_where_prompts_break(steps):
    trace, context, sampled, breaks = Trace(), [9], [], 0
    for number, (broken, given_, written) in enumerate(steps):
        if number and broken:
            context = [context[0] + 1, *context[1:]]
            breaks += 1
        context = [*context, *given_]
        trace.add(completion(context, written, number))
        context = context + written
        sampled += written
    rows = trace.generations
    assert len(rows) == 1 + breaks
    assert np.concatenate([row.tokens[row.loss_mask] for row in rows]).tolist() == sampled
    assert rows[-1].tokens.tolist() == context
    for row in rows:
        mask, given_ = row.loss_mask, ~row.loss_mask
        for array in (mask, row.log_probs, row.versions, row.temperatures, row.routes):
            assert len(array) == len(row.tokens)
        assert (row.versions[given_] == -1).all() and (row.log_probs[given_] == 0).all()
        assert (row.temperatures[mask] == row.versions[mask] + 0.5).all()
        types = [np.int32, bool, np.float32, np.int32, np.float32, np.int16]
        assert [array.dtype for array in vars(row).values()] == types


def test_two_turns_by_hand():
    trace = Trace()
    trace.add(completion([1, 2], [3, 8], 0, forced=[1]))
    trace.add(completion([1, 2, 3, 8, 4], [5, 6], 1))
    (row,) = trace.generations
    assert row.tokens.tolist() == [1, 2, 3, 8, 4, 5, 6]
    assert row.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert row.log_probs.tolist() == [0, 0, 0, 0.125, 0, -1, -0.875]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, 1, 1]
    # The first captured ones stay; what had none gets those of the next turn.
    assert row.routes[:, 2, 1].tolist() == [0, 0, 0, 1, 1, 1, NO_ROUTE]
    # A part of what was there is no extension of it.
    trace.add(completion([1, 2, 3], [7], 2))
    assert [row.tokens.tolist() for row in trace.generations][1:] == [[1, 2, 3, 7]]
    assert Trace().generations == ()
