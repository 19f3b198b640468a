"""Other models than the one of the other tests, with the engine's routes replayed."""

import queue
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.config import ConfigError
from c2.models import GQAConfig, MLAConfig
from c2.models.compiling import ROUND_AS_WRITTEN
from c2.rollout import engine as engines
from c2.rollout.config import Request
from c2.rollout.engine import Engine
from c2.rollout.follow import Follower, subscribe
from c2.rollout.scheduler import Scheduler, run
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.serving import experts_for, make_serving_form, restore
from c2.weights.shards import whole
from c2.weights.store import open_store

EXPANDED = MLAConfig(heads=2, q_lora=24, kv_lora=20, nope=12, rope=8, v=10, absorb=False)
GROUPED = GQAConfig(heads=4, kv_heads=2, head_dim=8, qk_norm=True)


def sample(device, cfg):
    """Completions behind short and long prompts, at all temperatures."""
    rng = np.random.default_rng(0)
    requests = [
        Request(prompt=rng.integers(61, size=n).tolist(), max_tokens=20, id=n, temperature=t)
        for n, t in ((1, 0.6), (9, 1.0), (30, 1.4))
    ]
    return run(Scheduler(device, device.engine, cfg.vocab), requests)


def trainers_log_probs(cfg, params, completions):
    """By the forward pass over whole sequences; f32 [token] of all completions."""
    options = {"xla_backend_optimization_level": 0, **ROUND_AS_WRITTEN}

    @partial(jax.jit, compiler_options=options)
    def forward(tokens, segment_ids, routes):
        return models.forward(params, tokens, cfg, segment_ids=segment_ids, routes=routes).logits

    out = []
    for c in completions:
        tokens = np.concatenate([c.prompt, c.tokens])
        row, real = np.zeros((2, 1, 64), np.int32)
        row[0, : len(tokens)], real[0, : len(tokens)] = tokens, 1
        routes = np.full((1, 64, *c.routes.shape[1:]), -2, np.int16)
        routes[0, : len(tokens)] = c.routes
        replayed = routes if cfg.moe else None
        log_probs = jax.nn.log_softmax(forward(row, real, replayed)[0] / c.temperature)
        places = jnp.arange(len(c.prompt) - 1, len(tokens) - 1)
        out.append(log_probs[places, c.tokens])
    return np.concatenate(out)


def recorded(completions):
    return np.concatenate([c.log_probs for c in completions])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "atol"),
    [
        pytest.param({"attention": GROUPED, "mtp": 0}, 1e-5, id="grouped queries"),
        pytest.param(
            {"attention": GROUPED, "mtp": 0, "dtype": "bfloat16"}, 1e-2, id="grouped queries, bf16"
        ),
        pytest.param({"moe": None, "dense_layers": 3, "mtp": 0}, 1e-5, id="dense"),
        pytest.param({"attention": EXPANDED, "mtp": 0}, 1e-5, id="expanded latents"),
        # sums this short come in one order whoever computes them; longer ones need not, and then
        # a rounding may fall the other way, and all behind it differ
        pytest.param(
            {"attention": EXPANDED, "mtp": 0, "dtype": "bfloat16"}, 1e-2, id="expanded, bf16"
        ),
    ],
)
def test_log_probs_are_the_trainers(fields, atol, model, random_params, build_device):
    cfg = replace(model, **fields)
    params = random_params(cfg)
    completions = sample(build_device(cfg, params, prefix_entries=0), cfg)
    expected = trainers_log_probs(cfg, params, completions)
    np.testing.assert_allclose(recorded(completions), expected, atol=atol)


@pytest.fixture(scope="module")
def latents_in_bf16(model, random_params, build_device):
    """Log-probabilities by the engine, the trainer, and exact arithmetic with the same numbers."""
    cfg = replace(model, dtype="bfloat16", mtp=0)
    params = random_params(cfg)
    completions = sample(build_device(cfg, params, prefix_entries=0), cfg)
    used = jax.tree.map(
        lambda s, x: x.astype(s.used_as(cfg.dtype)).astype(s.dtype), models.spec(cfg), params
    )
    trainer = trainers_log_probs(cfg, params, completions)
    exact = trainers_log_probs(replace(cfg, dtype="float32"), used, completions)
    return recorded(completions), trainer, exact


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,  # the bound stands; whoever reaches it takes this out
    reason="latents decode without expanded keys and values, which are rounded to bf16",
)
def test_log_probs_are_the_trainers_in_bf16(latents_in_bf16):
    engine, trainer, _ = latents_in_bf16
    np.testing.assert_allclose(engine, trainer, atol=1e-2)


