"""The engine's thread and its asynchronous front, on a device without a model."""

import asyncio
import threading

import numpy as np
import pytest

from c2.config import ConfigError
from c2.records import Completion
from c2.rollout import engine as engines
from c2.rollout.config import EngineConfig, Request
from c2.rollout.engine import Engine, EngineError

CONFIG = EngineConfig(slots=2, capacity=4000, prefill_rows=1, prefill_chunk=4, steps=2)


@pytest.fixture
def start(monkeypatch, model, fake_device):
    """Starts an engine on a fake device, and closes it."""
    started = []

    def build(device_type=fake_device, config=CONFIG):
        device = device_type(config, vocab=model.vocab)
        monkeypatch.setattr(engines, "Device", lambda *_: device)
        started.append(Engine(None, model, config))
        return started[-1], device

    yield build
    for engine in started:
        engine.close()
    assert not [t for t in threading.enumerate() if t.name == "rollout-engine"]


def test_tokens_stream_and_a_completion_holds_the_same(start):
    engine, _ = start()
    request = Request(prompt=[1, 2, 3], max_tokens=9, seed=5)

    async def both():
        streamed = [token async for token in engine.stream(request)]
        return streamed, await engine.complete(request)

    streamed, completion = asyncio.run(both())
    assert [t.id for t in streamed] == completion.tokens.tolist() and len(streamed) == 9
    np.testing.assert_allclose([t.log_prob for t in streamed], completion.log_probs)


def test_many_requests_at_once_are_all_answered(start):
    engine, device = start()

    async def all_of(n):
        requests = [Request(prompt=[i, i + 1], max_tokens=1 + i % 7, id=i) for i in range(n)]
        return await asyncio.gather(*map(engine.complete, requests))

    completions = asyncio.run(all_of(40))
    for i, c in enumerate(completions):
        assert c.prompt.tolist() == [i, i + 1] and len(c.tokens) == 1 + i % 7
        assert c.tokens[0] == device.next_token([i, i + 1], 0, i, 0)
    metrics = engine.metrics()
    assert metrics["ended"] == 40 and metrics["running"] == 0


def test_whoever_leaves_frees_the_slot(start):
    """Leaving a stream or cancelling a task: later requests get the two slots."""
    engine, _ = start()
    endless = [Request(prompt=[i], max_tokens=3000, id=i) for i in range(4)]

    async def leave():
        first, second = engine.stream(endless[0]), engine.stream(endless[1])
        await anext(first)
        await anext(second)
        queued = [asyncio.create_task(engine.complete(r)) for r in endless[2:]]
        await asyncio.sleep(0)
        for task in queued:
            task.cancel()
        await first.aclose()
        await second.aclose()
        return await engine.complete(Request(prompt=[9], max_tokens=2))

    assert len(asyncio.run(leave()).tokens) == 2
    assert engine.metrics()["running"] == engine.metrics()["waiting"] == 0


def test_new_weights_in_flight(start):
    engine, device = start()
    request = Request(prompt=[1], max_tokens=1000)

    async def update_once_it_runs():
        stream = engine.stream(request)
        tokens = [await anext(stream)]
        assert await asyncio.wrap_future(engine.stage("new", 3)) == 3
        tokens += [token async for token in stream]
        return tokens

    tokens = asyncio.run(update_once_it_runs())
    versions = [t.version for t in tokens]
    assert len(tokens) == 1000 and versions == sorted(versions) and set(versions) == {0, 3}
    known = [1, *(t.id for t in tokens)]
    place = versions.index(3)
    assert known[place + 1] == device.next_token(known[: place + 1], 0, 0, "new")
    with pytest.raises(ConfigError, match="version: 3; legal: above"):
        engine.stage("older", 3).result(10)
    assert engine.metrics()["version"] == 3


def test_decoding_goes_on_while_weights_are_staged(start, fake_device):
    """All of a request is sampled between the beginning and the end of `stage`."""
    begun, ended = threading.Event(), threading.Event()

    class Slow(fake_device):
        def place(self, params):
            begun.set()
            assert ended.wait(10)
            return params

        def decode(self, slots, *, speculate=False):
            assert begun.wait(10)
            return super().decode(slots, speculate=speculate)

    engine, _ = start(Slow)
    events = []

    def emit(event):
        events.append(event)
        if isinstance(event, Completion):
            ended.set()

    engine.submit(Request(prompt=[1], max_tokens=20), emit)
    assert engine.stage("new", 1).result(10) == 1
    assert len(events) == 11 and set(events[-1].versions) == {0}


def test_bad_requests_are_refused_at_once(start):
    engine, _ = start()
    with pytest.raises(ConfigError, match="capacity"):
        asyncio.run(engine.complete(Request(prompt=[1] * 4000, max_tokens=1)))
    assert engine.metrics()["ended"] == 0


def test_a_failing_device_fails_all_who_wait(start, fake_device):
    class Broken(fake_device):
        def decode(self, slots, *, speculate=False):
            raise RuntimeError("the chip is on fire")

    engine, _ = start(Broken)

    async def both():
        requests = [Request(prompt=[i], max_tokens=5) for i in range(5)]
        return await asyncio.gather(*map(engine.complete, requests), return_exceptions=True)

    errors = asyncio.run(both())
    assert all(isinstance(e, RuntimeError) for e in errors)
    assert any("on fire" in str(e) for e in errors)
    with pytest.raises(EngineError, match="does not run"):
        asyncio.run(engine.complete(Request(prompt=[1], max_tokens=5)))


def test_whatever_was_not_begun_is_refused(start, fake_device):
    """What lies in the inbox when the engine fails: a request and new weights."""
    deciding, posted = threading.Event(), threading.Event()

    class Broken(fake_device):
        def decode(self, slots, *, speculate=False):
            deciding.set()
            posted.wait(10)
            raise RuntimeError("the chip is on fire")

    engine, _ = start(Broken)
    events = []
    engine.submit(Request(prompt=[1], max_tokens=5), events.append)
    deciding.wait(10)
    engine.submit(Request(prompt=[2], max_tokens=5), events.append)
    future = engine.stage("new", 1)
    posted.set()
    with pytest.raises(RuntimeError, match="on fire"):
        future.result(10)
    assert len(events) == 2 and all("on fire" in str(e) for e in events)


def test_closing_tells_whoever_waits(start):
    engine, _ = start()

    async def closed_meanwhile():
        stream = engine.stream(Request(prompt=[1], max_tokens=3000))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="closed"):
            [token async for token in stream]

    asyncio.run(closed_meanwhile())
    engine.close()  # once more does no harm
