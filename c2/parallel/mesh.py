"""The data-parallel mesh and the placement of batches on it."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA = "data"  # mesh axis over which the rows of a batch are split


def data_mesh(devices: int | None = None) -> Mesh:
    """A mesh of the first ``devices`` devices (all by default) along the data axis."""
    chosen = jax.devices()[:devices]
    if devices is not None and len(chosen) < devices:
        raise ValueError(f"{devices} devices asked for, {len(chosen)} present")
    return jax.make_mesh((len(chosen),), (DATA,), axis_types=(AxisType.Auto,), devices=chosen)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Copies a tree of arrays to every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard_rows(batch: Any, mesh: Mesh) -> Any:
    """Splits the leading axis of every array of this process over its devices of the mesh.

    With several processes, each passes its own rows of the global batch.
    """
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)
