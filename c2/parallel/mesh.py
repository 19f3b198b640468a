"""Meshes: one grid of devices, seen in two ways (report section 5).

The grid has the axes `AXES`. To the dense part of the model, rows of a batch lie over `ROWS` (data
parallelism) and the tokens of a row over `TOKENS` (context parallelism). To the experts, whole
experts lie over `EXPERTS`, which is made out of both: any number of expert-parallel ranks goes with
any number of context-parallel ones. Axes of length 1 stay, so that nothing depends on which of
these parallelisms are in use.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from c2.config import ConfigError, runtime

AXES = ("data", "data_ep", "context", "context_ep")
ROWS = ("data", "data_ep")
TOKENS = ("context", "context_ep")
EXPERTS = ("data_ep", "context_ep")
REST = ("data", "context")  # ranks that hold the same experts
BATCH = PartitionSpec(ROWS, TOKENS)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How a training step is spread over devices; what is left of them splits the batch.

    Only ``dispatch`` changes what is computed by more than rounding, so a run can be resumed on
    another mesh.

    Attributes:
      context: ranks that share a sequence.
      expert: ranks that share the experts of a layer.
      weights: "replicated" on all devices, but for experts, or "sharded" over all of them and
        gathered layer by layer (FSDP; Zhao et al. 2023).
      layout: which tokens of a sequence a rank holds, see `c2.parallel.context`.
      exchange: what context-parallel ranks tell each other of their tokens: "latents", from which
        every rank projects all keys and values, or, for comparison, "keys_values" themselves.
      dispatch: format in which tokens travel to experts; "mxfp8" rounds them.
      expert_micro_batches: parts of a rank's tokens that go to the experts one after another, so
        that one is computed while the next is under way; bounds the memory of expert parallelism.
    """

    context: int = runtime(1)
    expert: int = runtime(1)
    weights: Literal["replicated", "sharded"] = runtime("replicated")
    layout: Literal["zigzag", "balanced"] = runtime("zigzag")
    exchange: Literal["latents", "keys_values"] = runtime("latents")
    dispatch: Literal["native", "mxfp8"] = "native"
    expert_micro_batches: int = runtime(1)

    def __post_init__(self):
        for key in ("context", "expert", "expert_micro_batches"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)} is not legal; legal: 1 or more")


DATA_PARALLEL = MeshConfig()


def shape(cfg: MeshConfig, devices: int) -> tuple[int, int, int, int]:
    """Lengths of the axes of a mesh of so many devices.

    Raises:
      ConfigError: if context-parallel ranks do not divide the devices, or expert-parallel ranks
        cannot be made out of data- and context-parallel ones.
    """
    context_ep = math.gcd(cfg.expert, cfg.context)
    data_ep = cfg.expert // context_ep
    if devices % cfg.context:
        raise ConfigError(f"context: {cfg.context} ranks do not divide {devices} devices")
    rows = devices // cfg.context
    if rows % data_ep:
        raise ConfigError(
            f"expert: {cfg.expert} ranks are {context_ep} along the context times {data_ep} along "
            f"the data, which do not divide the {rows} data-parallel ranks of {devices} devices "
            f"with context = {cfg.context}"
        )
    return rows // data_ep, data_ep, cfg.context // context_ep, context_ep


def make(cfg: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh of the given devices, all by default; ranks that talk most are closest.

    Raises:
      ConfigError: see `shape`.
    """
    devices = jax.devices() if devices is None else devices
    lengths = shape(cfg, len(devices))
    if devices[0].platform == "tpu":  # the last axes get the innermost rings of the torus
        grid = mesh_utils.create_device_mesh(lengths, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(devices).reshape(lengths)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def choose(rows: int, cfg: MeshConfig) -> Mesh:
    """A mesh of as many of the devices present as the layout and a micro-batch's rows allow.

    Raises:
      ConfigError: if no number of devices is possible or, of several processes, some would have
        nothing to do.
    """
    devices = jax.devices()
    for number in range(len(devices), 0, -1):
        try:
            lengths = shape(cfg, number)
        except ConfigError:
            continue
        if rows % (lengths[0] * lengths[1]) == 0 and (
            number == len(devices) or jax.process_count() == 1
        ):
            return make(cfg, devices[:number])
    raise ConfigError(
        f"mesh: context = {cfg.context} and expert = {cfg.expert} do not go with "
        f"{len(devices)} devices and micro-batches of {rows} rows; legal: data-parallel ranks "
        "(devices / context) that divide the rows, multiples of expert / gcd(expert, context)"
    )


def data_mesh(devices: int | None = None) -> Mesh:
    """A mesh of the first ``devices`` devices, all by default, that split the rows of a batch."""
    chosen = jax.devices()[:devices]
    if devices is not None and len(chosen) < devices:
        raise ValueError(f"{devices} devices asked for, {len(chosen)} present")
    return make(DATA_PARALLEL, chosen)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Copies a tree of arrays to every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Number of ranks along the product of some axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


@lru_cache
def rows_of_process(mesh: Mesh) -> tuple[int, int]:
    """Which part of a batch's rows this process must read: index of the part, number of parts.

    Processes whose devices hold different tokens of the same rows read the same part.

    Raises:
      ConfigError: if processes hold overlapping but different rows.
    """
    row_ranks = mesh.devices.reshape(size(mesh, ROWS), -1)
    held: dict[int, set[int]] = {}
    for rank, devices in enumerate(row_ranks):
        for device in devices:
            held.setdefault(device.process_index, set()).add(rank)
    parts = sorted({tuple(sorted(ranks)) for ranks in held.values()})
    if sum(map(len, parts)) != len(row_ranks) or len({len(part) for part in parts}) > 1:
        raise ConfigError(
            f"context: the mesh {dict(mesh.shape)} spreads rows unevenly over {len(held)} processes"
        )
    mine = tuple(sorted(held[jax.process_index()]))
    return parts.index(mine), len(parts)


def place(batch: Any, mesh: Mesh) -> Any:
    """Makes global arrays of a batch: rows over `ROWS`, tokens over `TOKENS`.

    Args:
      batch: arrays [rows, tokens, ...] with all tokens of this process's part of the rows, see
        `rows_of_process`.
      mesh: the mesh.
    """
    part, parts = rows_of_process(mesh)
    sharding = NamedSharding(mesh, BATCH)

    def put(x: np.ndarray) -> jax.Array:
        first = part * len(x)

        def mine(index: tuple[slice, ...]) -> np.ndarray:
            rows, *others = index
            start, stop, _ = rows.indices(parts * len(x))
            return x[(slice(start - first, stop - first), *others)]

        return jax.make_array_from_callback((parts * len(x), *x.shape[1:]), sharding, mine)

    return jax.tree.map(put, batch)
