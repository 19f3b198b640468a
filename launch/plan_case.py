"""What a plan is about: one phase of a study on one slice of accelerators that is not there."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from c2.config import ConfigError, located
from launch import targets

# the chip's kernels, see `pallas_kernels`
_KERNELS = {"h100": "hopper", "h200": "hopper", "b200": "blackwell"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice: name, kind of chip, lengths of the torus or (hosts, GPUs of a host), devices."""

    name: str
    chip: str
    lengths: tuple[int, ...]
    devices: int

    @property
    def is_tpu(self) -> bool:
        """Whether it is a torus of TPUs; else it is hosts with GPUs."""
        return self.chip not in targets.GPUS

    @property
    def kernels(self) -> str:
        """The backend of kernels that is made for the chip."""
        return _KERNELS.get(self.chip, "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A phase of a study, with kernels for the chips of a topology.

    Attributes:
      title: of the study, "NAME:variant".
      config: the study's, a dataclass with ``model``, ``phases``, ``mesh`` and ``optimizer``.
      phase: one of ``config.phases``.
      model: as the phase runs it.
      topology: where.
    """

    title: str
    config: Any
    phase: Any
    model: Any
    topology: Topology

    @property
    def layout(self) -> Any:
        """The `c2.parallel.mesh.MeshConfig`."""
        return self.config.mesh

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.phase.batch * self.phase.context


def topology(name: str, devices_per_chip: int = 1) -> Topology:
    """Reads a topology's name.

    Args:
      name: as of `launch.targets.devices`, with a shape.
      devices_per_chip: jax devices that a chip of this kind is.

    Raises:
      ConfigError: if it is none.
    """
    chip, _, shape = name.partition(":")
    if not shape or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ConfigError(
            f"--topology: {name!r} is not legal; legal are TPU slices as 'v5p:8x8x16' and clusters "
            "of NVIDIA GPUs as 'b200:64x8' (hosts x GPUs)"
        )
    lengths = tuple(map(int, shape.split("x")))
    return Topology(
        name=name, chip=chip, lengths=lengths, devices=math.prod(lengths) * devices_per_chip
    )


def case(config: str, overrides: Sequence[str], phase: str | None, where: Topology) -> Case:
    """Reads the flags of a plan.

    Args:
      config: the study, as for `launch.main`.
      overrides: of the config.
      phase: name of a phase; the first one if None.
      where: the slice.

    Raises:
      ConfigError: for what is not legal.
    """
    from c2.training.pretrain import phase_model
    from launch.main import resolve

    study, _, resolved = resolve(config, overrides)
    if missing := {"model", "phases", "mesh", "optimizer"} - {
        field.name for field in dataclasses.fields(resolved)
    }:
        raise ConfigError(f"{study.title}: no pretraining study, it has no {sorted(missing)[0]!r}")
    phases = {p.name: p for p in resolved.phases}
    if phase is not None and phase not in phases:
        raise ConfigError(f"--phase: {phase!r} is not legal; legal: {', '.join(phases)}")
    chosen = phases[phase] if phase else resolved.phases[0]
    model = dataclasses.replace(phase_model(resolved.model, chosen), kernels=where.kernels)
    return Case(title=study.title, config=resolved, phase=chosen, model=model, topology=where)


def mesh_lengths(planned: Case) -> tuple[int, ...]:
    """Lengths of the mesh's axes.

    Raises:
      ConfigError: if the mesh does not go with the devices or the batch.
    """
    from c2.parallel import mesh as meshes

    with located("config.mesh"):
        lengths = meshes.shape(planned.layout, planned.topology.devices)
    rows, ranks = planned.phase.batch // planned.phase.micro_batches, lengths[0] * lengths[1]
    if rows % ranks:
        raise ConfigError(
            f"config.phases: {rows} rows of a micro-batch of phase {planned.phase.name!r} do not "
            f"divide over {ranks} data-parallel ranks of {planned.topology.name}"
        )
    if planned.phase.context % (2 * planned.layout.context):
        raise ConfigError(
            f"config.phases: context = {planned.phase.context} must be a multiple of 2 * "
            f"mesh.context = {2 * planned.layout.context}"
        )
    return lengths
