"""The compiled programs of an engine, and the state they work on.

Every program is compiled when the device is built, for one shape. Nothing compiles later: a
compiled program refuses other shapes, so the number of compilations is constant by construction.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from c2 import models
from c2.config import ConfigError
from c2.models import ModelConfig, Params
from c2.models.compiling import ROUND_AS_WRITTEN
from c2.rollout import layers, programs, speculation
from c2.rollout.config import EngineConfig
from c2.rollout.programs import Chunk, Emitted, Slots


class Device:
    """One accelerator, or one core of a CPU; its methods block until results are on the host."""

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        engine: EngineConfig,
        device: jax.Device | None = None,
    ) -> None:
        """Compiles.

        Args:
          params: parameters, see `place`.
          cfg: model configuration.
          engine: engine configuration.
          device: where; by default jax's first device.

        Raises:
          ConfigError: if the model cannot do what the engine is configured for.
        """
        if engine.speculate and not cfg.mtp:
            raise ConfigError("speculate: true, but the model's mtp = 0; legal: false")
        self.cfg, self.engine = cfg, engine
        self._where = jax.sharding.SingleDeviceSharding(device or jax.devices()[0])
        self._serving = jax.jit(partial(layers.serving, cfg=cfg), out_shardings=self._where)
        self.params = self.place(params)
        empty = partial(programs.empty_state, cfg, engine)
        self._state = jax.jit(empty, out_shardings=self._where)()
        self._programs = self._compile()

    @property
    def compilations(self) -> int:
        """How many programs were compiled."""
        return len(self._programs)

    def place(self, params: Params) -> Params:
        """Moves parameters here, in the form that the forward pass multiplies with, and waits.

        Args:
          params: masters as of `c2.models.spec`, or what was published of them, from
            `c2.weights.serving.restore`.

        Raises:
          ConfigError: if they are not those of this model.
        """
        legal = self._legal(params)
        for leaf, shape in zip(jax.tree.leaves(params), jax.tree.leaves(legal), strict=True):
            if leaf.shape != shape.shape:
                raise ConfigError(f"params: shape {leaf.shape}; legal for it: {shape.shape}")
        return jax.block_until_ready(self._serving(params))

    def swap(self, params: Params) -> None:
        """Uses other parameters, from `place`, from the next dispatch on."""
        self.params = params

    def prefill(self, chunk: Chunk) -> np.ndarray:
        """See `c2.rollout.programs.prefill`; returns the routes.

        A row's own length, not its company, says which program reads it: they round differently.
        """
        begins, routes = chunk.length == 0, np.int16(0)
        for name, mine in (("prefill_first", begins), ("prefill", ~begins)):
            count = np.where(mine, chunk.count, np.int32(0))
            if count.any():
                slot = np.where(mine, chunk.slot, np.int32(self.engine.slots))
                part = chunk.replace(slot=slot, count=count)
                self._state, read = self._programs[name](self.params, self._state, part)
                routes = np.where(mine[:, None, None, None], read, routes)
        return routes

    def decode(self, slots: Slots, *, speculate: bool = False) -> Emitted:
        """See `c2.rollout.programs.decode`; returns numpy arrays."""
        program = self._programs["speculate" if speculate else "decode"]
        self._state, emitted = program(self.params, self._state, slots)
        return jax.device_get(emitted)

    def step_seconds(self) -> tuple[float, float]:
        """Seconds of a plain and of a speculative step, measured; nothing must be running."""
        engine = self.engine
        slots = blank_slots(engine)
        slots.live[:], slots.budget[:] = True, np.iinfo(np.int32).max
        slots.drafts[:] = True
        seconds = []
        for speculate in (False, True):
            self.decode(slots, speculate=speculate)
            began = time.perf_counter()
            self.decode(slots, speculate=speculate)
            seconds.append((time.perf_counter() - began) / engine.steps)
        return tuple(seconds)

    def keep(self, slot: int, entry: int) -> None:
        """See `c2.rollout.programs.keep`."""
        self._state = self._programs["keep"](self._state, np.int32(slot), np.int32(entry))

    def take(self, entry: int, slot: int) -> None:
        """See `c2.rollout.programs.take`."""
        self._state = self._programs["take"](self._state, np.int32(entry), np.int32(slot))

    def _legal(self, params: Params) -> Params:
        """The shapes of masters, or of what is published, whichever ``params`` are."""
        masters = models.abstract(self.cfg)
        published = jax.eval_shape(partial(layers.published, cfg=self.cfg), masters)
        for form in (masters, published):
            if jax.tree.structure(form) == jax.tree.structure(params):
                return form
        raise ConfigError(
            "params: their tree is not the model's; legal: as `c2.models.spec`, or as published "
            "for its precision"
        )

    def _compile(self) -> Mapping[str, Any]:
        cfg, engine = self.cfg, self.engine
        prefill = partial(programs.prefill, cfg=cfg)
        decode = partial(programs.decode, cfg=cfg, steps=engine.steps)
        slots, number = blank_slots(engine), np.int32(0)
        with_params = {
            "prefill": (partial(prefill, first=False), blank_chunk(engine)),
            "prefill_first": (partial(prefill, first=True), blank_chunk(engine)),
            "decode": (partial(decode, step=programs.plain_step), slots),
        }
        if engine.speculate:
            with_params["speculate"] = partial(decode, step=speculation.step), slots
        built = {
            name: jax.jit(f, donate_argnums=1).lower(*self._here(self.params, self._state, arg))
            for name, (f, arg) in with_params.items()
        }
        if engine.prefix_entries:
            for f in (programs.keep, programs.take):
                args = self._here(self._state, number, number)
                built[f.__name__] = jax.jit(f, donate_argnums=0).lower(*args)
        return {name: lowered.compile(ROUND_AS_WRITTEN) for name, lowered in built.items()}

    def _here(self, *args: Any) -> Any:
        """Shapes of arguments on this device."""

        def shape(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._where)

        return jax.tree.map(shape, args)


def blank_slots(engine: EngineConfig) -> Slots:
    """Numpy arrays for slots that do not live, to be filled in by the host."""
    n, ahead = engine.slots, engine.steps * (2 if engine.speculate else 1)
    numbers = {name: np.zeros(n, np.int32) for name in ("last", "length", "count", "budget")}
    seeds = {name: np.zeros(n, np.uint32) for name in ("seed", "request")}
    limits = {"top_k": np.zeros(n, np.int32), "top_p": np.ones(n, np.float32)}
    drafts = {name: np.zeros(n, bool) for name in ("has_draft", "drafts")}
    return Slots(
        live=np.zeros(n, bool),
        stop=np.full((n, engine.max_stop), -1, np.int32),
        forced=np.full((n, ahead), -1, np.int32),
        temperature=np.ones(n, np.float32),
        **numbers,
        **seeds,
        **({} if engine.training else limits),
        **(drafts if engine.speculate else {}),
    )


def blank_chunk(engine: EngineConfig) -> Chunk:
    """Numpy arrays for rows of padding, to be filled in by the host."""
    rows, size = engine.prefill_rows, engine.prefill_chunk
    tokens = np.zeros((2, rows, size), np.int32)
    zeros = np.zeros((2, rows), np.int32)
    return Chunk(
        slot=np.full(rows, engine.slots, np.int32),
        length=zeros[0],
        tokens=tokens[0],
        following=tokens[1],
        count=zeros[1],
    )
