"""From parameters to a Hugging Face folder."""

import collections
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from c2.config import ConfigError
from c2.models.config import ModelConfig
from c2.models.hf import names
from c2.models.hf.read_config import HARMLESS
from c2.models.hf.write_config import from_model_config
from c2.models.transformer import Params


class _Entry(NamedTuple):
    """A tensor to be written."""

    name: str
    size: int  # in bytes
    fetch: Callable[[], np.ndarray]


def save(
    params: Params,
    cfg: ModelConfig,
    path: str | os.PathLike[str],
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    shard_bytes: int = 2**32,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that transformers and inference engines load: config.json and safetensors.

    A mixture with latent attention becomes ``deepseek_v3`` (with its multi-token-prediction modules
    in the published layout), one with grouped queries ``qwen3_moe``; dense models become ``qwen3``
    (with norms of queries and keys) or ``llama``. The folder appears when it is complete; host
    memory holds one file at a time.

    Args:
      params: the parameters; every process needs access to all of them.
      cfg: their configuration.
      path: the folder, which must not exist.
      dtype: of the weights; selection biases stay f32.
      shard_bytes: files are no longer than this, unless a single tensor is.
      extra: fields of config.json that do not change the function and that the configuration does
        not know, e.g. ``{"max_position_embeddings": 8192, "eos_token_id": 2}``.

    Raises:
      ConfigError: if the path exists, or naming the field that no class of transformers expresses.
    """
    folder = Path(path)
    if folder.exists():
        raise ConfigError(f"{folder}: exists already")
    if unknown := sorted(set(extra or {}) - HARMLESS):
        raise ConfigError(f"extra.{unknown[0]}: may change what the model computes")
    config = from_model_config(cfg) | {"torch_dtype": dtype} | dict(extra or {})
    shards = _shards(_entries(params, cfg, jnp.dtype(dtype)), shard_bytes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        _write(temporary, config, shards)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(folder: Path, config: Mapping[str, Any], shards: list[list[_Entry]]) -> None:
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {entry.name: entry.fetch() for entry in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(entry.size for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, data in {"config": config, "model.safetensors.index": index}.items():
        (folder / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    for file in folder.iterdir():  # safetensors makes files that only their owner may read
        file.chmod((folder / "config.json").stat().st_mode)


def _shards(entries: Iterator[_Entry], limit: int) -> list[list[_Entry]]:
    """Fills files in the order of layers, so that who wants some layers needs some files."""
    shards, size = [[]], 0
    for entry in sorted(entries, key=lambda entry: _by_number(entry.name)):
        if shards[-1] and size + entry.size > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size
    return shards


def _by_number(name: str) -> list[str]:
    """Sorts layer 10 behind layer 9."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _entries(params: Params, cfg: ModelConfig, dtype: Any) -> Iterator[_Entry]:
    sources = names.sources(cfg, names.table(cfg))
    again = collections.defaultdict(list)
    for copy, original in names.module_copies(cfg).items():
        again[original].append(copy)
    for source, values in zip(jax.tree.leaves(sources), jax.tree.leaves(params), strict=True):
        if values.shape != source.spec.shape:
            raise ConfigError(
                f"params: {source.template} is made of an array of shape {values.shape}, expected "
                f"{source.spec.shape}"
            )
        kind = dtype if source.spec.trainable else np.dtype(source.spec.dtype)
        size = kind.itemsize * math.prod(source.stored_shape)
        for name, place in source.tensors():
            index = tuple(place.get(axis, slice(None)) for axis in range(values.ndim))
            fetch = partial(_fetch, source, values, index, kind)
            for twin in [name, *again[name]]:
                yield _Entry(twin, size, fetch)


def _fetch(source: names.Source, values: jax.Array, index: tuple, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(source.to_stored(np.asarray(values[index]).astype(dtype)))
