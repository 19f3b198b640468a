"""What the compiler made of a training step, next to what it needs at the least."""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from c2 import models
from c2.parallel import rules
from c2.parallel.mesh import TOKENS
from launch import hlo, hlo_traffic, roofline
from launch.hlo_products import Assumptions
from launch.hlo_traffic import Collective
from launch.plan_analytic import CONTEXT, EXPERT_TOKENS, GRADIENTS, WEIGHTS, Needs
from launch.plan_case import Case
from launch.roofline import Fabric, Schedule

SMALL, UNEXPECTED = "small", "unexpected"
WORKER = ("-m", "launch.plan_worker")


class CompileError(Exception):
    """The step does not compile, or its compiler crashed; one line says why."""


@dataclass
class Moved:
    """What is exchanged for one purpose, per device and step."""

    bytes: float = 0.0
    beside: float = 0.0  # of these, while other work may run
    runs: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)  # in the module's text


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled step.

    Attributes:
      memory: bytes on a device, by kind, as the compiler counts.
      seconds: of tracing and compiling.
      host_bytes: peak memory of the process that compiled.
      schedule: what the module's schedule costs.
      moved: by purpose.
      unexpected: bytes of collectives that the design does not name.
      trips_unknown: loops whose bound was not found; they count once.
    """

    memory: dict[str, int]
    seconds: dict[str, float]
    host_bytes: int
    schedule: Schedule
    moved: dict[str, Moved]
    unexpected: dict[str, float]
    trips_unknown: int

    @property
    def hbm(self) -> float:
        """Bytes that a device must have: the most at any time, arguments included, and code.

        It is at this peak that the compiler for TPUs refuses a program; its "temporaries" may be
        more than that, since they count buffers that never live together.
        """
        return self.memory["peak"] + self.memory["code"]


def compile_step(
    request: dict[str, Any],
    tell: Callable[[str, int], None],
    worker: tuple[str, ...] = WORKER,
) -> tuple[dict[str, Any], str]:
    """Compiles in another process.

    Args:
      request: what `launch.plan_worker` reads, without "hlo".
      tell: called every second with the stage and the resident bytes of the process.
      worker: arguments of the interpreter.

    Returns:
      The worker's last line and the module's text.

    Raises:
      CompileError: if there is no module.
    """
    with tempfile.TemporaryDirectory() as folder:
        errors, lines, text = (Path(folder) / name for name in ("errors", "lines", "module"))
        with errors.open("w") as err, lines.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *worker], stdin=subprocess.PIPE, stdout=out, stderr=err, text=True
            )
            try:
                json.dump(request | {"hlo": str(text)}, process.stdin)
                process.stdin.close()
                while process.poll() is None:
                    tell(_last(lines).get("stage", "starting"), _resident(process.pid))
                    time.sleep(0.5)
            finally:
                process.kill()
                process.wait()
        result = _last(lines)
        if "error" in result:
            raise CompileError(result["error"])
        if process.returncode or not text.exists():
            said = [line.strip() for line in errors.read_text().splitlines() if line.strip()]
            last = said[-1] if said else "no message"
            raise CompileError(
                f"the compiler crashed with status {process.returncode}: {last[:200]}"
            )
        return result, text.read_text()


def _last(lines: Path) -> dict[str, Any]:
    complete = [line for line in lines.read_text().splitlines() if line.endswith("}")]
    return json.loads(complete[-1]) if complete else {}


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(found[0]) * 1024 if found else 0


def read(
    result: dict[str, Any], text: str, planned: Case, needs: Needs, fabric: Fabric
) -> Compiled:
    """Reads a compiled module against what was asked for.

    Args:
      result: of the worker.
      text: of the module.
      planned: the case.
      needs: its analytic part.
      fabric: the links of its mesh.

    Returns:
      `Compiled`.
    """
    module = hlo.parse(text)
    given = Assumptions(rows=needs.rows, sent=needs.sent)
    moved: dict[str, Moved] = defaultdict(Moved)
    unexpected: dict[str, float] = defaultdict(float)
    unknown = 0
    replicated = planned.layout.weights == "replicated"
    sizes = _smallest_matrix(planned), _tokens(planned), GRADIENTS if replicated else UNEXPECTED
    for name, runs in module.runs().items():
        for instruction in module.computations[name].values():
            if instruction.opcode == "while" and module.trips(name, instruction) is None:
                unknown += 1
            found = hlo_traffic.collective(module, name, instruction, given)
            if found is None:
                continue
            for why, share in purposes(found, fabric, *sizes).items():
                entry = moved[why]
                entry.bytes += found.moved * runs * share
                entry.beside += found.moved * runs * share * (found.key is not None)
                entry.runs += runs
                entry.kinds[found.kind] = entry.kinds.get(found.kind, 0) + 1
                if why == UNEXPECTED:
                    unexpected[_line(found, fabric)] += found.moved * runs * share
    return Compiled(
        memory=result["memory"],
        seconds=result["seconds"],
        host_bytes=result["host_bytes"],
        schedule=roofline.simulate(module, fabric, given),
        moved=dict(moved),
        unexpected=dict(unexpected),
        trips_unknown=unknown,
    )


def purposes(
    found: Collective, fabric: Fabric, weight: int, tokens: set[int], sum_of_weights: str
) -> dict[str, float]:
    """What a collective is for, by its kind, axes and shapes, with each purpose's share of it.

    Compilers merge collectives, so one may be for several.

    Args:
      found: the collective.
      fabric: the mesh.
      weight: elements of the smallest matrix of a layer; a sum of fewer is not of weights.
      tokens: lengths of a dimension of tokens, of which parameters have none.
      sum_of_weights: what an all-reduce as large as a matrix is for.
    """
    if found.kind in ("ragged-all-to-all", "all-to-all"):
        return {EXPERT_TOKENS: 1.0}
    if found.kind == "all-reduce":
        largest = max((shape.elements for shape in found.shapes), default=0)
        return {sum_of_weights if largest >= weight else SMALL: 1.0}
    if found.kind not in ("all-gather", "reduce-scatter"):
        return {UNEXPECTED: 1.0}
    of_weights = WEIGHTS if found.kind == "all-gather" else GRADIENTS
    if not set(fabric.over(found.group)) <= set(TOKENS):
        return {of_weights: 1.0}
    shares: dict[str, float] = defaultdict(float)
    whole = sum(shape.bytes for shape in found.shapes)
    for shape in found.shapes:
        shares[CONTEXT if tokens & set(shape.dims) else of_weights] += shape.bytes / whole
    return shares


def _tokens(planned: Case) -> set[int]:
    """Lengths of a dimension of tokens: of a rank or a sequence, by rows or together."""
    phase, ranks = planned.phase, planned.layout.context
    rows = phase.batch * ranks // planned.topology.devices // phase.micro_batches
    per_row = {phase.context, phase.context // ranks}
    return per_row | {rows * n for n in per_row}


def _smallest_matrix(planned: Case) -> int:
    specs = [s for s in jax.tree.leaves(models.spec(planned.model)) if not rules.is_vector(s)]
    return min(
        math.prod(n for n, axis in zip(s.shape, s.axes, strict=True) if axis != "layer")
        for s in specs
    )


def _line(found: Collective, fabric: Fabric) -> str:
    over = " x ".join(fabric.over(found.group)) or "all devices"
    return f"{found} over {over}" + (f", from {found.scope}" if found.scope else "")
