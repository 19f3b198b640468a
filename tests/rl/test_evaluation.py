"""Every score of an evaluation belongs to the version that was asked for, whatever goes on."""

import asyncio
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from c2.rl import evaluation, simulated
from c2.rl.evaluation import Evaluation, EvaluationConfig


class Inference:
    """Serves weights that say which version they are."""

    newest = 0

    def __init__(self, model, engine, store):
        self.version = None

    async def pin(self, version):
        assert version == Inference.newest
        return {"version": np.array([version])}

    async def serve(self, tensors, version):
        await asyncio.sleep(0)
        assert self.version is None or version > self.version  # as engines do
        self.version = int(tensors["version"][0])

    async def close(self):
        self.version = None


class Environments:
    """Rollouts that take their time; the score is the version that sampled all of it, or none."""

    def __init__(self, config, tokenizer, served, *, seed):
        self.served = served

    async def rollout(self, task, sample):
        versions = set()
        for _ in range(3 + sample):
            versions.add(self.served.service.version)
            await asyncio.sleep(0)
        score = float(versions.pop()) if len(versions) == 1 else math.nan
        return dataclasses.replace(simulated.rollout(task, sample, (0,)), correct=score)

    async def close(self):
        pass


@pytest.fixture
def service(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "Inference", Inference)
    monkeypatch.setattr(evaluation, "Environments", Environments)
    config = EvaluationConfig(tasks={"a": ("x", "y"), "b": ("z",)}, samples=3, slots=2)
    parts = dict.fromkeys(("environments", "tokenizer", "model", "engine"), SimpleNamespace())

    def make():
        return Evaluation(config, **parts, store="", folder=str(tmp_path))

    return make


def all_of(version):
    return {"a": {"x": [version] * 3, "y": [version] * 3}, "b": {"z": [version] * 3}}


def test_one_version_in_an_evaluation(service):
    """Asked for at the same time, newest first, while others are pinned, and after a restart."""

    async def body():
        first = service()
        for Inference.newest in (1, 2, 5):
            await first.pin(Inference.newest)
        made = service()
        asked = [asyncio.create_task(made.evaluate(version)) for version in (5, 1, 2)]
        Inference.newest = 7
        await made.pin(7)
        assert [await answer for answer in asked] == [all_of(v) for v in (5, 1, 2)]
        assert await made.evaluate(7) == all_of(7)

    asyncio.run(body())


def test_what_was_not_pinned_or_is_forgotten_cannot_be_evaluated(service):
    async def body():
        made = service()
        Inference.newest = 1
        await made.pin(1)
        await made.forget(1)
        for version in (1, 2):
            with pytest.raises(RuntimeError, match=f"version {version} was not pinned"):
                await made.evaluate(version)

    asyncio.run(body())
