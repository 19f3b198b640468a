"""Arms against a schedule by hand, gaps against some made by hand, and claims that can fail."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from c2.records import Completion
from c2.rollout.config import EngineConfig, Request
from c2.rollout.programs import Emitted
from experiments import inflight_arms as arms
from experiments import inflight_updates as study
from experiments.inflight_arms import Tokens, Trace
from experiments.study import Run

SMOKE = study.get_config("smoke")
SLOW = pytest.mark.slow  # compiles an engine and a training step for half a minute


@functools.cache
def values():
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time
    try:
        return study.measure(SMOKE, Run(workdir=None, console=Console(quiet=True)))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@SLOW
def test_smoke_variant_runs_to_a_result(tmp_path, monkeypatch):
    measured = values()
    monkeypatch.setattr(study, "measure", lambda *_: measured)
    result = study.run(SMOKE, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert len(result.claims) == 8 and all(np.isfinite(c.measured) for c in result.claims)
    exact = next(c for c in result.claims if c.statement.startswith("Recorded"))
    assert exact.verdict == "shown"
    (figure,) = result.figures
    assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    assert [len(rows) for rows in result.tables.values()] == [3, 6, 5]


@SLOW
def test_the_arms_do_what_they_are_named_after():
    """Waiting mixes no versions and empties its slots; the others mix and keep them busy."""
    for (_, _, arm), trace in values().traces.items():
        mixed = [len(set(c.versions.tolist())) > 1 for c, _ in trace.completions]
        busy = trace.slots[trace.slots[:, 0] < SMOKE.horizon, 1]
        assert any(mixed) == (arm != "waiting") == (busy.min() == SMOKE.slots)
        used = sorted({v for c, _ in trace.completions for v in c.versions.tolist()})
        assert used[-1] > 0 and (arm == "waiting" or used == list(range(used[-1] + 1)))
    assert study.throughput(values(), "keep") > study.throughput(values(), "waiting")


@SLOW
def test_all_arms_and_rates_sample_the_same_lengths():
    expected = [r.max_tokens for r, _ in zip(arms.requests(SMOKE, 0), range(8), strict=False)]
    for trace in values().traces.values():
        lengths = {int(c.prompt @ np.arange(1, 17)): len(c.tokens) for c, _ in trace.completions}
        first = [r for r, _ in zip(arms.requests(SMOKE, 0), range(8), strict=False)]
        found = [lengths[int(np.array(r.prompt) @ np.arange(1, 17))] for r in first]
        assert found == expected


class Hourglass:
    """A device whose passes are foretold: a prompt takes one, then every token one."""

    def __init__(self, engine):
        self.engine, self.params, self.compilations = engine, None, 0

    def swap(self, params):
        self.params = params

    def prefill(self, chunk):
        return np.zeros((*chunk.tokens.shape, 1, 1), np.int16)

    def decode(self, slots, *, speculate=False):
        steps = np.arange(self.engine.steps)[:, None]
        there = slots.live & (steps < slots.budget - slots.count)
        tokens = np.where(there, 1, -1)[..., None]
        nothing = np.zeros_like(there)
        routes = np.zeros((*tokens.shape, 1, 1), np.int16)
        return Emitted(tokens, np.zeros(tokens.shape, np.float32), routes, nothing, nothing)


@pytest.mark.parametrize(("arm", "versions"), [("keep", [0] * 5 + [1] * 7), ("waiting", [0] * 12)])
def test_drive_against_a_schedule_by_hand(arm, versions, monkeypatch):
    """One slot, one token a dispatch: a pass for the prompt, one per token, an update at pass 6.

    The second request begins at pass 13 and has its first token at 15, beyond the horizon of 14.
    """
    config = dataclasses.replace(SMOKE, slots=1, interval=6, horizon=14, versions=1, prompt=3)
    engine = EngineConfig(slots=1, capacity=40, prefill_rows=1, prefill_chunk=8, steps=1)
    lengths = iter([12, 5, 5, 5])

    def requests(config, seed):
        for i, length in enumerate(lengths):
            yield Request(prompt=[1, 2, 3], max_tokens=length, id=i)

    monkeypatch.setattr(arms, "requests", requests)
    trace = arms.drive(Hourglass(engine), ["a", "b"], arm, config, 0)
    (first, newest), (second, _) = trace.completions
    assert first.versions.tolist() == versions and newest == 1
    assert second.versions.tolist() == [1] * 5
    assert trace.passes == 15 and trace.tokens == 13


def completion(versions, log_probs):
    count = len(versions)
    return Completion(
        prompt=np.array([1, 2], np.int32),
        tokens=np.ones(count, np.int32),
        log_probs=np.array(log_probs, np.float32),
        versions=np.array(versions, np.int32),
        forced=np.zeros(count, bool),
        routes=np.zeros((2 + count, 2, 2), np.int16),
        temperature=1.0,
        finish="length",
    )


def test_gaps_by_hand(monkeypatch):
    """A forward pass whose log-probabilities are 10 x version + place, 100 more if replayed."""

    def log_probs(version, tokens, real, routes):
        own = np.tile(10.0 * version + np.arange(tokens.shape[1] - 1), (len(tokens), 1))
        return np.stack([own, 100 + own])

    monkeypatch.setattr(arms, "_log_probs", log_probs)
    c = completion([0, 0, 1, 1], [1.5, 2, 13, 14])  # places 1 to 4
    trace = Trace([(c, 2)], 4, 4, np.zeros((1, 2)), 0.0, [])
    found = arms.gaps([0, 1, 2], trace, 8)
    assert found.age.tolist() == [2, 2, 1, 1] and found.since.tolist() == [-1, -1, 0, 1]
    assert found.own.tolist() == [0.5, 0, 0, 0]
    assert found.replayed.tolist() == [99.5, 100, 100, 100]
    assert found.newest.tolist() == [119.5, 120, 110, 110]


def changed(arm, **fields):
    """Values with other arrays in the tokens of an arm."""

    def change(v):
        tokens = {
            key: t._replace(**{name: f(t) for name, f in fields.items()}) if key[2] == arm else t
            for key, t in v.tokens.items()
        }
        return v._replace(tokens=tokens)

    return change


def slower(arm, factor):
    def change(v):
        traces = {
            key: t._replace(passes=t.passes * factor) if key[2] == arm else t
            for key, t in v.traces.items()
        }
        return v._replace(traces=traces)

    return change


def good():
    """Values in which everything holds."""
    since = np.array([-1, 0, 7, 40])

    def tokens(arm):
        gap = np.array([0, 0.05, 0.05, 0.01]) if arm == "keep" else np.zeros(4)
        age = np.array([1, 1, 1, 1]) * (2 if arm == "waiting" else 1)
        newest = np.ones(4) * (2 if arm == "waiting" else 1)
        if arm == "waiting":
            age, newest = np.array([1, 2, 3, 2]), np.array([1.0, 2, 3, 2])
        return Tokens(age=age, since=since, own=np.zeros(4), replayed=gap, newest=newest)

    traces = {(0, 0, arm): Trace([], 100, 20, None, 1.0, []) for arm in study.ARMS}
    traces[0, 0, "waiting"] = traces[0, 0, "waiting"]._replace(passes=40)
    return study.Values(traces, {(0, 0, arm): tokens(arm) for arm in study.ARMS})


CORRUPTIONS = {
    "In-flight updates give": slower("keep", 1.4),
    "Recomputing caches": slower("recompute", 1.3),
    "Recorded log-probabilities": changed("recompute", own=lambda t: t.own + 2e-4),
    "After an update": changed("keep", replayed=lambda t: t.replayed * 4),
    "That gap fades": changed("keep", replayed=lambda t: t.replayed + 0.05),
    "In-flight updates make": changed("keep", age=lambda t: t.age * 2),
    "Seen from the newest": changed("keep", newest=lambda t: t.newest * 3),
    "Nor more than": changed("keep", newest=lambda t: t.newest * 1.2),
}


@pytest.mark.parametrize("statement", CORRUPTIONS)
def test_each_claim_can_fail(statement):
    def verdict(measured):
        claims = study.judge(dataclasses.replace(SMOKE, rates=(1e-4,)), measured)
        (claim,) = (claim for claim in claims if claim.statement.startswith(statement))
        return claim.verdict

    assert verdict(good()) == "shown"
    assert verdict(CORRUPTIONS[statement](good())) == "not shown"


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("seeds", {"seeds": 0}),
        ("pretraining", {"pretraining": -1}),
        ("prompt", {"prompt": 64}),
        ("spread", {"spread": 0.0}),
        ("rates", {"rates": (1e-3, 1e-4)}),
        ("rates", {"rates": ()}),
        ("horizon", {"horizon": 0}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}: .*legal"):
        arms.Config(**change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: full, smoke"):
        study.get_config("huge")
