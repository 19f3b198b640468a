"""Drafting changes how fast tokens come, and nothing else."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.config import ConfigError
from c2.models import mtp
from c2.rollout import layers
from c2.rollout.config import Request
from c2.rollout.device import Device
from c2.rollout.payoff import Payoff
from c2.rollout.scheduler import Scheduler, run


@pytest.fixture
def sample(drafting_device, model, monkeypatch):
    """Runs requests with or without drafts on the same device; returns completions, metrics."""

    def go(requests, *, drafts):
        # a speculative step that costs nothing always pays, one that costs a lot never does
        seconds = (1.0, 1.0) if drafts else (1.0, 1e9)
        monkeypatch.setattr(drafting_device, "step_seconds", lambda: seconds)
        scheduler = Scheduler(drafting_device, drafting_device.engine, model.vocab)
        if not drafts:
            scheduler._payoff.observe(1000, 0)
        return run(scheduler, requests), scheduler.metrics()

    return go


def some_requests(vocab, count=10, **fields):
    rng = np.random.default_rng(5)
    return [
        Request(
            prompt=rng.integers(vocab, size=rng.integers(1, 30)).tolist(),
            max_tokens=int(rng.integers(1, 25)),
            stop=(3,) if i % 2 else (),
            id=i,
            **fields,
        )
        for i in range(count)
    ]


def test_the_cached_module_is_the_module(model, weights):
    """In pieces over a cache as over the whole sequence at once, where a next token is known."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.vocab, size=(2, 21))
    hidden = rng.normal(size=(2, 20, model.hidden)).astype(np.float32)
    p, real, length = weights[0], np.ones((2, 20), bool), 20
    options = {"xla_backend_optimization_level": 0}

    @partial(jax.jit, compiler_options=options)
    def whole(p, hidden, tokens):
        positions = jnp.broadcast_to(jnp.arange(length + 1), tokens.shape)
        hidden = jnp.pad(hidden, ((0, 0), (0, 1), (0, 0)))
        segments = jnp.ones_like(tokens)
        return mtp.trunk(
            p.mtp[0], p.embed, hidden, tokens, model, positions=positions, segment_ids=segments
        )[0][:, :length]

    @partial(jax.jit, compiler_options=options)
    def piece(p, past, hidden, following, real, length):
        return layers.module(p, layers.Below(hidden, None, past), following, real, length, model)

    past, got = layers.empty(model, 2, 24, mtp=True), []
    for begin in range(0, length, 5):
        here = slice(begin, begin + 5)
        following = tokens[:, begin + 1 : begin + 6]
        out, past = piece(p, past, hidden[:, here], following, real[:, here], np.full(2, begin))
        got.append(np.asarray(out))
    np.testing.assert_allclose(np.concatenate(got, 1), whole(p, hidden, tokens), atol=1e-5)


def test_greedy_output_is_the_same(sample, model, weights, forward):
    requests = some_requests(model.vocab, temperature=0.0)
    fast, metrics = sample(requests, drafts=True)
    slow, _ = sample(requests, drafts=False)
    assert 0 < metrics["acceptance"] < 1
    for a, b in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.routes, b.routes)
        assert a.finish == b.finish and (a.log_probs == 0).all()
        logits, _ = forward(weights[0], np.concatenate([a.prompt, a.tokens]))
        assert a.tokens.tolist() == logits[len(a.prompt) - 1 : -1].argmax(-1).tolist()


def test_log_probs_are_the_models_not_the_drafts(sample, weights, model, expected_log_probs):
    requests = [
        replace(r, temperature=t, forced={2: 9} if r.max_tokens > 2 else {})
        for r, t in zip(some_requests(model.vocab), (0.6, 1.0, 1.4) * 4, strict=False)
    ]
    completions, metrics = sample(requests, drafts=True)
    assert metrics["acceptance"] > 0.1
    for request, c in zip(requests, completions, strict=True):
        np.testing.assert_allclose(c.log_probs, expected_log_probs(weights[0], c), atol=1e-5)
        assert len(c.tokens) == request.max_tokens or c.finish == "stop"
        assert not c.forced[2:3].size or (c.tokens[2] == 9 and c.forced[2])


