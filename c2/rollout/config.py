"""What an engine is built for, and what it can be asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from c2.config import ConfigError

SEEDS = 2**32  # seeds and request ids are 32-bit numbers


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shapes of the compiled programs, and the rules of sampling and of new weights.

    Attributes:
      slots: sequences that are decoded at the same time.
      capacity: tokens of the longest sequence, prompt and completion together.
      prefill_rows: sequences whose prompts are read in one dispatch.
      prefill_chunk: tokens of each that one dispatch reads; running sequences wait no longer.
      steps: decoding steps in one dispatch; new requests, cancellations and weights wait for it.
      max_stop: stop tokens that a request may name.
      prefix_entries: sequences whose cache is kept after they end, for requests that begin alike.
      training: tokens become training data: sampled at a temperature above 0 from the whole
        distribution. Otherwise top-k, top-p and temperature 0, the most likely token, are legal.
      after_update: what running sequences do with the cache that older weights filled: ``keep``
        goes on with it, as PipelineRL does; ``recompute`` fills it again.
      speculate: drafts a token per step with the model's prediction module, where that pays.
    """

    slots: int = 32
    capacity: int = 4096
    prefill_rows: int = 4
    prefill_chunk: int = 256
    steps: int = 16
    max_stop: int = 8
    prefix_entries: int = 0
    training: bool = True
    after_update: Literal["keep", "recompute"] = "keep"
    speculate: bool = False

    def __post_init__(self):
        for name in ("slots", "capacity", "prefill_rows", "prefill_chunk", "steps", "max_stop"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: at least 1")
        if self.prefix_entries < 0:
            raise ConfigError(f"prefix_entries: {self.prefix_entries}; legal: at least 0")
        if self.prefill_rows > self.slots:
            raise ConfigError(
                f"prefill_rows: {self.prefill_rows}; legal: up to slots = {self.slots}"
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to sample.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: budget of the completion, forced and stop tokens included.
      temperature: logits are divided by it.
      top_k: only this many most likely tokens can be sampled; not in training.
      top_p: only the most likely tokens that together reach this probability; not in training.
      stop: token ids that end the completion.
      forced: token ids by their place in the completion, from 0, that are not sampled.
      seed: with ``id`` decides all that is random, whatever else the engine works on.
      id: tells requests of one seed apart.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: Sequence[int] = ()
    forced: Mapping[int, int] = field(default_factory=dict)
    seed: int = 0
    id: int = 0

    def __post_init__(self):
        if not len(self.prompt):
            raise ConfigError("prompt: it is empty; legal: at least one token")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens: {self.max_tokens}; legal: at least 1")
        if self.temperature and not 1e-3 <= self.temperature <= 1e3:
            raise ConfigError(f"temperature: {self.temperature}; legal: 0, or 0.001 to 1000")
        if self.top_k is not None and not 1 <= self.top_k < 2**31:
            raise ConfigError(f"top_k: {self.top_k}; legal: 1 to {2**31 - 1}, or none")
        if not 1e-6 <= self.top_p <= 1:
            raise ConfigError(f"top_p: {self.top_p}; legal: 0.000001 to 1")
        for name in ("seed", "id"):
            if not 0 <= getattr(self, name) < SEEDS:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: 0 to {SEEDS - 1}")
        if any(not 0 <= place < self.max_tokens for place in self.forced):
            raise ConfigError(
                f"forced: places {sorted(self.forced)}; legal: 0 to max_tokens - 1 = "
                f"{self.max_tokens - 1}"
            )


def check(request: Request, cfg: EngineConfig, vocab: int) -> None:
    """Refuses what this engine cannot do or must not do.

    Raises:
      ConfigError: in one line.
    """
    for name in ("prompt", "stop", "forced"):
        given = getattr(request, name)
        ids = np.asarray(list(given.values()) if name == "forced" else given, np.int64)
        if (wrong := ids[(ids < 0) | (ids >= vocab)]).size:
            raise ConfigError(f"{name}: token {wrong[0]}; legal: 0 to {vocab - 1}")
    if len(request.prompt) + request.max_tokens > cfg.capacity:
        raise ConfigError(
            f"prompt and max_tokens: {len(request.prompt)} + {request.max_tokens} tokens; legal: "
            f"up to the engine's capacity = {cfg.capacity}"
        )
    if len(request.stop) > cfg.max_stop:
        raise ConfigError(f"stop: {len(request.stop)} tokens; legal: up to {cfg.max_stop}")
    if cfg.training and (request.top_k is not None or request.top_p < 1):
        raise ConfigError(
            "top_k, top_p: legal only with training = false: a trainer sees all logits"
        )
    if cfg.training and request.temperature == 0:
        raise ConfigError("temperature: 0; legal: above 0, or an engine with training = false")
