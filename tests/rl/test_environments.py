"""Trouble of the machinery is told as such: no score of 0, and no end of training."""

import asyncio
import math

import pytest

from c2.agent.chat import ByteTokenizer
from c2.rl import environments
from c2.rl.environments import EnvironmentConfig, Environments
from c2.sandbox.protocol import Handle, SandboxError, SandboxLost
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.grade import Outcome


class Pool:
    """Sandboxes of which one thing fails; notes which were closed."""

    def __init__(self, fails):
        self.fails, self.closed = fails, []

    def create(self, spec):
        if self.fails == "create":
            raise SandboxError("no room in time")
        return Handle("pool", "one")

    def write(self, handle, path, data):
        if self.fails == "write":
            raise SandboxLost("the node is dead", "backend")

    def close(self, handle):
        self.closed.append(handle.id)


@pytest.mark.parametrize(("fails", "closed"), [("create", []), ("write", ["one"])])
def test_a_sandbox_that_fails_is_no_failure_of_the_policy(monkeypatch, fails, closed):
    pool = Pool(fails)
    monkeypatch.setattr(environments, "Pool", lambda config: pool)
    service = Environments(EnvironmentConfig(ready=0), ByteTokenizer, None)
    rollout = asyncio.run(service.rollout("minirepo/operator/1/3", 0))
    assert rollout.failed and math.isnan(rollout.reward) and not rollout.generations
    assert pool.closed == closed


def test_the_same_repository_is_graded_once_unless_the_machinery_failed(monkeypatch):
    seen = []

    def grade(task, files, run):
        seen.append((task.id, files["a.py"]))
        kind = "infrastructure_failure" if files["a.py"] == "unlucky" else "scored"
        return Outcome(kind=kind, reward=1.0, failed={}, changed=(), ignored=())

    monkeypatch.setattr(environments, "Pool", lambda config: Pool(None))
    monkeypatch.setattr(environments.grade, "grade", grade)
    monkeypatch.setattr(environments, "VERDICTS", 2)
    service = Environments(EnvironmentConfig(ready=0), ByteTokenizer, None)
    one, two = (minirepo.draw(seed) for seed in (1, 2))
    for task, text in [(one, "x"), (one, "x"), (two, "x"), (one, "unlucky"), (one, "unlucky")]:
        assert service._verdict(task, {"a.py": text}).reward == 1
    unlucky = [(one.id, "unlucky")] * 2
    assert seen == [(one.id, "x"), (two.id, "x"), *unlucky]
    service._verdict(one, {"a.py": "y"})  # the oldest is forgotten
    service._verdict(two, {"a.py": "x"})
    service._verdict(one, {"a.py": "x"})
    assert seen[4:] == [(one.id, "y"), (one.id, "x")]
