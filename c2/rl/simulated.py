"""A cluster that computes nothing: for tests of the controller, and to measure it alone.

Services take as long as they are told, or a few turns of the event loop. What survives a process
is in `Cluster`.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from c2.records import NO_VERSION, Effort, Generation, Group, Rollout
from c2.rl.calls import Handle, LostError

PROMPT = 4  # tokens of a rollout that nobody sampled


def rollout(prompt: str, sample: int, versions: Sequence[int]) -> Rollout:
    """A rollout that is a function of what it is a rollout of.

    Args:
      prompt: its task.
      sample: which of the task's.
      versions: policy versions that sampled it, in order; equal shares of its tokens.
    """
    digest = hashlib.sha256(f"{prompt}/{sample}/{versions[0]}".encode()).digest()
    tokens = np.frombuffer(digest, np.uint8).astype(np.int32)
    size = len(tokens)
    sampled = np.arange(size) >= PROMPT
    by_token = np.asarray(versions)[np.arange(size) * len(versions) // size]
    link = Generation(
        tokens=tokens,
        loss_mask=sampled,
        log_probs=np.where(sampled, -1, 0).astype(np.float32),
        versions=np.where(sampled, by_token, NO_VERSION).astype(np.int32),
        temperatures=np.ones(size, np.float32),
        routes=np.zeros((size, 1, 2), np.int16),
    )
    reward = float(tokens[0] % 2)
    return Rollout(
        generations=(link,), outcome="scored", stop="done", correct=reward, reward=reward,
        effort=Effort(turns=1), behaviours={},
    )  # fmt: skip


class Folder(MutableMapping[str, Any]):
    """Values of JSON in files, each written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getitem__(self, name: str) -> Any:
        try:
            return json.loads((self._path / name).read_bytes())
        except FileNotFoundError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        temporary = self._path / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(value))
        temporary.rename(self._path / name)

    def __delitem__(self, name: str) -> None:
        (self._path / name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.name for path in self._path.iterdir() if not path.name.startswith("."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(kw_only=True)
class Cluster:
    """How services behave, and what survives their processes. Can be pickled.

    Attributes:
      seed: of all that is random.
      checkpoint_every: steps between two checkpoints of training.
      fails: how often the infrastructure fails a rollout, 0 to 1.
      rollout_s: median seconds of a rollout, log-normally distributed; 0 takes no time.
      sigma: standard deviation of the logarithm.
      step_s: seconds of a step.
      store: what survives: ``checkpoint`` [steps, weights], where weights are a chain of hashes;
        ``published``, the newest version in the store of weights; ``pinned-VERSION``; and
        ``trained-STEP``, the tasks of a step. A `Folder` for services in several processes.
      started: rollouts that were started in this process.
    """

    seed: int = 0
    checkpoint_every: int = 1
    fails: float = 0.0
    rollout_s: float = 0.0
    sigma: float = 1.0
    step_s: float = 0.0
    store: MutableMapping[str, Any] = field(default_factory=dict)
    started: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    async def pause(self) -> None:
        """Lets others go first, sometimes."""
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)

    def trained(self) -> list[str]:
        """The tasks that were trained."""
        steps = [name for name in self.store if name.startswith("trained-")]
        return [task for step in steps for task in self.store[step]]


class _Service:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def ping(self) -> int:
        """Is alive; its process id."""
        return os.getpid()


class Training(_Service):
    """Hashes what it is given."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.steps, self.weights = cluster.store.get("checkpoint", (0, ""))

    async def position(self) -> int:
        """Steps done."""
        return self.steps

    async def step(self, number: int, data: Sequence[Group]) -> dict[str, float]:
        """Trains on groups."""
        if number != self.steps:
            raise ValueError(f"step {number} after {self.steps}")
        cluster, store = self.cluster, self.cluster.store
        await asyncio.sleep(cluster.step_s)
        digest = hashlib.sha256(self.weights.encode())
        ages = [0]
        for each in (each for group in data for each in group.rollouts):
            ages.append(number - each.oldest_version)
            digest.update(each.generations[0].tokens.tobytes())
        tasks = [group.task for group in data]
        if store.get(f"trained-{number}", tasks) != tasks:
            raise ValueError(f"step {number} is repeated with other tasks")
        store[f"trained-{number}"] = tasks
        self.steps, self.weights = number + 1, digest.hexdigest()
        if self.steps % cluster.checkpoint_every == 0:
            store["checkpoint"] = [self.steps, self.weights]
        return {"staleness": max(ages)}

    async def publish(self) -> None:
        """Writes the newest weights to the store."""
        await self.cluster.pause()
        store = self.cluster.store
        store["published"] = max(self.steps, store.get("published", 0))


class Inference(_Service):
    """Knows which version it serves."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.version = cluster.store.get("published", 0)

    async def load(self, version: int) -> dict[str, float]:
        """Serves a version."""
        await self.cluster.pause()
        if version > self.cluster.store["published"]:
            raise ValueError(f"version {version} is not in the store")
        self.version = max(version, self.version)
        return {}

    async def serving(self) -> int:
        """The version."""
        return self.version


class Environments(_Service):
    """Asks twice which version is served: before and after the time that a rollout takes."""

    def __init__(self, cluster: Cluster, inference: Handle) -> None:
        super().__init__(cluster)
        self.inference = inference

    async def rollout(self, prompt: str, sample: int) -> Rollout:
        """A rollout."""
        cluster = self.cluster
        cluster.started += 1
        first = await self._version()
        if cluster.rollout_s:
            await asyncio.sleep(cluster.rollout_s * cluster.random.lognormvariate(0, cluster.sigma))
        else:
            await cluster.pause()
        done = rollout(prompt, sample, (first, await self._version()))
        if cluster.random.random() >= cluster.fails:
            return done
        fields = {**vars(done), "outcome": "infrastructure_failure", "reward": float("nan")}
        return Rollout(**fields)

    async def forget(self, prompts: Sequence[str]) -> None:
        """There is nothing to forget."""

    async def _version(self) -> int:
        while True:
            with contextlib.suppress(LostError):
                return await self.inference.call("serving")
            await asyncio.sleep(self.cluster.rollout_s)  # it is being started again


class Evaluation(_Service):
    """Says which version it has been given."""

    async def pin(self, version: int) -> None:
        """Keeps the newest version."""
        await self.cluster.pause()
        if version != self.cluster.store["published"]:
            raise ValueError(f"version {version} is not the newest any more")
        self.cluster.store[f"pinned-{version}"] = True

    async def evaluate(self, version: int) -> dict[str, float]:
        """Measures a version that was pinned."""
        await self.cluster.pause()
        if f"pinned-{version}" not in self.cluster.store:
            raise ValueError(f"version {version} was not pinned")
        return {"measured": float(version)}

    async def forget(self, version: int) -> None:
        """The score is known."""
        self.cluster.store.pop(f"pinned-{version}", None)
