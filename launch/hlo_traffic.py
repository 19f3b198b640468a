"""What a compiled module moves: its collectives, and traffic to memory.

Per device and run of the instruction; `launch.hlo.Module.runs` says how often a computation runs.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from launch.hlo import Instruction, Module, Shape
from launch.hlo_products import Assumptions

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_FREE = (
    "after-all",
    "bitcast",
    "call",
    "conditional",
    "constant",
    "get-tuple-element",
    "iota",
    "parameter",
    "tuple",
    "while",
)


@dataclass(frozen=True)
class Collective:
    """A collective, on one device.

    Attributes:
      kind: one of `KINDS`.
      shapes: of the results.
      moved: bytes that must reach the device from others, at the least; of an all-reduce twice its
        share.
      group: the devices of the first group, positions in the mesh; empty if not stated.
      scope: as of `launch.hlo.Instruction.scope`.
      key: what its end is found by; None if nothing else runs at the same time.
    """

    kind: str
    shapes: tuple[Shape, ...]
    moved: float
    group: tuple[int, ...]
    scope: str
    key: str | None

    def __str__(self):
        """As "all-gather of bf16[512,64], f32[384]"."""
        shapes = ", ".join(f"{s.dtype}[{','.join(map(str, s.dims))}]" for s in self.shapes)
        return f"{self.kind} of {shapes if len(shapes) <= 80 else shapes[:77] + '...'}"


def collective(
    module: Module, computation: str, instruction: Instruction, given: Assumptions
) -> Collective | None:
    """The collective that an instruction of a schedule is or starts; None for all others.

    TPUs also have collectives inside fusions: an all-reduce of which every device keeps a part is a
    reduce-scatter, and one that is spread over other work has a fusion where it starts, some with
    products in them, and one where it ends.
    """
    where, core = computation, instruction
    if instruction.opcode in ("async-start", "fusion") and instruction.called:
        where = instruction.called[0]
        inner = module.computations.get(where, {}).values()
        core = next((x for x in inner if _kind(x) in KINDS), instruction)
    kind = _kind(core)
    if kind not in KINDS:
        return None
    key, result = None, core.shapes
    if instruction.opcode == "fusion":
        kind, key, result = _fused(module, where, core, instruction)
        if kind is None:
            return None
    elif done := _done(module, computation, instruction):
        key = None if '"is_sync":true' in core.attributes else instruction.name
        result = done.shapes
    data = module.operands(where, core)
    if kind == "ragged-all-to-all":
        data = data[:1]  # then come the buffer for the result, offsets and sizes
    group, size = _group(core.attributes)
    sizes = (sum(_size(x.shapes) for x in data), _size(result))
    moved = _moved(kind, *sizes, size, given)
    return Collective(kind, result, moved, group, core.scope, key)


def ends(module: Module, computation: str, instruction: Instruction) -> str | None:
    """The key of the collective that an instruction waits for, if it does."""
    if instruction.opcode == "fusion" and instruction.called:
        inner = module.computations.get(instruction.called[0], {})
        if any('"AsyncCollectiveDone"' in x.attributes for x in inner.values()):
            core = next((x for x in inner.values() if x.opcode in KINDS), None)
            return _channel(core) if core else None
    if not instruction.opcode.endswith("-done"):
        return None
    here, name = module.computations[computation], instruction.operands[0]
    while name in here and here[name].opcode.endswith("-update"):
        name = here[name].operands[0]
    return name


def _kind(instruction: Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _fused(module: Module, inside: str, core: Instruction, fusion: Instruction):
    """Kind, key and result of a collective in a fusion; no kind if it began before."""
    targets = " ".join(x.attributes for x in module.computations[inside].values())
    if '"AsyncCollectiveStart"' in targets:
        return core.opcode, _channel(core), core.shapes
    if '"AsyncCollectiveDone"' in targets or inside.startswith("async_collective_fusion"):
        return None, None, ()
    scattered = core.opcode == "all-reduce" and _size(fusion.shapes) < _size(core.shapes)
    return ("reduce-scatter" if scattered else core.opcode), None, fusion.shapes


def _channel(core: Instruction) -> str:
    return "channel " + re.search(r"channel_id=(\d+)", core.attributes)[1]


def _size(shapes: tuple[Shape, ...]) -> float:
    return sum(shape.bytes for shape in shapes)


def _moved(kind: str, given: float, result: float, group: int, assumed: Assumptions) -> float:
    others = (group - 1) / group if group else 1.0
    match kind:
        case "all-gather":
            return result * others
        case "all-reduce":
            return 2 * given * others
        case "ragged-all-to-all":
            return given * others * assumed.sent
        case "collective-permute" | "collective-broadcast":
            return given
    return given * others


def hbm_bytes(module: Module, computation: str, instruction: Instruction) -> float:
    """Bytes an instruction reads and writes: operands and results that are not sliced or in place.

    What stays in on-chip memory counts too; kernels may read an operand more than once.
    """
    if instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done")):
        return 0.0
    operands = module.operands(computation, instruction)
    sizes = [_size(operand.shapes) for operand in operands]
    result = _size(instruction.shapes)
    if instruction.opcode == "dynamic-slice":
        return 2 * result
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if instruction.opcode == "fusion" and instruction.called:
        inner = module.computations.get(instruction.called[0], {})
        return _read(inner, sizes) + _written(inner, result)
    return sum(sizes) + result


def _read(inner: dict[str, Instruction], sizes: list[float]) -> float:
    total = 0.0
    for parameter in (x for x in inner.values() if x.opcode == "parameter"):
        users = [x for x in inner.values() if parameter.name in x.operands]
        whole = sizes[int(parameter.literal)] if int(parameter.literal) < len(sizes) else 0.0
        if users and all(
            user.opcode in ("dynamic-slice", "dynamic-update-slice")
            and user.operands[0] == parameter.name
            for user in users
        ):
            slices = [x for x in users if x.opcode == "dynamic-slice"]
            whole = sum(_size(x.shapes) for x in slices)
        total += whole
    return total


def _written(inner: dict[str, Instruction], result: float) -> float:
    root = next(reversed(inner.values()), None)
    while root is not None and root.opcode in ("bitcast", "copy", "convert"):
        root = inner.get(root.operands[0])
    if root is not None and root.opcode == "dynamic-update-slice":
        update = inner.get(root.operands[1])
        return _size(update.shapes) if update else result
    return result


def _done(module: Module, computation: str, start: Instruction) -> Instruction | None:
    if not start.opcode.endswith("-start"):
        return None
    here = module.computations[computation].values()
    return next((x for x in here if ends(module, computation, x) == start.name), None)


def _group(attributes: str) -> tuple[tuple[int, ...], int]:
    """The first group and its size."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}", attributes):
        group = tuple(map(int, listed[1].split(",")))
        return group, len(group)
    pattern = r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if iota := re.search(pattern, attributes):
        dims = [int(d) for d in iota[3].split(",")]
        order = [int(d) for d in iota[4].split(",")] if iota[4] else range(len(dims))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        group = ids.reshape(int(iota[1]), int(iota[2]))[0]
        return tuple(group.tolist()), len(group)
    return (), 0
