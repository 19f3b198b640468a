"""The inference service: an engine that keeps up with published weights."""

import asyncio
import os
from collections.abc import Mapping, Sequence

import numpy as np

from c2 import models
from c2.models import ModelConfig
from c2.records import Completion
from c2.rollout.config import EngineConfig, Request
from c2.rollout.engine import Engine
from c2.rollout.follow import subscribe
from c2.weights import serving
from c2.weights.store import open_store


class Inference:
    """Samples from the version that it has loaded last; policy versions are the trainer's steps.

    The engine is built with the first version, and who asks for tokens earlier waits for it.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig, store: str) -> None:
        """Loads nothing yet.

        Args:
          model: model configuration, the trainer's.
          engine: engine configuration.
          store: address of the store of weights.
        """
        self._model, self._config = model, engine
        self._subscriber = subscribe(open_store(store), model)
        self._engine: Engine | None = None
        self._ready, self._loading = asyncio.Event(), asyncio.Lock()

    async def ping(self) -> int:
        """Is alive; its process id."""
        return os.getpid()

    async def close(self) -> None:
        """Stops the engine."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def load(self, version: int) -> dict[str, float]:
        """Serves the newest version of the store.

        Returns:
          The engine's metrics.

        Raises:
          RuntimeError: if the store does not have this version.
        """
        async with self._loading:
            await asyncio.to_thread(self._load)
        served = self._subscriber.current
        if served is None or served.step < version:
            raise RuntimeError(f"version {version} is not in the store of weights")
        self._ready.set()
        return self._engine.metrics()

    async def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop: Sequence[int],
        temperature: float,
        seed: int,
    ) -> Completion:
        """Samples; see `c2.rollout.config.Request`."""
        await self._ready.wait()
        request = Request(
            prompt=prompt, max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed
        )
        return await self._engine.complete(request)

    async def pin(self, version: int) -> Mapping[str, np.ndarray]:
        """The tensors of the store's newest version, without serving it.

        Raises:
          RuntimeError: if that is another version.
        """
        async with self._loading:
            await asyncio.to_thread(self._subscriber.poll)
        newest = self._subscriber.current
        if newest is None or newest.step != version:
            raise RuntimeError(f"version {version} is not the newest in the store of weights")
        return newest.tensors

    async def serve(self, tensors: Mapping[str, np.ndarray], version: int) -> None:
        """Serves tensors; a version not above the one that is served needs another engine."""
        await asyncio.to_thread(self._serve, tensors, version)
        self._ready.set()

    def _load(self) -> None:
        if self._subscriber.poll():
            newest = self._subscriber.current
            self._serve(newest.tensors, newest.step)

    def _serve(self, tensors: Mapping[str, np.ndarray], version: int) -> None:
        params = serving.restore(tensors, models.spec(self._model))
        if self._engine is None:
            self._engine = Engine(params, self._model, self._config, version=version)
        else:
            self._engine.stage(params, version).result()
