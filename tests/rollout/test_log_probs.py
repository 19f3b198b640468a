"""What the engine records against the trainer's forward pass over the whole sequence."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from c2.rollout.config import Request
from c2.rollout.scheduler import Scheduler, run

TEMPERATURES = (0.6, 1.0, 1.4)


def random_requests(count, vocab, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        prompt = rng.integers(vocab, size=rng.integers(1, 40)).tolist()
        forced = {int(p): int(rng.integers(vocab)) for p in rng.integers(0, 20, size=i % 3)}
        requests.append(
            Request(
                prompt=prompt,
                max_tokens=int(rng.integers(20, 24)) if forced else int(rng.integers(1, 24)),
                temperature=TEMPERATURES[i % 3],
                stop=(3, 4) if i % 2 else (),
                forced=forced,
                seed=7,
                id=i,
            )
        )
    return requests


@pytest.fixture(scope="module")
def sampled(device, model):
    """Twenty requests over eight slots, so that they come and go."""
    requests = random_requests(20, model.vocab)
    scheduler = Scheduler(device, device.engine, model.vocab)
    return requests, run(scheduler, requests), scheduler.metrics()


def test_log_probs_and_routes_are_the_trainers(sampled, weights, forward, expected_log_probs):
    _, completions, _ = sampled
    for c in completions:
        np.testing.assert_allclose(c.log_probs, expected_log_probs(weights[0], c), atol=1e-5)
        tokens = np.concatenate([c.prompt, c.tokens])
        _, routes = forward(weights[0], tokens)
        np.testing.assert_array_equal(c.routes[:-1], routes[:-1])
        assert (c.routes[-1] == -1).all() and c.routes.dtype == np.int16


def test_stop_tokens_budgets_and_forced_tokens_are_recorded(sampled):
    requests, completions, metrics = sampled
    assert {c.finish for c in completions} == {"stop", "length"}
    for request, c in zip(requests, completions, strict=True):
        stops = np.isin(c.tokens, request.stop)
        assert not stops[:-1].any() and (c.finish == "stop") == bool(stops[-1])
        assert len(c.tokens) == request.max_tokens or c.finish == "stop"
        places = [p for p in sorted(request.forced) if p < len(c.tokens)]
        assert np.flatnonzero(c.forced).tolist() == places
        assert c.tokens[places].tolist() == [request.forced[p] for p in places]
        assert c.prompt.tolist() == request.prompt and c.temperature == request.temperature
    assert metrics["tokens"] == sum(len(c.tokens) for c in completions)
    assert metrics["ended"] == 20 and metrics["running"] == metrics["waiting"] == 0


def test_a_sample_does_not_depend_on_what_else_is_sampled(sampled, device, model):
    """Bit for bit: neither on the company, nor on the slot, nor on the order."""
    requests, completions, _ = sampled
    scheduler = Scheduler(device, device.engine, model.vocab)
    some = [17, 4, 11]
    for i, c in zip(some, run(scheduler, [requests[i] for i in some]), strict=True):
        np.testing.assert_array_equal(c.tokens, completions[i].tokens)
        np.testing.assert_array_equal(c.log_probs, completions[i].log_probs)


def test_seed_and_id_decide(sampled, device, model):
    requests, completions, _ = sampled
    same, *others = (replace(requests[6], **change) for change in ({}, {"seed": 8}, {"id": 99}))
    scheduler = Scheduler(device, device.engine, model.vocab)
    again, *different = run(scheduler, [same, *others])
    assert again.tokens.tolist() == completions[6].tokens.tolist()
    assert len({tuple(c.tokens.tolist()) for c in (again, *different)}) == 3


def test_nothing_is_compiled_while_running(device, model):
    compiled = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    scheduler = Scheduler(device, device.engine, model.vocab)
    before = scheduler.metrics()["compilations"]
    run(scheduler, random_requests(5, model.vocab, seed=1))
    run(scheduler, random_requests(11, model.vocab, seed=2))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled and scheduler.metrics()["compilations"] == before == 5


def test_chunks_and_steps_do_not_matter(sampled, model, build_device):
    """Other slots, chunks and steps per dispatch: the same tokens, log-probabilities to 1e-5."""
    requests, completions, _ = sampled
    device = build_device(slots=3, prefill_rows=1, prefill_chunk=13, steps=3, prefix_entries=0)
    again = run(Scheduler(device, device.engine, model.vocab), requests[:9])
    for one, other in zip(completions, again, strict=False):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        np.testing.assert_array_equal(one.routes, other.routes)
