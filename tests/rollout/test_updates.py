"""New weights while sequences are being sampled."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.records import Completion
from c2.rollout.config import Request
from c2.rollout.scheduler import Scheduler, run

CHUNK = 8
FIRST_UPDATE = 3  # rounds before it


@pytest.fixture(scope="module")
def requests(model):
    rng = np.random.default_rng(3)
    return [
        Request(
            prompt=rng.integers(model.vocab, size=rng.integers(2, 30)).tolist(),
            max_tokens=30,
            temperature=(0.6, 1.0, 1.4)[i % 3],
            stop=(5,),
            # the stop token is dictated, so that no draw decides where a sequence ends
            forced={int(rng.integers(8, 29)): 5} if i % 2 else {},
            seed=2,
            id=i,
        )
        for i in range(8)
    ]


def with_updates(device, model, weights, requests, after_update):
    """Runs requests while weights change twice; some are still reading their prompts then."""
    engine = replace(device.engine, after_update=after_update)
    scheduler = Scheduler(device, engine, model.vocab)
    completions = [None] * len(requests)

    def receive(i):
        def emit(event):
            if isinstance(event, Completion):
                completions[i] = event

        return emit

    for i, request in enumerate(requests):
        scheduler.submit(request, receive(i))
    for version, rounds in ((1, FIRST_UPDATE), (2, 5)):
        for _ in range(rounds):
            scheduler.round()
        scheduler.update(device.place(weights[version]), version)
        assert scheduler.pause_s > 0
    while not scheduler.idle:
        scheduler.round()
    device.swap(device.place(weights[0]))
    return completions


@pytest.fixture(scope="module", params=["keep", "recompute"])
def updated(request, device, model, weights, requests):
    done = with_updates(device, model, weights, requests, request.param)
    return request.param, done


@pytest.fixture(scope="module")
def cached_forward(model):
    """Feeds a stretch of tokens to a cache: (params, cache, tokens) -> logits, cache."""
    options = {"xla_backend_optimization_level": 0}

    @partial(jax.jit, compiler_options=options)
    def step(params, chunk, real, cache):
        out = models.forward(params, chunk, model, segment_ids=real, cache=cache)
        return out.logits, out.cache

    def over(params, cache, tokens):
        logits = []
        for begin in range(0, len(tokens), CHUNK):
            piece = tokens[begin : begin + CHUNK]
            chunk, real = np.zeros((2, 1, CHUNK), np.int32)
            chunk[0, : len(piece)], real[0, : len(piece)] = piece, 1
            out, cache = step(params, chunk, real, cache)
            logits.append(np.asarray(out[0, : len(piece)]))
        return np.concatenate(logits), cache

    return over


def test_lengths_and_ends_are_those_without_an_update(updated, device, model, requests):
    undisturbed = run(Scheduler(device, device.engine, model.vocab), requests)
    _, completions = updated
    compared = 0
    for with_, without, request in zip(completions, undisturbed, requests, strict=True):
        if not any((c.tokens[~c.forced] == 5).any() for c in (with_, without)):  # by chance
            compared += 1
            dictated = min((p + 1 for p in request.forced), default=30)
            assert len(with_.tokens) == len(without.tokens) == dictated
            assert with_.finish == without.finish == ("stop" if request.forced else "length")
    assert compared >= 4 and {c.finish for c in completions} == {"stop", "length"}


def test_versions_never_decrease_and_all_three_occur(updated):
    _, completions = updated
    assert all((np.diff(c.versions) >= 0).all() for c in completions)
    assert {v for c in completions for v in c.versions.tolist()} == {0, 1, 2}


def test_every_token_has_the_log_probability_of_its_documented_forward(
    updated, model, weights, cached_forward, expected_log_probs
):
    """Before an update the old weights' forward pass; after it, depending on the config.

    keep: the new weights over entries that the old ones made. recompute: the new weights alone.
    """
    after_update, completions = updated
    gap = 0.0
    for c in completions:
        clean = np.stack([expected_log_probs(w, c) for w in weights])
        clean = clean[c.versions, np.arange(len(c.tokens))]
        if after_update == "recompute":
            np.testing.assert_allclose(c.log_probs, clean, atol=1e-5)
            continue
        read_by = np.arange(len(c.prompt) - 1) // CHUNK >= FIRST_UPDATE  # a chunk in a round
        if (read_by == c.versions[0]).all():
            first = c.versions == c.versions[0]
            np.testing.assert_allclose(c.log_probs[first], clean[first], atol=1e-5)
        tokens = np.concatenate([c.prompt, c.tokens])
        fed_by = np.concatenate([read_by, c.versions])
        cache, logits = models.init_cache(model, 1, 64), []
        for version in np.unique(fed_by):
            piece = tokens[:-1][fed_by == version]
            out, cache = cached_forward(weights[version], cache, piece)
            logits.append(out)
        logits = np.concatenate(logits)[len(c.prompt) - 1 :] / c.temperature
        mixed = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
        mixed = mixed[np.arange(len(c.tokens)), c.tokens]
        np.testing.assert_allclose(c.log_probs, mixed, atol=1e-5)
        gap = max(gap, np.abs(c.log_probs - clean).max())
    assert after_update == "recompute" or gap > 1e-3  # the mixed forward is another one


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
