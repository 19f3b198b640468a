"""Peaks of chips, and how long collectives and whole schedules take at the least.

Times are those of data sheets: no product reaches its peak, no link its bandwidth, latencies are
left out. They rank meshes and say what binds; they do not predict a measurement.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from launch import hlo_traffic
from launch.hlo import Module
from launch.hlo_products import Assumptions, products
from launch.plan_case import Topology

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Peaks of one jax device.

    Attributes:
      flops: per second, by type; other types count as bf16.
      hbm: bytes of memory that programs can have.
      hbm_bandwidth: bytes per second.
      link: bytes per second and direction, of one link of a TPU's torus or of all a GPU's NVLinks.
      network: bytes per second and direction between hosts, of one GPU.
      devices: jax devices on a chip.
      wraps: a dimension of a TPU slice is a ring if it is a multiple of this.
    """

    flops: Mapping[str, float]
    hbm: float
    hbm_bandwidth: float
    link: float
    network: float = 0.0
    devices: int = 1
    wraps: int = 4


def _tpu(bf16, fp8, hbm_gib, bandwidth, ici, links, devices=1, wraps=4) -> Chip:
    """From the columns of Google's tables, per chip; f32 products take six passes of bf16.

    Of the memory 0.3 GiB a chip are kept by the runtime at least; ``ici`` counts both directions.
    """
    flops = {"bf16": bf16, "f8": fp8, "f32": bf16 / 6}
    return Chip(
        flops={name: value * 1e12 / devices for name, value in flops.items()},
        hbm=hbm_gib * GIB / devices,
        hbm_bandwidth=bandwidth * 1e9 / devices,
        link=ici * 1e9 / 2 / links,
        devices=devices,
        wraps=wraps,
    )


def _gpu(bf16, f32, hbm, bandwidth, nvlink) -> Chip:
    """From NVIDIA's data sheets, without sparsity; a 400 Gb/s network card for every GPU."""
    flops = {"bf16": bf16, "f8": 2 * bf16, "f32": f32}
    return Chip(
        flops={name: value * 1e12 for name, value in flops.items()},
        hbm=hbm,
        hbm_bandwidth=bandwidth * 1e12,
        link=nvlink * 1e9 / 2,
        network=50e9,
    )


# TPUs: cloud.google.com/tpu/docs/tpu7x, whose table has v5p, v6e and TPU7x side by side (peak
# compute, HBM, HBM bandwidth, bidirectional ICI bandwidth); v5e: cloud.google.com/tpu/docs/v5e.
# A TPU7x chip is two devices. Tori: three dimensions, v5e and v6e two, which close at 16.
# GPUs: NVIDIA's data sheets of H100 SXM, H200 SXM and HGX B200 (2.25 PFLOP/s dense bf16, 8 TB/s,
# NVLink 1.8 TB/s both ways); memory as in launch/chips, what the driver shows; DGX systems have
# one ConnectX-7 of 400 Gb/s a GPU.
CHIPS = {
    "v5e": _tpu(197, 197, 16, 819, 400, links=4, wraps=16),
    "v5p": _tpu(459, 459, 95, 2765, 1200, links=6),
    "v6e": _tpu(918, 918, 32, 1638, 800, links=4, wraps=16),
    "tpu7x": _tpu(2307, 4614, 192, 7380, 1200, links=6, devices=2),
    "h100": _gpu(989, 67, 84_978_761_728, 3.35, 900),
    "h200": _gpu(989, 67, 151_397_597_184, 4.8, 900),
    "b200": _gpu(2250, 80, 191_514_411_008, 8.0, 1800),
}


@dataclass(frozen=True)
class Fabric:
    """Where the devices of a mesh are, to time collectives among them.

    Attributes:
      chip: their peaks.
      topology: the slice.
      places: int [device, dimension], in the order of the mesh: coordinates in the torus and, where
        a chip is two devices, which; or the number of the host and that of the GPU in it.
      axes: lengths of the mesh's axes.
    """

    chip: Chip
    topology: Topology
    places: np.ndarray
    axes: Mapping[str, int]

    def over(self, group: Iterable[int]) -> tuple[str, ...]:
        """The axes of the mesh along which the devices of a group differ."""
        at = np.unravel_index(np.array(list(group), int), tuple(self.axes.values()))
        return tuple(
            name for name, index in zip(self.axes, at, strict=True) if len(set(index.tolist())) > 1
        )

    def group(self, axes: Iterable[str]) -> tuple[int, ...]:
        """The first of the groups of devices that differ along some axes only."""
        index = np.arange(len(self.places)).reshape(tuple(self.axes.values()))
        held = tuple(slice(None) if name in axes else 0 for name in self.axes)
        return tuple(index[held].reshape(-1).tolist())

    def seconds(self, kind: str, moved: float, group: tuple[int, ...]) -> float:
        """How long a collective takes at least, if nothing else uses the links.

        Args:
          kind: as of `launch.hlo_traffic.Collective`.
          moved: likewise.
          group: likewise; without it, all devices.
        """
        places = self.places[list(group)] if group else self.places
        if len(places) < 2 or not moved:
            return 0.0
        exchange = kind in ("all-to-all", "ragged-all-to-all")
        if self.topology.is_tpu:
            return self._torus(places, moved, exchange)
        return self._hosts(places, moved, exchange)

    def _torus(self, places: np.ndarray, moved: float, exchange: bool) -> float:
        lengths = self.topology.lengths
        held = [len(set(places[:, d].tolist())) for d in range(len(lengths))]
        both = places.shape[1] > len(lengths) and len(set(places[:, -1].tolist())) > 1
        # devices of a chip share its links; what all want comes to the chip once
        share = 1.0 if both and not exchange else 1.0 / self.chip.devices
        link = self.chip.link * share
        rings = [
            n == length and n > 2 and length % self.chip.wraps == 0
            for n, length in zip(held, lengths, strict=True)
        ]
        dims = [(n, ring) for n, ring in zip(held, rings, strict=True) if n > 1]
        if not dims:  # on one chip
            return moved / (6 * self.chip.link)
        if not exchange:
            return moved / (link * sum(2 if ring else 1 for _, ring in dims))
        # the busiest link if every message takes the shortest way, one dimension after the other
        sent = moved * len(places) / (len(places) - 1)
        return max(sent * n / (8 if ring else 4) for n, ring in dims) / link

    def _hosts(self, places: np.ndarray, moved: float, exchange: bool) -> float:
        size, hosts = len(places), len(set(places[:, 0].tolist()))
        each = size / hosts
        if hosts == 1:
            return moved / self.chip.link
        if exchange:
            inside = (each - 1) / (size - 1)
            return max(moved * (1 - inside) / self.chip.network, moved * inside / self.chip.link)
        # what a host lacks comes to it once, over all its cards, and spreads inside
        whole = moved * size / (size - 1)
        across = whole * (hosts - 1) / hosts / each
        return max(across / self.chip.network, (moved - across) / self.chip.link)


