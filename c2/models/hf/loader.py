"""From a Hugging Face folder to parameters, tensor by tensor."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from c2.config import ConfigError
from c2.models.config import ModelConfig
from c2.models.hf import names, read_config
from c2.models.hf.files import open_folder, read_json
from c2.models.hf.names import Source
from c2.models.hf.quantized import dequantized
from c2.models.params import ParamSpec
from c2.models.transformer import Params

Sharding = Callable[[ParamSpec], jax.sharding.Sharding]

_CHUNK = 2**26  # elements of two tensors that are compared at a time
# Buffers that old versions of transformers saved along; they follow from the config.
_DERIVED = ".rotary_emb.inv_freq"


def load(
    path: str | os.PathLike[str], *, dtype: Any = jnp.float32, sharding: Sharding | None = None
) -> tuple[ModelConfig, Params]:
    """Reads a checkpoint in the format of Hugging Face transformers.

    Model types: ``deepseek_v3``, ``kimi_k2``, ``kimi_k25`` (its text model), ``qwen3_moe``,
    ``qwen3``, ``llama``. Weights may be f32, bf16, f16, DeepSeek's block-scaled FP8 or the
    "pack-quantized" INT4 of compressed-tensors.

    Every device gets its shard as a stack of slices read from the mapped files, one parameter at a
    time. Host memory holds this process' shards of about one parameter, and nothing is read that
    they don't need.

    Args:
      path: a folder with config.json and ``model.safetensors`` or ``model.safetensors.index.json``.
      dtype: f32 or bf16, of the parameters and of computation (``dtype`` of the configuration).
        Selection biases stay f32.
      sharding: where parameters go: a function from a `ParamSpec` (shape, logical axes) to the
        sharding of that parameter. None puts all of them on the default device.

    Returns:
      The configuration and the parameters.

    Raises:
      ConfigError: one line with the file and the field or tensor, for anything in the folder that
        is damaged, missing, superfluous, of a wrong shape, or not implemented.
    """
    folder, kind = Path(path), np.dtype(dtype).name
    if kind not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype: {kind!r} is not supported; float32 or bfloat16")
    config, prefix, skipped = read_config.text_config(read_json(folder / "config.json"))
    cfg = replace(read_config.to_model_config(config), dtype=kind)
    wanted = {
        name: tensor
        for name, tensor in open_folder(folder).items()
        if not name.startswith(skipped) and not name.endswith(_DERIVED)
    }
    stored = dequantized(wanted, config.get("quantization_config"))
    if f"{prefix}model.layers.{cfg.layers}.eh_proj.weight" not in stored:
        cfg = replace(cfg, mtp=0)  # many checkpoints of models with modules come without them
    twice = names.copies(cfg, prefix)
    copies = {name: stored.pop(name) for name in twice if name in stored}
    sources = names.sources(cfg, names.table(cfg, prefix))
    check(sources, stored, folder)
    for name, copy in copies.items():
        _check_copy(name, copy, twice[name], stored[twice[name]])
    return cfg, fill(sources, stored, dtype, sharding)


def check(sources: Params, stored: Mapping[str, Any], place: Path) -> None:
    """Refuses tensors that are missing, superfluous or of a wrong shape.

    Args:
      sources: where each parameter is stored.
      stored: name -> something with ``shape`` and ``file``.
      place: what to call the whole in error messages.
    """
    expected = {}
    for source in jax.tree.leaves(sources):
        expected |= dict.fromkeys((name for name, _ in source.tensors()), source.stored_shape)
    if missing := [name for name in expected if name not in stored]:
        raise ConfigError(f"{missing[0]}: missing in {place}{_and_others(missing)}")
    if unused := [name for name in stored if name not in expected]:
        raise ConfigError(
            f"{unused[0]}: in {stored[unused[0]].file} belongs to no parameter of the model"
            f"{_and_others(unused)}"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise ConfigError(
                f"{name}: in {stored[name].file} has shape {stored[name].shape}, expected {shape}"
            )


def fill(
    sources: Params, stored: Mapping[str, Any], dtype: Any, sharding: Sharding | None
) -> Params:
    """Builds parameters from tensors.

    Args:
      sources: where each parameter is stored.
      stored: name -> something with slices.
      dtype: of the parameters that have a gradient; others keep that of their spec.
      sharding: as in `load`.
    """

    def parameter(source: Source) -> jax.Array:
        spec, kind = source.spec, dtype if source.spec.trainable else source.spec.dtype
        where = sharding(spec) if sharding else SingleDeviceSharding(jax.local_devices()[0])

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            sizes = zip(index, spec.shape, strict=True)
            return source.read(stored, [slice(*s.indices(n)[:2]) for s, n in sizes], kind)

        # waiting keeps host buffers from piling up
        return jax.block_until_ready(jax.make_array_from_callback(spec.shape, where, shard))

    return jax.tree.map(parameter, sources)


def _check_copy(name: str, copy: Any, original_name: str, original: Any) -> None:
    if copy.shape != original.shape:
        raise ConfigError(
            f"{name}: in {copy.file} has shape {copy.shape}, but {original_name} {original.shape}"
        )
    rows = max(1, _CHUNK // copy.shape[1])
    for start in range(0, copy.shape[0], rows):
        part = (slice(start, min(start + rows, copy.shape[0])), slice(0, copy.shape[1]))
        if not np.array_equal(copy[part], original[part]):
            raise ConfigError(f"{name}: in {copy.file} differs from {original_name}")


def _and_others(names: list[str]) -> str:
    return f", and {len(names) - 1} more like it" if len(names) > 1 else ""