@pytest.mark.slow
def test_in_bf16_the_engine_rounds_no_more_than_the_trainer(latents_in_bf16):
    """Why 1e-2 is out of reach: the trainer is further than that from exact arithmetic.

    So is then any engine that does not repeat the trainer's very roundings, however precise it is.
    """
    engine, trainer, exact = latents_in_bf16
    assert np.abs(trainer - exact).max() > 1e-2
    assert np.sqrt(np.mean((engine - exact) ** 2)) < 1.5 * np.sqrt(np.mean((trainer - exact) ** 2))


@pytest.fixture(scope="module")
def nvfp4(model, random_params, build_device):
    """A model with NVFP4 experts, its masters, and a device with what is published of them."""
    moe = replace(model.moe, intermediate=32, precision="nvfp4_fwd_mxfp8_bwd")
    cfg = replace(model, moe=moe)
    params = random_params(cfg)
    form = make_serving_form(models.spec(cfg), cfg.dtype, experts_for(moe.precision))
    published = restore(form(params), models.spec(cfg))
    return cfg, params, form, build_device(cfg, published, prefix_entries=0)


@pytest.mark.slow
def test_published_nvfp4_experts_give_the_trainers_numbers(nvfp4):
    """The engine gets codes, the trainer has masters and quantises."""
    cfg, params, _, device = nvfp4
    assert device.params.moe[0].moe.gate_up.codes.dtype == jnp.uint8
    completions = sample(device, cfg)
    expected = trainers_log_probs(cfg, params, completions)
    np.testing.assert_allclose(recorded(completions), expected, atol=1e-5)
    native = trainers_log_probs(
        replace(cfg, moe=replace(cfg.moe, precision="native")), params, completions
    )
    assert np.abs(native - expected).max() > 1e-2

    placed = device.place(params)  # masters become the same codes
    for one, other in zip(*map(jax.tree.leaves, (placed, device.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ConfigError, match="tree is not the model's"):
        device.place(params.replace(norm=None))


@pytest.mark.slow
def test_nvfp4_experts_arrive_while_an_engine_samples(tmp_path, monkeypatch, nvfp4, random_params):
    """From the trainer's masters through a store and a swap to the numbers of their forward."""
    cfg, params, form, device = nvfp4
    monkeypatch.setattr(engines, "Device", lambda *_: device)
    newer, store = random_params(cfg, seed=1), open_store(str(tmp_path))
    swaps, events = queue.SimpleQueue(), queue.SimpleQueue()

    def completion(engine):
        prompt = np.arange(9).tolist()
        engine.submit(Request(prompt=prompt, max_tokens=20, id=0), events.put)
        while isinstance(event := events.get(timeout=60), list):
            pass
        return event

    with (
        Engine(None, cfg, device.engine) as engine,
        Follower(engine, subscribe(store, cfg), seconds=60) as follower,
        Publisher(
            store, PublisherConfig(), owner="test", notify=lambda _: follower.wake()
        ) as publisher,
    ):
        stage = engine.stage
        monkeypatch.setattr(engine, "stage", lambda *args: told(swaps, stage(*args)))
        before = completion(engine)
        publisher.publish(1, whole(form(newer)))
        swaps.get(timeout=60).result(60)
        after = completion(engine)
        held = device.params
        device.swap(device.place(params))
    for one, other in zip(*map(jax.tree.leaves, (held, device.place(newer))), strict=True):
        np.testing.assert_array_equal(one, other)
    for masters, c, version in ((params, before, 0), (newer, after, 1)):
        assert set(c.versions.tolist()) == {version}
        np.testing.assert_allclose(c.log_probs, trainers_log_probs(cfg, masters, [c]), atol=1e-5)


def told(queue, value):
    queue.put(value)
    return value
