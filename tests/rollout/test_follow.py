"""From a trainer's parameters through a store into an engine that goes on sampling."""

import asyncio
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from c2 import models
from c2.rollout import engine as engines
from c2.rollout import layers
from c2.rollout.config import EngineConfig, Request
from c2.rollout.engine import Engine
from c2.rollout.follow import Follower, subscribe
from c2.weights import serving
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.shards import whole
from c2.weights.store import open_store

VERSIONS = 4
CHUNK = 8


@pytest.fixture(scope="module")
def policies(weights):
    """Parameters of the version 0 and of all that are published."""
    rng = np.random.default_rng(0)

    def moved(x):
        return x * (1 + 0.1 * rng.normal(size=x.shape)).astype(x.dtype)

    trained = [weights[0]]
    for _ in range(VERSIONS):
        trained.append(jax.tree.map(moved, trained[-1]))
    return trained


def sample_while_training(engine, policies, publisher, rng):
    """Publishes every policy once a token of the one before has been sampled; all completions."""
    seen = [threading.Event() for _ in policies]
    done, completions = threading.Event(), []

    async def client(number):
        count = 0
        while not done.is_set():
            prompt = rng.integers(engine.cfg.vocab, size=1 + int(rng.integers(CHUNK))).tolist()
            request = Request(prompt=prompt, max_tokens=50, seed=number, id=count)
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()

            def emit(event, loop=loop, ended=ended):
                if isinstance(event, list):
                    seen[event[0].version].set()
                else:
                    completions.append(event)
                    loop.call_soon_threadsafe(ended.set)

            engine.submit(request, emit)
            await ended.wait()
            count += 1

    def train():
        for step, params in enumerate(policies):
            if step:
                publisher.publish(step, whole(publisher.form(params)))
            assert seen[step].wait(60), f"no token of version {step}"
        done.set()

    async def everyone():
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(train))
            for number in range(6):
                group.create_task(client(number))

    asyncio.run(everyone())
    return completions


@pytest.mark.parametrize("after_update", ["keep", "recompute"])
def test_every_token_is_of_the_version_that_the_trainer_published(
    after_update,
    tmp_path,
    monkeypatch,
    lent_device,
    model,
    policies,
    mixed_log_probs,
    expected_log_probs,
):
    device = lent_device
    monkeypatch.setattr(engines, "Device", lambda *_: device)
    store, rng = open_store(str(tmp_path)), np.random.default_rng(1)
    config = replace(device.engine, after_update=after_update, prefix_entries=0)
    device.swap(device.place(policies[0]))
    with (
        Engine(None, model, config) as engine,
        Follower(engine, subscribe(store, model), seconds=30) as follower,
        Publisher(
            store, PublisherConfig(anchor_every=3), owner="test", notify=lambda _: follower.wake()
        ) as publisher,
    ):
        publisher.form = serving.make_serving_form(models.spec(model), model.dtype)
        completions = sample_while_training(engine, policies, publisher, rng)
        metrics = follower.metrics() | {"engine": engine.metrics()["version"]}
    assert metrics["version"] == metrics["engine"] == metrics["step"] == VERSIONS
    assert min(metrics[key] for key in ("read", "read_s", "decode_s", "place_s", "swap_s")) > 0
    assert {v for c in completions for v in c.versions.tolist()} == set(range(VERSIONS + 1))
    assert sum(len(set(c.versions.tolist())) > 1 for c in completions) >= VERSIONS
    assert {len(c.tokens) for c in completions} == {50}
    for c in completions:
        assert (np.diff(c.versions) >= 0).all()
        if after_update == "recompute":
            clean = np.stack([expected_log_probs(policies[v], c) for v in np.unique(c.versions)])
            expected = clean[np.unique(c.versions, return_inverse=True)[1], np.arange(50)]
        else:  # prompts are read in one chunk, by the weights of the first token
            read_by = np.full(len(c.prompt) - 1, c.versions[0])
            expected = mixed_log_probs(policies, c, read_by)
        np.testing.assert_allclose(c.log_probs, expected, atol=1e-5)


def test_masters_and_what_is_published_of_them_are_the_same_to_an_engine(
    tiny_config, random_params
):
    cfg = replace(tiny_config, layers=2, mtp=1, dtype="bfloat16")
    masters, specs = random_params(cfg), models.spec(cfg)
    tensors = serving.make_serving_form(specs, cfg.dtype)(masters)
    published = serving.restore({name: np.asarray(x) for name, x in tensors.items()}, specs)
    served = layers.serving(published, cfg)

    def same(a, b):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(same, served, layers.serving(masters, cfg))
    dtypes = {str(x.dtype) for x in jax.tree.leaves(served)}
    assert dtypes == {"bfloat16", "float32"}


@pytest.fixture
def fake(monkeypatch, model, fake_device):
    """An engine without a model, and what is placed on its device."""
    config = EngineConfig(slots=1, capacity=100, prefill_rows=1, prefill_chunk=4, steps=2)
    placed = []

    class Placing(fake_device):
        def place(self, params):
            placed.append(params)
            return len(placed)

    monkeypatch.setattr(engines, "Device", lambda *_: Placing(config, vocab=model.vocab))
    engine = Engine(None, model, config)
    yield engine, placed
    engine.close()


def publish(publisher, form, params, step):
    publisher.publish(step, whole(form(params)))
    return publisher.wait()


def test_a_follower_goes_on_from_what_the_engine_began_with(tmp_path, fake, model, weights):
    engine, placed = fake
    store, form = (
        open_store(str(tmp_path)),
        serving.make_serving_form(models.spec(model), "float32"),
    )
    subscriber, swapped = subscribe(store, model), threading.Event()
    stage = engine.stage
    engine.stage = lambda *args: swapped.set() or stage(*args)
    with Publisher(store, PublisherConfig(), owner="test") as publisher:
        publish(publisher, form, weights[0], 10)
        assert subscriber.poll()
        with Follower(engine, subscriber, seconds=0.01) as follower:
            publish(publisher, form, weights[1], 20)
            assert swapped.wait(10)
    metrics = follower.metrics()
    assert (metrics["version"], metrics["step"], metrics["following"]) == (2, 20, False)
    assert len(placed) == 1 and engine.metrics()["version"] == 2
    jax.tree.map(np.testing.assert_array_equal, placed[0], weights[1])


def test_a_follower_of_a_closed_engine_ends(tmp_path, fake, model, weights):
    engine, _ = fake
    store, form = (
        open_store(str(tmp_path)),
        serving.make_serving_form(models.spec(model), "float32"),
    )
    follower = Follower(engine, subscribe(store, model), seconds=0.01)
    engine.close()
    with Publisher(store, PublisherConfig(), owner="test") as publisher:
        publish(publisher, form, weights[1], 1)
    follower._thread.join(10)
    assert not follower.metrics()["following"]
