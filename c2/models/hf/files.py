"""Safetensors files, mapped into memory: a tensor costs what is read of it.

Read here and not with the `safetensors` package because that knows no FP8 in numpy. The format is
eight bytes of header length, a JSON header with type, shape and place of every tensor, and data:
https://github.com/huggingface/safetensors#format.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
}


@dataclass(frozen=True, eq=False)
class Tensor:
    """A stored tensor; indexing reads from the file."""

    file: Path
    data: np.ndarray  # a view of the mapped file

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """Its stored type."""
        return self.data.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        """The values at ``index``, slices or anything else that numpy takes."""
        return self.data[index]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; `ConfigError` if it isn't there or isn't one."""
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{file}: not found") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a JSON object, got a {type(data).__name__}")
    return data


def open_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, by name.

    Raises:
      ConfigError: if the file is missing, damaged, or not as long as its header says.
    """
    try:
        data = np.memmap(file, np.uint8, mode="r").view(np.ndarray)
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        begin, end = 8 + length, 8 + length
        tensors = {}
        for name, entry in header.items():
            tensors[name] = Tensor(file, _view(data[begin:], name, entry))
            end = max(end, begin + entry["data_offsets"][1])
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: damaged or cut short: {error}") from error
    if end != len(data):
        raise ConfigError(f"{file}: {len(data)} bytes long, but its header describes {end}")
    return tensors


def _view(data: np.ndarray, name: str, entry: dict[str, Any]) -> np.ndarray:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has type {entry['dtype']}; known are {', '.join(DTYPES)}")
    dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if stop - start != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{name} of shape {shape} in {stop - start} bytes")
    if not 0 <= start <= stop <= len(data):
        raise ValueError(f"{name} at {start}..{stop} of {len(data)} bytes of data")
    return data[start:stop].view(dtype).reshape(shape)


def open_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint: of ``model.safetensors``, or of the files its index names."""
    if (folder / "model.safetensors").exists():
        return open_file(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise ConfigError(f"{folder}: contains neither model.safetensors nor {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise ConfigError(f"{index}: weight_map: expected an object of file names")
    tensors = {}
    for name in sorted(set(weight_map.values())):
        tensors |= open_file(folder / name)
    for name in weight_map.keys() ^ tensors.keys():
        here, there = (index, "any file") if name in weight_map else (tensors[name].file, index)
        raise ConfigError(f"{name}: in {here} but not in {there}")
    for name, tensor in tensors.items():
        if tensor.file.name != weight_map[name]:
            raise ConfigError(f"{name}: in {tensor.file}, but {index.name} says {weight_map[name]}")
    return tensors
