"""The scheduler under random requests, cancellations and new weights, on a device without a model.

The fake policy's next token depends on all tokens before it, so a completion can be foretold
without any scheduling, and every mistake about slots, lengths or prefixes changes it.
"""

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from c2.config import ConfigError
from c2.records import Completion
from c2.rollout.config import EngineConfig, Request
from c2.rollout.scheduler import Scheduler, run

ENGINE = EngineConfig(
    slots=3, capacity=40, prefill_rows=2, prefill_chunk=4, steps=3, prefix_entries=2
)
VOCAB = 50

prompts = st.integers(0, 2).flatmap(  # three families, so that prompts begin alike
    lambda family: st.integers(1, 20).map(lambda n: [family + (i % 7) for i in range(n)])
)
requests = st.builds(
    Request,
    prompt=prompts,
    max_tokens=st.integers(5, 15),
    stop=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    forced=st.dictionaries(st.integers(0, 4), st.integers(0, VOCAB - 1), max_size=2),
    seed=st.integers(0, 3),
    id=st.integers(0, 5),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), requests),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("round"), st.none()),
        st.tuples(st.just("update"), st.none()),
    ),
    max_size=30,
)

UPDATED = [
    ("submit", Request(prompt=[1, 2, 3], max_tokens=15)),
    ("round", None),
    ("update", None),
]


def foretold(device, request, versions):
    """The completion without a scheduler, given which weights made each token."""
    tokens = list(request.prompt)
    for place, version in enumerate(versions):
        sampled = device.next_token(tokens, request.seed, request.id, version)
        tokens.append(request.forced.get(place, sampled))
    return tokens[len(request.prompt) :]


@settings(max_examples=60, deadline=None)
@given(actions, st.sampled_from(["keep", "recompute"]), st.sampled_from([0, 2]))
@example(UPDATED, "recompute", 0)  # which chance does not always find
def test_every_request_ends_once_and_as_if_it_were_alone(
    fake_device, actions, after_update, prefix_entries
):
    engine = replace(ENGINE, after_update=after_update, prefix_entries=prefix_entries)
    device = fake_device(engine)
    scheduler = Scheduler(device, engine, VOCAB)
    submitted, events, cancelled = [], [], set()
    for action, value in actions:
        if action == "submit":
            events.append([])
            submitted.append((scheduler.submit(value, events[-1].append), value))
        elif action == "cancel" and value < len(submitted):
            sequence = submitted[value][0]
            if not sequence.ended:
                cancelled.add(value)
            scheduler.cancel(sequence)
        elif action == "round":
            scheduler.round()
        elif action == "update":
            scheduler.update(scheduler.version + 1, scheduler.version + 1)
        held = [s.slot for s in scheduler.running]
        assert len(held) == len(set(held)) and all(0 <= s < engine.slots for s in held)
    for _ in range(1000):
        if not scheduler.idle:
            scheduler.round()
    assert scheduler.idle and not scheduler.running
    assert scheduler.metrics()["ended"] == len(submitted)
    for i, (_, request) in enumerate(submitted):
        ends = [e for e in events[i] if isinstance(e, Completion)]
        streamed = [t for e in events[i] if isinstance(e, list) for t in e]
        assert len(ends) == (i not in cancelled)
        versions = [t.version for t in streamed]
        assert versions == sorted(versions)
        expected = foretold(device, request, versions)
        assert [t.id for t in streamed] == expected
        for c in ends:
            assert isinstance(events[i][-1], Completion)
            assert c.tokens.tolist() == expected and c.versions.tolist() == versions
            assert c.forced.tolist() == [t.forced for t in streamed]
            assert c.finish == ("stop" if expected[-1] in request.stop else "length")
            assert c.finish == "stop" or len(expected) == request.max_tokens
            known = [*request.prompt, *expected]  # the fake's routes are the tokens themselves
            assert c.routes[:, 0].tolist() == [[t, t] for t in known[:-1]] + [[-1, -1]]


def test_a_long_prompt_holds_running_sequences_up_for_one_chunk(fake_device):
    calls = []
    device = fake_device(ENGINE)
    for name in ("prefill", "decode"):
        method = getattr(device, name)
        setattr(device, name, lambda *a, f=method, n=name, **k: calls.append(n) or f(*a, **k))
    scheduler = Scheduler(device, ENGINE, VOCAB)
    scheduler.submit(Request(prompt=[1], max_tokens=30), lambda _: None)
    scheduler.submit(Request(prompt=[2] * 21, max_tokens=5), lambda _: None)
    for _ in range(5):
        scheduler.round()
    assert calls == ["prefill", "decode"] * 5  # 20 tokens are read in five chunks of 4


def test_a_group_reads_its_prompt_once(fake_device):
    """Requests wait for one that reads what they begin with, then copy it."""
    device = fake_device(ENGINE)
    read = Counter()
    prefill = device.prefill
    device.prefill = lambda chunk: read.update(tokens=int(chunk.count.sum())) or prefill(chunk)
    scheduler = Scheduler(device, ENGINE, VOCAB)
    group = [Request(prompt=list(range(17)), max_tokens=4, id=i) for i in range(3)]
    completions = run(scheduler, group)
    assert read["tokens"] == 16 and scheduler.metrics()["prefix_tokens"] == 32
    for request, c in zip(group, completions, strict=True):
        assert c.tokens.tolist() == foretold(device, request, [0] * 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 30}, "prompt and max_tokens: 11 + 30 tokens; legal: up to .* = 40"),
        ({"stop": [1] * 9}, "stop: 9 tokens; legal: up to 8"),
        ({"prompt": [VOCAB]}, "token 50; legal: 0 to 49"),
        ({"top_p": 0.9}, "top_k, top_p: legal only with training = false"),
        ({"top_k": 5}, "top_k, top_p: legal only with training = false"),
        ({"temperature": 0.0}, "temperature: 0; legal: above 0"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_in_one_line(fake_device, fields, message):
    scheduler = Scheduler(fake_device(ENGINE), ENGINE, VOCAB)
    request = Request(**({"prompt": [1] * 11, "max_tokens": 5} | fields))
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")) as refused:
        scheduler.submit(request, lambda _: None)
    assert "\n" not in str(refused.value) and scheduler.idle


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"forced": {5: 1}}, "forced"),
    ],
)
def test_a_request_checks_itself(fields, name):
    with pytest.raises(ConfigError, match=f"^{name}: .*legal"):
        Request(**({"prompt": [1], "max_tokens": 5} | fields))


def test_versions_only_grow(fake_device):
    scheduler = Scheduler(fake_device(ENGINE), ENGINE, VOCAB, version=4)
    with pytest.raises(ConfigError, match="version: 4; legal: above the engine's 4"):
        scheduler.update(1, 4)
    assert np.isfinite(scheduler.metrics()["pause_s"])
