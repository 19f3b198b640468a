"""Trouble of the machinery is told as such: no score of 0, and no end of training."""

import asyncio
import math

import pytest

from c2.agent.chat import ByteTokenizer
from c2.rl import environments
from c2.rl.environments import EnvironmentConfig, Environments
from c2.sandbox.protocol import Handle, SandboxError, SandboxLost


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
