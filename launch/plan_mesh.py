"""Where the devices of a mesh are in a slice that is not there, found without its compiler."""

import math
from dataclasses import dataclass

import numpy as np

from c2.config import ConfigError
from launch import plan_case
from launch.plan_case import Case, Topology, mesh_lengths
from launch.roofline import CHIPS, Fabric

_KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}  # jax's


@dataclass(frozen=True)
class _Device:
    """What assigning devices to a mesh asks of a device."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    process_index: int = 0
    slice_index: int = 0
    platform: str = "tpu"


def fabric(planned: Case) -> Fabric:
    """The links among the devices of a case's mesh, as `c2.parallel.mesh.make` lays them out."""
    from jax.experimental import mesh_utils

    from c2.parallel.mesh import AXES

    where, chip = planned.topology, CHIPS[planned.topology.chip]
    lengths = mesh_lengths(planned)
    axes = dict(zip(AXES, lengths, strict=True))
    if not where.is_tpu:
        ids = np.arange(where.devices)
        return Fabric(chip, where, np.stack(np.divmod(ids, where.lengths[1]), 1), axes)
    devices = _devices(where, chip.devices)
    grid = mesh_utils.create_device_mesh(lengths, devices, allow_split_physical_axes=True)
    cores = chip.devices > 1
    places = [(*d.coords[: len(where.lengths)], *[d.core_on_chip] * cores) for d in grid.flat]
    return Fabric(chip, where, np.array(places), axes)


def _devices(where: Topology, per_chip: int) -> list[_Device]:
    lengths = (*where.lengths, 1, 1, 1)[:3]
    places = [np.unravel_index(i, lengths[::-1])[::-1] for i in range(math.prod(lengths))]
    return [
        _Device(i * per_chip + core, tuple(map(int, place)), core, _KINDS[where.chip])
        for i, place in enumerate(places)
        for core in range(per_chip)
    ]


def topology(name: str) -> Topology:
    """Reads a topology's name.

    Raises:
      ConfigError: if it is none, or of a chip whose peaks are not known.
    """
    chip = name.partition(":")[0]
    if chip not in CHIPS:
        raise ConfigError(f"--topology: {chip!r} is not a chip; legal are {', '.join(CHIPS)}")
    return plan_case.topology(name, CHIPS[chip].devices)