def test_sampled_output_has_the_exact_distribution(sample, weights, forward, model):
    """Chi-square of the two tokens after a dictated one: drafted, and sampled behind a draft."""
    prompt, dictated, count = [4, 8], 15, 2000
    requests = [
        Request(prompt=prompt, max_tokens=3, forced={0: dictated}, seed=3, id=i)
        for i in range(count)
    ]
    completions, metrics = sample(requests, drafts=True)
    assert metrics["acceptance"] > 0.1
    logits, _ = forward(weights[0], [*prompt, dictated])
    first = np.asarray(jax.nn.softmax(logits[-1]))
    after = [forward(weights[0], [*prompt, dictated, t])[0][-1] for t in range(model.vocab)]
    second = first @ np.asarray(jax.nn.softmax(jnp.asarray(after)))
    for place, probs in ((1, first), (2, second)):
        seen = np.bincount([c.tokens[place] for c in completions], minlength=model.vocab)
        expected = count * probs
        common = expected >= 5
        table = [
            (seen[common], expected[common]),
            (seen[~common].sum(keepdims=True), expected[~common].sum(keepdims=True)),
        ]
        statistic = sum(((s - e) ** 2 / np.maximum(e, 1e-9)).sum() for s, e in table)
        freedom = common.sum()
        assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_top_k_and_top_p_sample_from_what_is_left(sample, weights, forward, model):
    requests = [
        Request(prompt=[5, 6], max_tokens=1, top_k=k, top_p=p, id=i)
        for i, (k, p) in enumerate([(3, 1.0), (None, 0.3), (5, 0.2)] * 20)
    ]
    completions, _ = sample(requests, drafts=True)
    logits, _ = forward(weights[0], [5, 6])
    probs = np.asarray(jax.nn.softmax(logits[-1]))
    order = np.argsort(-probs)
    for request, c in zip(requests, completions, strict=True):
        enough = int(np.searchsorted(np.cumsum(probs[order]), request.top_p)) + 1
        left = order[: min(request.top_k or model.vocab, enough)]
        assert c.tokens[0] in left
        expected = np.log(probs[c.tokens[0]] / probs[left].sum())
        np.testing.assert_allclose(c.log_probs[0], expected, atol=1e-5)


def test_it_is_switched_off_while_it_does_not_pay(fake_device, drafting_device, model):
    engine = drafting_device.engine
    used = []

    class Device(fake_device):
        acceptance = 0.0

        def decode(self, slots, *, speculate=False):
            used.append(speculate)
            emitted = super().decode(slots)
            drafted = emitted.tokens[..., 0] >= 0
            return emitted.replace(drafted=drafted, accepted=drafted & (self.acceptance > 0))

    scheduler = Scheduler(Device(engine, model.vocab), engine, model.vocab)
    requests = [Request(prompt=[i], max_tokens=50, id=i) for i in range(8)]
    run(scheduler, requests)
    assert used[0] and not used[-1] and scheduler.metrics()["speculates"] is False
    scheduler.update(1, 1)  # new weights may draft better
    scheduler._device.acceptance = 1.0
    used.clear()
    run(scheduler, requests)
    assert all(used) and scheduler.metrics()["acceptance"] == 1.0


def test_it_pays_if_tokens_per_step_make_up_for_its_time():
    for acceptance, pays in ((0.45, False), (0.55, True)):
        payoff = Payoff(1.0, 1.5)
        payoff.observe(50, int(50 * acceptance))
        assert payoff.pays  # too early to say
        for _ in range(5):
            payoff.observe(1000, int(1000 * acceptance))
        assert payoff.pays == pays


def test_a_model_without_a_module_cannot_draft(model, weights, drafting_device):
    with pytest.raises(ConfigError, match="speculate: true, but the model's mtp = 0"):
        Device(weights[0], replace(model, mtp=0), drafting_device.engine)
