"""The training service: learns from rows, keeps checkpoints, publishes weights."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from c2 import models
from c2.config import ConfigError
from c2.losses.config import PolicyGradientConfig
from c2.models import ModelConfig
from c2.parallel import mesh as meshes
from c2.parallel.mesh import MeshConfig
from c2.rl import inspection, kl_penalty
from c2.rl.credit import Credit
from c2.rl.learner import make_learner
from c2.rl.replay import ReplayConfig
from c2.rl.rows import Packed, pack
from c2.training import optimizer as optimizers
from c2.training.checkpoint import Checkpoints
from c2.training.objective import Batch
from c2.training.optimizer import OptimizerConfig, ScheduleConfig
from c2.training.sharding import abstract_state, place_batch, place_state
from c2.training.state import TrainState
from c2.weights import devices, serving
from c2.weights.lease import HeldError
from c2.weights.manifest import load_manifest
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.store import open_store

_PLACES = "places"  # of tokens in their row, whatever order a mesh has them in
INSPECTED = "inspected"  # folder of files of `c2.rl.inspection`, by step


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How the trainer learns.

    Attributes:
      objective: what is maximised.
      replay: of routes.
      optimizer: its settings.
      learning_rate: over all steps.
      context: tokens of a batch row; no generation may be longer.
      rows: batch rows of a micro-batch, over all devices.
      mesh: what lies where.
      checkpoint_every: steps between two checkpoints; after a death those in between are repeated.
      keep: newest checkpoints that stay.
      inspect_every: steps between two whose tokens are kept for people, see `c2.rl.inspection`; 0
        for none.
      publisher: how weights are published.
    """

    objective: PolicyGradientConfig = field(default_factory=PolicyGradientConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(peak=1e-4, decay="constant")
    )
    context: int = 1024
    rows: int = 4
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint_every: int = 1
    keep: int = 2
    inspect_every: int = 10
    publisher: PublisherConfig = field(default_factory=PublisherConfig)

    def __post_init__(self) -> None:
        for name in ("context", "rows", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: at least 1")
        if self.inspect_every < 0:
            raise ConfigError(f"inspect_every: {self.inspect_every}; legal: at least 0")


class Training:
    """Knows tokens with advantages, and neither groups nor rewards."""

    def __init__(
        self,
        config: TrainingConfig,
        model: ModelConfig,
        *,
        steps: int,
        start: str,
        workdir: str,
        store: str,
    ) -> None:
        """Goes on at the newest checkpoint, or begins with given weights.

        Args:
          config: how to learn.
          model: model configuration.
          steps: of the whole run.
          start: folder with the `c2.training.checkpoint.Checkpoints` of ``{"params": ...}``.
          workdir: where checkpoints go, and what is kept for people.
          store: address of the store of weights.
        """
        self._config, self._model = config, model
        specs, layout = models.spec(model), config.mesh
        self._mesh = meshes.choose(config.rows, layout)
        rate = optimizers.schedule([(config.learning_rate, steps)])
        optimizer = optimizers.make(config.optimizer, rate, specs.replace(mtp=()))
        self._learner = make_learner(
            model, optimizer, self._mesh, layout, config.objective, config.replay
        )
        self._folder = Path(workdir)
        self._checkpoints = Checkpoints(self._folder / "checkpoints", keep=config.keep)
        self._steps = steps
        abstract = abstract_state(model, optimizer, self._mesh, layout)
        given = Checkpoints(start)
        params = given.restore(given.latest(), {"params": abstract.params})["params"]
        self._reference = params if config.objective.kl.beta else None
        newest = self._checkpoints.latest()
        if newest is None:
            state = TrainState(jnp.int32(0), params, optimizer.init(params.replace(mtp=())))
            self._state = place_state(state, model, optimizer, self._mesh, layout)
            if self._reference is not None:  # steps donate the state
                self._reference = jax.tree.map(jnp.copy, params)
        else:
            self._state = self._checkpoints.restore(newest, abstract)
        self._done = newest or 0
        experts = serving.experts_for(model.moe.precision) if model.moe else "native"
        self._form = serving.make_serving_form(specs, model.dtype, experts, mesh=self._mesh)
        self._newest = self._done, self._form(self._state.params)
        self._store, self._publisher = open_store(store), None
        self._learning = ThreadPoolExecutor(1, "learning")

    async def ping(self) -> int:
        """Is alive; its process id."""
        return os.getpid()

    async def close(self) -> None:
        """Writes what is on its way."""
        self._learning.shutdown()
        self._checkpoints.close()
        if self._publisher is not None:
            self._publisher.close()

    async def position(self) -> int:
        """Steps done."""
        return self._done

    async def step(self, number: int, credit: Credit) -> dict[str, float]:
        """Learns from the rows of a step; see `c2.rl.learner.make_learner` for the metrics.

        Without rows nothing is learned, but the step counts.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._learning, self._step, number, credit)

    async def publish(self) -> None:
        """Publishes the newest weights, unless they are published; returns when they are out."""
        await asyncio.to_thread(self._publish)

    def _step(self, number: int, credit: Credit) -> dict[str, float]:
        if number != self._done:
            raise ValueError(f"step {number} after {self._done}")
        began, config = time.perf_counter(), self._config
        if credit.rows:
            metrics = self._learn(pack(credit.rows, config.context, multiple=config.rows), credit)
        else:
            self._state = self._state.replace(step=self._state.step + 1)
            metrics = {"tokens": 0.0}
        self._done += 1
        self._newest = self._done, self._form(self._state.params)
        if self._done % config.checkpoint_every == 0 or self._done == self._steps:
            self._checkpoints.save(self._done, self._state)
        return metrics | {"rows": len(credit.rows), "step_s": time.perf_counter() - began}

    def _learn(self, packed: Packed, credit: Credit) -> dict[str, float]:
        learner, kl, every = self._learner, self._config.objective.kl, self._config.inspect_every
        batch = packed.batch
        parts, total = self._parts(batch), None
        if every and self._done % every == 0:
            path = self._folder / INSPECTED / f"{self._done:08d}.safetensors"
            seen = [learner.inspect(self._state.params, part) for part in parts]
            inspection.save(path, credit.rows, packed, *_in_order(seen, parts))
        if self._reference is not None:
            found = [(learner.reference(self._reference, part),) for part in parts]
            batch = kl_penalty.charge(packed, *_in_order(found, parts), kl)
            parts = self._parts(batch)
        for part in parts:
            total = learner.zero(self._state.params, part) if total is None else total
            total = learner.add(total, self._state.params, part)
        self._state, metrics = learner.apply(self._state, total, credit.denominator)
        used = (batch["segment_ids"] > 0).mean()
        return {name: float(x) for name, x in metrics.items()} | {"packed": float(used)}

    def _parts(self, batch: Mapping[str, np.ndarray]) -> list[Batch]:
        """The micro-batches on the mesh."""
        count = len(batch["tokens"]) // self._config.rows
        places = np.broadcast_to(np.arange(self._config.context), batch["tokens"].shape)
        cut = {name: np.split(x, count) for name, x in {**batch, _PLACES: places}.items()}
        parts = [{name: x[i] for name, x in cut.items()} for i in range(count)]
        return [place_batch(part, self._mesh, self._config.mesh) for part in parts]

    def _publish(self) -> None:
        step, tensors = self._newest
        if self._publisher is None:
            self._publisher = self._open_chain()
        if self._published() < step:
            self._publisher.publish(step, devices.parts(tensors))
            self._publisher.wait()

    def _published(self) -> int:
        """The newest step in the store, -1 for none."""
        names = self._store.names("versions")
        return load_manifest(self._store.read(f"versions/{names[-1]}")).step if names else -1

    def _open_chain(self) -> Publisher:
        """Becomes the chain's writer, once one that was killed counts as dead."""
        config = self._config.publisher
        until = time.monotonic() + 3 * config.lease_seconds
        while True:
            try:
                return Publisher(self._store, config, owner=f"training {os.getpid()}")
            except HeldError:
                if time.monotonic() > until:
                    raise
                time.sleep(config.lease_seconds / 10)


def _in_order(found: Sequence[tuple], parts: Sequence[Batch]) -> list[np.ndarray]:
    """What was found in micro-batches, as arrays of the batch with tokens in their own order."""
    order = np.argsort(np.concatenate([part[_PLACES] for part in parts]))
    columns = (np.concatenate(x) for x in zip(*found, strict=True))
    return [np.take_along_axis(x, order, axis=1) for x in columns]
