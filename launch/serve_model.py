"""What `launch.serve` serves: weights, tokenizer, and the tokens that end a text."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from c2 import models
from c2.agent.chat import ByteTokenizer
from c2.config import ConfigError
from c2.data import tokenizer as tokenizers
from c2.data.tokenizer import Tokenizer
from c2.models import ModelConfig, gguf, hf, presets
from c2.training import pretrain
from c2.training.checkpoint import CheckpointError, Checkpoints
from c2.training.state import init_state
from experiments import recipe
from launch import run_dir
from launch.main import resolve
from launch.serve_chat import ServedChat

BYTES = "bytes"  # the name of the tokenizer that needs no file
BYTES_VOCAB = 264


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that can be served.

    Attributes:
      cfg: its configuration.
      params: its parameters.
      origin: where they come from, for people.
      tokenizer: of its texts.
      chat: the format of conversations, if the vocabulary has room for its marks.
      end: tokens that end a text.
    """

    cfg: ModelConfig
    params: models.Params
    origin: str
    tokenizer: Tokenizer | ByteTokenizer
    chat: ServedChat | None
    end: Sequence[int]


def load(
    *, checkpoint: Path | None, preset: str | None, tokenizer: str | None, dtype: str, seed: int
) -> Served:
    """Loads a checkpoint, or draws the weights of a preset.

    Args:
      checkpoint: a folder in Hugging Face's format, a .gguf file, or the folder of a training run.
      preset: name of a model, if there is no checkpoint; with bytes for tokens, these are its
        vocabulary.
      tokenizer: a tokenizer.json, "bytes", or None for the one beside the checkpoint.
      dtype: of parameters and computation; a run keeps its own.
      seed: of random weights.

    Raises:
      ConfigError: in one line.
    """
    texts = _tokenizer(checkpoint, tokenizer)
    end: Sequence[int] = ()
    if checkpoint is None:
        cfg = presets.get(preset)
        if isinstance(texts, ByteTokenizer):
            cfg = replace(cfg, vocab=BYTES_VOCAB)
        params, origin = models.init(jax.random.key(seed), cfg), f"{preset} with random weights"
    elif checkpoint.suffix == ".gguf":
        (cfg, params), origin = gguf.load(checkpoint, dtype=dtype), str(checkpoint)
    elif _is_run(checkpoint):
        cfg, params, step = _of_run(checkpoint)
        origin = f"{checkpoint}, step {step}"
    else:
        (cfg, params), origin = hf.load(checkpoint, dtype=dtype), str(checkpoint)
        end = _end_of_text(checkpoint / "config.json")
    if isinstance(texts, ByteTokenizer) and cfg.vocab != BYTES_VOCAB:
        raise ConfigError(f"--tokenizer: bytes, for a vocabulary of {cfg.vocab}; legal: a file")
    marks = isinstance(texts, ByteTokenizer) or texts.vocab_size <= cfg.vocab
    return Served(
        cfg=cfg,
        params=params,
        origin=origin,
        tokenizer=texts,
        chat=ServedChat(texts) if marks else None,
        end=tuple(end) or ((texts.special("end"),) if marks else ()),
    )


def _is_run(folder: Path) -> bool:
    return (folder / run_dir.CHECKPOINTS).is_dir()


def _of_run(folder: Path) -> tuple[ModelConfig, models.Params, int]:
    _, _, config = resolve(str(folder / run_dir.CONFIG))
    if not isinstance(config, recipe.Config):
        raise ConfigError(f"--checkpoint: {str(folder)!r} is no run of experiments/recipe.py")
    optimizer = pretrain.make_optimizer(config.optimizer, config.phases, config.model)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # the run may have had others
    key = jax.random.key(0)
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        jax.eval_shape(lambda key: init_state(key, config.model, optimizer), key),
    )
    checkpoints = Checkpoints(folder / run_dir.CHECKPOINTS)
    why = "there is none"
    for step in reversed(checkpoints.steps()):  # `latest` would tidy up in a run that goes on
        try:
            params = checkpoints.restore(step, state).params
        except CheckpointError as error:
            why = str(error)
            continue
        return _phase_model(config, step), params, step
    raise ConfigError(f"--checkpoint: no checkpoint in {str(folder)!r} can be read: {why}")


def _phase_model(config: recipe.Config, step: int) -> ModelConfig:
    """The model as the phase ran it that ended with a step."""
    ends = itertools.accumulate(phase.steps for phase in config.phases)
    phases = zip(config.phases, ends, strict=True)
    return pretrain.phase_model(config.model, next(phase for phase, end in phases if step <= end))


def _tokenizer(checkpoint: Path | None, given: str | None) -> Tokenizer | ByteTokenizer:
    if given == BYTES or (given is None and checkpoint is None):
        return ByteTokenizer()
    if given is not None:
        return tokenizers.load(Path(given).expanduser())
    folder = checkpoint.parent if checkpoint.suffix == ".gguf" else checkpoint
    path = folder / ("data/tokenizer.json" if _is_run(folder) else "tokenizer.json")
    if not path.exists():
        raise ConfigError(f"--tokenizer is missing: there is no {str(path)!r}")
    return tokenizers.load(path)


def _end_of_text(config: Path) -> list[int]:
    """The end tokens of a checkpoint in Hugging Face's format."""
    found: Any = json.loads(config.read_text()).get("eos_token_id")
    found = found if isinstance(found, list) else [found]
    return [token for token in found if type(token) is int]