@dataclass
class Schedule:
    """What a schedule costs on one device.

    Attributes:
      seconds: from begin to end; collectives without work beside them and waits included.
      compute: of products at their peaks.
      memory: of all traffic to memory, at its bandwidth.
      links: of collectives, by the axes of the mesh that they run over.
      exposed: the part of these that nothing hides.
      waits: the same, by kind and results of the collective.
      flops: of products, by type.
    """

    seconds: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    links: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)

    def add(self, other: "Schedule", times: float) -> None:
        """Appends another schedule, run ``times`` times."""
        self.seconds += other.seconds * times
        self.compute += other.compute * times
        self.memory += other.memory * times
        for name in ("links", "exposed", "waits", "flops"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] = mine.get(key, 0.0) + value * times

    @property
    def binds(self) -> str:
        """The resource that is busy longest."""
        busy = {"compute": self.compute, "memory": self.memory} | self.links
        return max(busy, key=busy.__getitem__)


def simulate(module: Module, fabric: Fabric, given: Assumptions) -> Schedule:
    """Runs a module's schedule in order: each instruction takes its time at the peaks.

    A product takes the longer of its FLOPs and its memory traffic. A collective that is started
    runs on the links of its axes, after those before it there, until the schedule waits for it.
    """
    return _simulated(module, module.entry, fabric, given)


def _simulated(module: Module, name: str, fabric: Fabric, given: Assumptions) -> Schedule:
    total = Schedule()
    under_way: dict[str, tuple[float, str, str]] = {}  # when it is done, over which axes, what
    free: dict[str, float] = {}  # when the links are

    def wait(until: float, axes: str, what: str) -> None:
        exposed = max(until - total.seconds, 0.0)
        total.exposed[axes] = total.exposed.get(axes, 0.0) + exposed
        total.waits[what] = total.waits.get(what, 0.0) + exposed
        total.seconds += exposed

    for instruction in module.computations[name].values():
        for inner, trips in module.inner(name, instruction):
            total.add(_simulated(module, inner, fabric, given), trips)
        key = hlo_traffic.ends(module, name, instruction)
        if key in under_way:
            wait(*under_way.pop(key))
        found = hlo_traffic.collective(module, name, instruction, given)
        if found:
            axes = " x ".join(fabric.over(found.group)) or "all"
            seconds = fabric.seconds(found.kind, found.moved, found.group)
            total.links[axes] = total.links.get(axes, 0.0) + seconds
            free[axes] = max(free.get(axes, 0.0), total.seconds) + seconds
            if found.key is None:
                wait(free[axes], axes, str(found))
            else:
                under_way[found.key] = free[axes], axes, str(found)
        compute = 0.0
        for product in products(module, name, instruction, given):
            total.flops[product.dtype] = total.flops.get(product.dtype, 0.0) + product.flops
            compute += product.flops / peak(fabric.chip, product.dtype)
        memory = 0.0 if found else hlo_traffic.hbm_bytes(module, name, instruction)
        memory /= fabric.chip.hbm_bandwidth
        total.compute += compute
        total.memory += memory
        total.seconds += max(compute, memory)
    return total


def peak(chip: Chip, dtype: str) -> float:
    """FLOPs per second of products of a type, named as in HLO."""
    kind = "f8" if dtype.startswith("f8") else dtype
    return chip.flops.get(kind, chip.flops["bf16"])


def mfu(model_flops: float, seconds: float, chip: Chip) -> float:
    """Model FLOPs of one device over what it could do in bf16 in that time."""
    return model_flops / (seconds * chip.flops["bf16"]) if seconds else math.nan
