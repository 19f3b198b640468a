"""What tests of the engine share: one compiled engine, one that drafts, and one without a model."""

import hashlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.rollout.config import EngineConfig
from c2.rollout.device import Device
from c2.rollout.programs import Emitted

ENGINE = EngineConfig(
    slots=8, capacity=64, prefill_rows=3, prefill_chunk=8, steps=4, prefix_entries=3
)


def compiled(params, cfg, engine):
    """A device whose programs run a few times only, so that compiling them may be quick."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return Device(params, cfg, engine)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def model(tiny_config):
    return replace(tiny_config, mtp=1)


@pytest.fixture(scope="session")
def weights(model, random_params):
    """Three policies, as if training had gone on: alike, but not the same."""
    base, noise = random_params(model), random_params(model, seed=1)
    return [jax.tree.map(lambda a, b, k=k: a + 0.1 * k * b, base, noise) for k in range(3)]


@pytest.fixture(scope="session")
def device(model, weights):
    return compiled(weights[0], model, ENGINE)


@pytest.fixture
def lent_device(device, weights):
    """The same for a test that changes its weights; others get it back with the first ones."""
    yield device
    device.swap(device.place(weights[0]))


@pytest.fixture(scope="session")
def build_device(model, weights):
    """Builds a device with other shapes, or of another model."""

    def build(cfg=model, params=weights[0], **fields):
        return compiled(params, cfg, replace(ENGINE, **fields))

    return build


@pytest.fixture(scope="session")
def drafting_device(model, weights):
    return compiled(weights[0], model, replace(ENGINE, training=False, speculate=True))


@pytest.fixture(scope="session")
def forward(model):
    """The trainer's forward pass over whole sequences: (params, sequence) -> logits, routes."""
    options = {"xla_backend_optimization_level": 0}
    run = jax.jit(models.forward, static_argnames="cfg", compiler_options=options)

    def over(params, tokens):
        padded = np.zeros((1, ENGINE.capacity), np.int32)
        padded[0, : len(tokens)] = tokens
        real = (np.arange(ENGINE.capacity) < len(tokens)).astype(np.int32)[None]
        out = run(params, padded, model, segment_ids=real)
        return np.asarray(out.logits[0, : len(tokens)]), np.asarray(out.routes[0, : len(tokens)])

    return over


@pytest.fixture(scope="session")
def expected_log_probs(forward):
    """Log-probabilities of a completion's tokens by the trainer."""

    def of(params, completion):
        tokens = np.concatenate([completion.prompt, completion.tokens])
        logits = jnp.asarray(forward(params, tokens)[0]) / completion.temperature
        places = np.arange(len(completion.prompt) - 1, len(tokens) - 1)
        return np.asarray(jax.nn.log_softmax(logits))[places, completion.tokens]

    return of


@pytest.fixture(scope="session")
def mixed_log_probs(model):
    """Log-probabilities of a completion's tokens by a cache that several policies have filled.

    (policies, completion, read_by) -> f32 [token]; ``read_by`` [prompt - 1] says which policy read
    each token of the prompt. Every other entry is of the policy that it was fed to: the one that
    sampled the next token.
    """
    chunk = 8
    options = {"xla_backend_optimization_level": 0}

    @partial(jax.jit, compiler_options=options)
    def step(params, tokens, real, cache):
        out = models.forward(params, tokens, model, segment_ids=real, cache=cache)
        return out.logits, out.cache

    def feed(params, cache, tokens):
        logits = []
        for begin in range(0, len(tokens), chunk):
            piece = tokens[begin : begin + chunk]
            padded, real = np.zeros((2, 1, chunk), np.int32)
            padded[0, : len(piece)], real[0, : len(piece)] = piece, 1
            out, cache = step(params, padded, real, cache)
            logits.append(np.asarray(out[0, : len(piece)]))
        return np.concatenate(logits), cache

    def of(policies, completion, read_by):
        tokens = np.concatenate([completion.prompt, completion.tokens])[:-1]
        fed_to = np.concatenate([read_by, completion.versions])
        cache, logits = models.init_cache(model, 1, ENGINE.capacity), []
        for version in np.unique(fed_to):
            out, cache = feed(policies[version], cache, tokens[fed_to == version])
            logits.append(out)
        logits = np.concatenate(logits)[len(read_by) :] / completion.temperature
        log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
        return log_probs[np.arange(len(completion.tokens)), completion.tokens]

    return of


class FakeDevice:
    """A policy without a model: the next token is a hash of all before it and of the weights.

    It remembers which tokens lie in which slot, so that a wrong slot, length or order changes the
    tokens that come out; and which weights made each entry, which must fit `after_update`. The step
    it emits at does not matter.
    """

    compilations = 0

    def __init__(self, engine, vocab=50, params=0):
        self.engine, self.vocab, self.params = engine, vocab, params
        self.cache = [[] for _ in range(engine.slots)]
        self.kept = [[] for _ in range(engine.prefix_entries)]
        self.swaps = 0
        self.made = [[] for _ in range(engine.slots)]  # number of swaps before each entry
        self.kept_made = [[] for _ in range(engine.prefix_entries)]

    def next_token(self, tokens, seed, request, params):
        text = repr(([int(t) for t in tokens], int(seed), int(request), params)).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % self.vocab

    def step_seconds(self):
        return 1.0, 1.5

    def place(self, params):
        return params

    def swap(self, params):
        self.params = params
        self.swaps += 1

    def prefill(self, chunk):
        for slot, length, tokens, count in zip(
            chunk.slot, chunk.length, chunk.tokens, chunk.count, strict=True
        ):
            if count:
                self.cache[slot] = self.cache[slot][:length] + [int(t) for t in tokens[:count]]
                assert len(self.cache[slot]) == length + count
                self.made[slot] = self.made[slot][:length] + [self.swaps] * int(count)
        return np.repeat(chunk.tokens[..., None, None], 2, axis=-1).astype(np.int16)

    def decode(self, slots, *, speculate=False):
        shape = (self.engine.steps, self.engine.slots, 1)
        tokens = np.full(shape, -1, np.int32)
        routes = np.full((*shape, 1, 2), -2, np.int16)
        for slot in np.flatnonzero(slots.live):
            cache, last = self.cache[slot][: slots.length[slot]], int(slots.last[slot])
            assert len(cache) == slots.length[slot]
            made = self.made[slot][: len(cache)]
            assert made == sorted(made)
            assert self.engine.after_update == "keep" or set(made) <= {self.swaps}
            count = int(slots.count[slot])
            for step in range(self.engine.steps):
                cache.append(last)
                routes[step, slot] = last
                forced = int(slots.forced[slot, step])
                seeds = slots.seed[slot], slots.request[slot]
                last = forced if forced >= 0 else self.next_token(cache, *seeds, self.params)
                tokens[step, slot], count = last, count + 1
                if last in slots.stop[slot] or count == slots.budget[slot]:
                    break
            self.cache[slot] = cache
            self.made[slot] = made + [self.swaps] * (len(cache) - len(made))
        log_probs = -tokens.astype(np.float32)
        nothing = np.zeros(shape[:2], bool)
        return Emitted(tokens, log_probs, routes, nothing, nothing)

    def keep(self, slot, entry):
        self.kept[entry], self.kept_made[entry] = list(self.cache[slot]), list(self.made[slot])

    def take(self, entry, slot):
        self.cache[slot], self.made[slot] = list(self.kept[entry]), list(self.kept_made[entry])
        assert set(self.made[slot]) == {self.swaps}


@pytest.fixture(scope="session")
def fake_device():
    return FakeDevice
