"""What one version of the weights consists of, and how it follows from the one before.

A version is committed by its manifest alone. It lists every tensor in chunks: flat ranges that are
encoded, stored and checked by themselves, so that a reader whose shards are not the writer's takes
the chunks that it needs. Each chunk carries the SHA-256 of its *new* bytes, and the manifest a
hash over these and the hash of the version before: two chains with the same hash hold the same
bytes, in the same order.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and the 8-bit floats with numpy
import numpy as np

from c2.weights.codec import Codec


class BrokenLinkError(RuntimeError):
    """A version that cannot be built from the one before: something is missing or damaged."""


class MismatchError(ValueError):
    """Tensors that are not those of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The numbers [start, stop) of a flat tensor, at [offset, offset + length) of a blob."""

    start: int
    stop: int
    sha256: str  # of the new state
    codec: Codec
    changes: int
    blob: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Form and chunks of a tensor; those of one writer's shard in its part of a manifest."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


Tensors = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """One version.

    Attributes:
      version: its number in the chain, one more than that of the version before.
      step: the trainer's name for it.
      epoch: of the writer's lease.
      base: the version that chunks are deltas of; None if all of them are full.
      base_chain: the chain hash of ``base``.
      chain: hash of all versions from the last one without a base to this one.
      tensors: by name.
    """

    version: int
    step: int
    epoch: int
    base: int | None
    base_chain: str | None
    chain: str
    tensors: Tensors


def state_hash(tensors: Tensors) -> str:
    """Hash of names, forms and bytes, however they are stored."""
    listed = [
        [name, t.dtype, list(t.shape), [[c.start, c.stop, c.sha256] for c in t.chunks]]
        for name, t in sorted(tensors.items())
    ]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def chain_hash(base_chain: str | None, version: int, step: int, tensors: Tensors) -> str:
    """The hash of a chain that this version is added to."""
    link = [base_chain, version, step, state_hash(tensors)]
    return hashlib.sha256(json.dumps(link).encode()).hexdigest()


def joined(parts: Iterable[Tensors]) -> dict[str, Tensor]:
    """The tensors of all writers' shards, with their chunks in order.

    Raises:
      MismatchError: if shards disagree, overlap, or leave something out.
    """
    forms: dict[str, tuple] = {}
    chunks: dict[str, list[Chunk]] = {}
    for part in parts:
        for name, tensor in part.items():
            form = tensor.dtype, tensor.shape
            if forms.setdefault(name, form) != form:
                raise MismatchError(f"{name}: {forms[name]} in one shard, {form} in another")
            chunks.setdefault(name, []).extend(tensor.chunks)
    tensors = {}
    for name, (dtype, shape) in sorted(forms.items()):
        ordered = tuple(sorted(chunks[name], key=lambda chunk: (chunk.start, chunk.stop)))
        tensors[name] = tensor = Tensor(dtype=dtype, shape=shape, chunks=ordered)
        borders = [0, *(chunk.stop for chunk in ordered)]
        starts = [*(chunk.start for chunk in ordered), tensor.size]
        if borders != starts:
            raise MismatchError(f"{name} {shape}: shards do not cover it once and completely")
    return tensors


def dump(content: Any) -> bytes:
    """Plain data with a checksum."""
    text = json.dumps(content, separators=(",", ":"))
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","content":{text}}}'.encode()


def load(data: bytes) -> Any:
    """What `dump` was given, as plain data.

    Raises:
      BrokenLinkError: if the data are damaged.
    """
    try:
        stored = json.loads(data)
        text = json.dumps(stored["content"], separators=(",", ":"))
        if hashlib.sha256(text.encode()).hexdigest() != stored["sha256"]:
            raise ValueError("checksum differs")
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenLinkError(f"damaged: {error}") from error
    return stored["content"]


def dump_manifest(manifest: Manifest) -> bytes:
    """A manifest with a checksum."""
    return dump(dataclasses.asdict(manifest))


def load_manifest(data: bytes) -> Manifest:
    """The manifest that `dump_manifest` was given.

    Raises:
      BrokenLinkError: if the data are damaged, or the chain hash is not that of the content.
    """
    content = load(data)
    found = Manifest(**content | {"tensors": tensors_from(content["tensors"])})
    if found.chain != chain_hash(found.base_chain, found.version, found.step, found.tensors):
        raise BrokenLinkError(f"version {found.version}: wrong chain hash")
    return found


def tensors_from(plain: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors out of the plain data of `load`."""
    return {
        name: Tensor(
            dtype=tensor["dtype"],
            shape=tuple(tensor["shape"]),
            chunks=tuple(Chunk(**chunk) for chunk in tensor["chunks"]),
        )
        for name, tensor in plain.items()
    }
