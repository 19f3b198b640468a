"""Quantised tensors of released checkpoints, dequantised slice by slice as they are read.

Products with the scales are formed in f32, where they are exact: a code has at most four
significant bits, a scale of its group at most eight or is meant as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError
from c2.models.hf.files import Tensor

PER_WORD = 8  # INT4 codes in an int32
_FLOATS = (np.float32, np.float16, jnp.bfloat16)


@dataclass(frozen=True, eq=False)
class Fp8Blocks:
    """DeepSeek's FP8: e4m3 codes [out, in], one f32 factor per block of rows and columns."""

    codes: Tensor
    scales: Tensor  # [ceil(out / rows), ceil(in / columns)]
    block: tuple[int, int]

    @property
    def file(self) -> Path:
        """Where the codes are."""
        return self.codes.file

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised tensor."""
        return self.codes.shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """f32 values of a range of rows and columns."""
        scales = self.scales.data
        for axis, (wanted, size) in enumerate(zip(index, self.block, strict=True)):
            scales = _spread(scales, axis, wanted, size)
        return self.codes[index].astype(np.float32) * scales


@dataclass(frozen=True, eq=False)
class Int4Groups:
    """compressed-tensors' "pack-quantized" INT4: one factor per row and group of columns.

    Column i is in bits ``4 * (i % 8)`` of word ``i // 8``, as value + 8.
    """

    words: Tensor  # int32 [out, ceil(in / 8)]
    scales: Tensor  # [out, ceil(in / group)]
    shape: tuple[int, ...]
    group: int

    @property
    def file(self) -> Path:
        """Where the codes are."""
        return self.words.file

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """f32 values of a range of rows and columns."""
        rows, columns = index
        first = columns.start // PER_WORD
        words = self.words[rows, first : -(-columns.stop // PER_WORD)]
        codes = (words[:, :, None] >> 4 * np.arange(PER_WORD, dtype=np.int32)) & 0xF
        codes = codes.reshape(len(words), PER_WORD * words.shape[1])
        offset = columns.start - first * PER_WORD
        values = codes[:, offset : offset + columns.stop - columns.start]
        scales = _spread(self.scales[rows], 1, columns, self.group)
        return (values - 8).astype(np.float32) * scales.astype(np.float32)


def _spread(scales: np.ndarray, axis: int, wanted: slice, size: int) -> np.ndarray:
    """For each place of the range ``wanted`` on ``axis``, the scale of its group of ``size``."""
    return scales.take(np.arange(wanted.start, wanted.stop) // size, axis)


def dequantized(
    stored: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> dict[str, Tensor | Fp8Blocks | Int4Groups]:
    """The tensors that a model has, each made of the one, two or three that are stored.

    Args:
      stored: the tensors of the files.
      config: ``quantization_config`` of config.json, or None.

    Raises:
      ConfigError: for an unknown scheme, and for parts that don't fit each other.
    """
    method = config and config.get("quant_method")
    if method not in _METHODS:
        raise ConfigError(
            f"quantization_config.quant_method: {method!r} is not supported; "
            "fp8 or compressed-tensors"
        )
    tensors = _METHODS[method](stored, config)
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{name}: in {tensor.file} has type {tensor.dtype}, and what that means "
                "quantization_config does not say"
            )
    return tensors


def _fp8(stored: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, "quantization_config", fmt=("e4m3", None))
    block = config.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(_positive(n) for n in block)):
        raise ConfigError(
            f"quantization_config.weight_block_size: expected [rows, columns], got {block!r}"
        )
    tensors = dict(stored)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        codes = _part(stored, name.removesuffix("_scale_inv"), name, jnp.float8_e4m3fn)
        scales = tensors.pop(name)
        _check_shape(name, scales, _groups(codes.shape, block))
        tensors[name.removesuffix("_scale_inv")] = Fp8Blocks(codes, scales, tuple(block))
    return tensors


def _int4(stored: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    _require(config, "quantization_config", format=("pack-quantized",), kv_cache_scheme=(None,))
    groups = config.get("config_groups")
    if not (isinstance(groups, dict) and len(groups) == 1):
        raise ConfigError(f"quantization_config.config_groups: expected one group, got {groups!r}")
    ((name, group),) = groups.items()
    where = f"quantization_config.config_groups.{name}"
    _require(group, where, input_activations=(None,), output_activations=(None,))
    weights = group.get("weights") or {}
    _require(
        weights,
        f"{where}.weights",
        num_bits=(4,),
        type=("int",),
        strategy=("group",),
        symmetric=(True,),
        actorder=(None, False),
        dynamic=(None, False),
    )
    if not _positive(size := weights.get("group_size")):
        raise ConfigError(f"{where}.weights.group_size: expected a positive int, got {size!r}")
    tensors = dict(stored)
    for packed in [name for name in stored if name.endswith("_packed")]:
        base = packed.removesuffix("_packed")
        scales = _part(stored, f"{base}_scale", packed)
        shape = tuple(int(n) for n in _part(stored, f"{base}_shape", packed).data)
        if len(shape) != 2:
            raise ConfigError(f"{base}_shape: expected two numbers, got {shape}")
        words = _part(stored, packed, packed, np.int32)
        _check_shape(packed, words, _groups(shape, (1, PER_WORD)))
        _check_shape(f"{base}_scale", scales, _groups(shape, (1, size)))
        for name in (packed, f"{base}_scale", f"{base}_shape"):
            del tensors[name]
        tensors[base] = Int4Groups(words, scales, shape, size)
    return tensors


_METHODS = {None: lambda stored, _: dict(stored), "fp8": _fp8, "compressed-tensors": _int4}


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _require(config: Mapping[str, Any], where: str, **legal: tuple[Any, ...]) -> None:
    """Checks fields; an absent one counts as None."""
    for key, values in legal.items():
        if config.get(key) not in values:
            raise ConfigError(
                f"{where}.{key}: {config.get(key)!r} is not supported; "
                f"legal: {', '.join(map(repr, values))}"
            )


def _part(stored: Mapping[str, Tensor], name: str, of: str, dtype: Any = None) -> Tensor:
    if name not in stored:
        raise ConfigError(f"{name}: missing, but {stored[of].file} has {of}")
    if dtype is not None and stored[name].dtype != dtype:
        raise ConfigError(
            f"{name}: in {stored[name].file} is {stored[name].dtype}, expected {np.dtype(dtype)}"
        )
    return stored[name]


def _groups(shape: tuple[int, ...], sizes: Any) -> tuple[int, ...]:
    return tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ConfigError(f"{name}: in {tensor.file} has shape {tensor.shape}, expected {expected}")
