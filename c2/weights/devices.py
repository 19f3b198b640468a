"""Arrays over the devices of a mesh as the shares of a publisher's ranks.

A rank speaks for some devices: those of its process, or a single one. It publishes the rows that
lie there, and of copies only the first, so that all ranks together publish everything once.
"""

from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from c2.weights.manifest import MismatchError
from c2.weights.shards import Part


def spread(x: jax.ShapeDtypeStruct, mesh: Mesh) -> NamedSharding:
    """Rows over the axes of a mesh, but for axes that do not divide what those before left."""
    axes, left = [], x.shape[0] if x.shape else 1
    for axis, size in mesh.shape.items():
        if left % size == 0:
            axes, left = [*axes, axis], left // size
    return NamedSharding(mesh, PartitionSpec(tuple(axes) or None) if x.shape else PartitionSpec())


def parts(
    tensors: Mapping[str, jax.Array], devices: Iterable[jax.Device] | None = None
) -> dict[str, Part]:
    """What a rank publishes; nothing is copied or waited for before the publisher does.

    Args:
      tensors: with rows spread over devices, or whole.
      devices: that the rank speaks for, of this process; all of it by default.

    Raises:
      MismatchError: if something else than rows is spread, or the rows are not consecutive. A
        rank for every device always has consecutive ones.
    """
    mine = set(jax.local_devices() if devices is None else devices)
    shares = {}
    for name, x in tensors.items():
        shards = [s for s in x.addressable_shards if s.replica_id == 0 and s.device in mine]
        if shards:
            shares[name] = _part(name, x.shape, shards) if x.shape else Part(shards[0].data)
    return shares


def _part(name: str, shape: tuple[int, ...], shards: Sequence) -> Part:
    if any(shard.data.shape[1:] != shape[1:] for shard in shards):
        raise MismatchError(f"{name} {shape}: spread along other axes than the first")
    ordered = sorted(shards, key=lambda shard: shard.index[0].start or 0)
    starts = [shard.index[0].start or 0 for shard in ordered]
    ends = [start + len(shard.data) for start, shard in zip(starts, ordered, strict=True)]
    if starts[1:] != ends[:-1]:
        raise MismatchError(f"{name} {shape}: rows from {starts} to {ends} are not consecutive")
    return Part(_Rows([shard.data for shard in ordered]), starts[0], shape[0])


class _Rows:
    """Pieces of a tensor on several devices, put together when the publisher wants to see them."""

    def __init__(self, pieces: Sequence[jax.Array]) -> None:
        self._pieces = pieces
        self.dtype = pieces[0].dtype
        self.shape = (sum(map(len, pieces)), *pieces[0].shape[1:])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate([np.asarray(piece) for piece in self._pieces], dtype=dtype)
