"""The evaluation service: scores pinned versions on held-out tasks while training goes on.

A version is pinned by keeping its weights in a file until its score is known, so every score
belongs to one version, and none is lost when a process dies (report section 6).
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from c2.agent.chat import Tokenizer
from c2.config import ConfigError
from c2.models import ModelConfig
from c2.records import Rollout
from c2.rl.environments import EnvironmentConfig, Environments
from c2.rl.inference import Inference
from c2.rollout.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is measured.

    Attributes:
      tasks: name of a set -> ids of its tasks.
      samples: rollouts of each task.
      slots: rollouts that run at the same time.
    """

    tasks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    samples: int = 8
    slots: int = 32

    def __post_init__(self) -> None:
        for name in ("samples", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: at least 1")


class Evaluation:
    """Scores versions, one after the other."""

    def __init__(
        self,
        config: EvaluationConfig,
        environments: EnvironmentConfig,
        tokenizer: Callable[[], Tokenizer],
        model: ModelConfig,
        engine: EngineConfig,
        *,
        store: str,
        folder: str,
        seed: int = 0,
    ) -> None:
        """Starts a pool of its own; the engine follows with the first version.

        Args:
          config: what is measured.
          environments: what agents find, as in training.
          tokenizer: makes the policy's.
          model: model configuration.
          engine: engine configuration.
          store: address of the store of weights.
          folder: where pinned weights are kept.
          seed: of the rollouts, the same for all versions.
        """
        self._config, self._folder = config, Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make = partial(Inference, model, engine, store)
        self._weights = self._make()  # reads versions and serves none
        self._served, self._version = _Direct(), -1
        self._environments = Environments(environments, tokenizer, self._served, seed=seed)
        self._turn = asyncio.Lock()

    async def ping(self) -> int:
        """Is alive; its process id."""
        return os.getpid()

    async def close(self) -> None:
        """Ends all sandboxes and the engine."""
        await self._environments.close()
        if self._served.service is not None:
            await self._served.service.close()

    async def pin(self, version: int) -> None:
        """Keeps the newest version until it has been evaluated."""
        await self.keep(await self._weights.pin(version), version)

    async def keep(self, tensors: Mapping[str, np.ndarray], version: int) -> None:
        """Keeps weights, in the form that is published, until they have been evaluated."""
        await asyncio.to_thread(_write, self._file(version), tensors)

    async def evaluate(self, version: int) -> dict[str, dict[str, list[float]]]:
        """Correctness of every rollout: name of a set -> id of a task -> 0 to 1, NaN if it failed.

        Raises:
          RuntimeError: if this version was not pinned.
        """
        async with self._turn:
            path = self._file(version)
            if not path.exists():
                raise RuntimeError(f"version {version} was not pinned")
            await self._serve(await asyncio.to_thread(load_file, path), version)
            return await self._score()

    async def forget(self, version: int) -> None:
        """The scores of a version are known for good."""
        self._file(version).unlink(missing_ok=True)

    async def _serve(self, tensors: Mapping[str, np.ndarray], version: int) -> None:
        if version <= self._version:  # engines know no way back
            await self._served.service.close()
            self._served.service = None
        if self._served.service is None:
            self._served.service = self._make()
        await self._served.service.serve(tensors, version)
        self._version = version

    async def _score(self) -> dict[str, dict[str, list[float]]]:
        places, config = asyncio.Semaphore(self._config.slots), self._config

        async def score(task: str, sample: int) -> float:
            async with places:
                rollout: Rollout = await self._environments.rollout(task, sample)
            return rollout.correct

        jobs = [(name, task) for name, tasks in config.tasks.items() for task in tasks]
        scores = await asyncio.gather(
            *(score(task, sample) for _, task in jobs for sample in range(config.samples))
        )
        found: dict[str, dict[str, list[float]]] = {name: {} for name in config.tasks}
        for number, (name, task) in enumerate(jobs):
            first = number * config.samples
            found[name][task] = scores[first : first + config.samples]
        return found

    def _file(self, version: int) -> Path:
        return self._folder / f"{version:08d}.safetensors"


class _Direct:
    """A `c2.rl.calls.Handle` of an object in this process."""

    def __init__(self) -> None:
        self.service: Any = None

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self.service, method)(*args)


def _write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    temporary = path.with_suffix(".new")
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, temporary)
    temporary.rename(path)
