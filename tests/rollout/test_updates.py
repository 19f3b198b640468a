"""New weights at any token of sequences that are being sampled."""

from dataclasses import replace

import numpy as np
import pytest

from c2.records import Completion
from c2.rollout.config import Request
from c2.rollout.scheduler import Scheduler, run

STOP = 5
SEEDS = range(4)


class Halting:
    """A device whose dispatches end early, slot by slot, so that updates can come at any token."""

    def __init__(self, device, rng):
        self._device, self._rng = device, rng

    def __getattr__(self, name):
        return getattr(self._device, name)

    def decode(self, slots, *, speculate=False):
        steps = self._rng.integers(1, self._device.engine.steps + 1, len(slots.count))
        budget = np.minimum(slots.budget, slots.count + steps).astype(np.int32)
        return self._device.decode(slots.replace(budget=budget), speculate=speculate)


def random_requests(rng, vocab):
    """Eight of them; half end with a stop token that is dictated, so that no draw decides."""
    return [
        Request(
            prompt=rng.integers(vocab, size=rng.integers(2, 30)).tolist(),
            max_tokens=int(rng.integers(20, 31)),
            temperature=(0.6, 1.0, 1.4)[i % 3],
            stop=(STOP,) if i % 2 else (),
            forced={int(rng.integers(8, 19)): STOP} if i % 2 else {},
            seed=2,
            id=i,
        )
        for i in range(8)
    ]


def with_updates(device, weights, requests, after_update, rng):
    """Runs requests while weights change at random rounds.

    Returns the completions, and for each the weights in use when each token of its prompt was
    read first, and when each of its tokens was emitted.
    """
    engine = replace(device.engine, after_update=after_update, prefix_entries=0)
    scheduler = Scheduler(Halting(device, rng), engine, device.cfg.vocab)
    completions, emitted = {}, {i: [] for i in range(len(requests))}
    current = 0

    def receive(i):
        def emit(event):
            if isinstance(event, Completion):
                completions[i] = event
            else:
                emitted[i] += [current] * len(event)

        return emit

    for i, request in enumerate(requests):
        scheduler.submit(request, receive(i))
    due = sorted(rng.choice(np.arange(1, 12), len(weights) - 1, replace=False))
    in_round = []
    while not scheduler.idle:
        if current < len(due) and len(in_round) == due[current]:
            current += 1
            scheduler.update(device.place(weights[current]), current)
            assert scheduler.pause_s > 0
        scheduler.round()
        in_round.append(current)
    device.swap(device.place(weights[0]))
    # a round reads one chunk of every prompt
    chunks = [np.arange(len(r.prompt) - 1) // engine.prefill_chunk for r in requests]
    read_by = [np.take(in_round, chunk) for chunk in chunks]
    return [(completions[i], read_by[i], emitted[i]) for i in range(len(requests))]


@pytest.mark.parametrize("after_update", ["keep", "recompute"])
def test_weights_that_change_at_random_tokens(
    after_update, device, model, weights, mixed_log_probs, expected_log_probs
):
    """Lengths and ends are as without updates, versions those in use, log-probabilities documented.

    keep: of the newest weights over entries that older ones made. recompute: of the weights that
    the token names, alone. Before the first update both are the old weights' forward pass.
    """
    gap, several, places = 0.0, 0, set()
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        requests = random_requests(rng, model.vocab)
        undisturbed = run(Scheduler(device, device.engine, model.vocab), requests)
        updated = with_updates(device, weights, requests, after_update, rng)
        for request, without, (c, read_by, emitted) in zip(
            requests, undisturbed, updated, strict=True
        ):
            length = min((place + 1 for place in request.forced), default=request.max_tokens)
            if not (request.stop and (c.tokens[: length - 1] == STOP).any()):  # by chance
                assert len(c.tokens) == length
                assert c.finish == ("stop" if request.stop else "length")
            if not (request.stop and (without.tokens[: length - 1] == STOP).any()):
                assert len(without.tokens) == length
            assert c.versions.tolist() == emitted and emitted == sorted(emitted)
            first = c.versions == 0
            np.testing.assert_array_equal(c.tokens[first], without.tokens[: first.sum()])
            clean = np.stack([expected_log_probs(w, c) for w in weights])
            clean = clean[c.versions, np.arange(len(c.tokens))]
            np.testing.assert_allclose(c.log_probs[first], clean[first], atol=1e-5)
            mixed = mixed_log_probs(weights, c, read_by)
            expected = mixed if after_update == "keep" else clean
            np.testing.assert_allclose(c.log_probs, expected, atol=1e-5)
            gap = max(gap, np.abs(mixed - clean).max())
            several += len(set(emitted)) > 1
            places |= {place % 4 for place in np.flatnonzero(np.diff(emitted)).tolist()}
    assert gap > 1e-3 and several > 10 and places == {0, 1, 2, 3}  # or nothing was shown


def test_updates_with_prefixes(device, model, weights, expected_log_probs):
    """Groups with common prompts, more than fit: as if everything had been read afresh."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(model.vocab, size=n).tolist() for n in (17, 25)]
    requests = [
        Request(prompt=prompts[i % 2], max_tokens=int(rng.integers(4, 30)), seed=1, id=i)
        for i in range(24)
    ]
    engine = replace(device.engine, after_update="recompute")
    scheduler = Scheduler(Halting(device, rng), engine, model.vocab)
    completions = []
    for request in requests:
        scheduler.submit(request, lambda e: isinstance(e, Completion) and completions.append(e))
    for version in (1, 2):
        for _ in range(9):
            scheduler.round()
        scheduler.update(device.place(weights[version]), version)
    while not scheduler.idle:
        scheduler.round()
    device.swap(device.place(weights[0]))
    assert len(completions) == 24 and scheduler.metrics()["prefix_tokens"] > 100
    assert len({tuple(np.unique(c.versions)) for c in completions}) > 3
    for c in completions:
        clean = np.stack([expected_log_probs(w, c) for w in weights])
        clean = clean[c.versions, np.arange(len(c.tokens))]
        np.testing.assert_allclose(c.log_probs, clean, atol=1e-5)


def test_a_prefix_of_older_weights_is_not_used(device, model, weights, expected_log_probs):
    scheduler = Scheduler(device, device.engine, model.vocab)
    prompt = list(range(30))
    first = Request(prompt=prompt, max_tokens=4)
    run(scheduler, [first])
    run(scheduler, [replace(first, id=1)])
    hits = scheduler.metrics()["prefix_tokens"]
    scheduler.update(device.place(weights[1]), 1)
    (after,) = run(scheduler, [replace(first, id=2)])
    assert hits == 29 == scheduler.metrics()["prefix_tokens"]
    np.testing.assert_allclose(after.log_probs, expected_log_probs(weights[1], after), atol=1e-5)
    device.swap(device.place(weights[0]))
