"""Meshes for a step, ranked by what the config says of them."""

import dataclasses
from collections.abc import Callable, Iterator

from rich.console import Console

from c2.config import ConfigError
from launch import plan_analytic, plan_mesh, plan_report
from launch.plan_case import Case
from launch.plan_report import Table
from launch.roofline import GIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mesh: the case with it, what binds and for how long, all links' seconds, bytes needed."""

    planned: Case
    seconds: float
    links: float
    binds: str
    memory: float

    @property
    def overrides(self) -> list[str]:
        """What makes the study use it."""
        layout = self.planned.layout
        return [f"mesh.context={layout.context}", f"mesh.expert={layout.expert}"]


def candidates(planned: Case) -> list[Candidate]:
    """Every mesh of powers of two that divides batch, sequence and experts, the fastest first.

    Those that need more memory than a device has are left out.
    """
    found = []
    for layout in _layouts(planned):
        config = dataclasses.replace(planned.config, mesh=layout)
        case = dataclasses.replace(planned, config=config)
        try:
            needs, fabric = plan_analytic.needs(case), plan_mesh.fabric(case)
        except ConfigError:  # does not divide
            continue
        busy = {"compute": needs.hardware_flops / fabric.chip.flops["bf16"]}
        for traffic in needs.traffic:
            axes = [name for name in traffic.axes if fabric.axes[name] > 1]
            seconds = fabric.seconds(traffic.kind, traffic.moved, fabric.group(axes))
            name = " x ".join(axes)
            busy[name] = busy.get(name, 0.0) + seconds
        memory = sum(needs.state.values()) + sum(needs.working.values())
        if memory <= fabric.chip.hbm:
            binds = max(busy, key=busy.__getitem__)
            links = sum(busy.values()) - busy["compute"]
            found.append(
                Candidate(
                    planned=case, seconds=busy[binds], binds=binds, links=links, memory=memory
                )
            )
    return sorted(found, key=lambda one: (one.seconds, one.links))


def _layouts(planned: Case) -> Iterator:
    for context in _powers(planned.topology.devices):
        for expert in _powers(planned.topology.devices):
            if planned.model.moe is None and expert > 1:
                break
            yield dataclasses.replace(planned.layout, context=context, expert=expert)


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


def table(ranked: list[Candidate]) -> Table:
    """The ranking."""
    rows = [
        (
            str(one.planned.layout.context),
            str(one.planned.layout.expert),
            f"{one.memory / GIB:.1f}",
            f"{one.seconds:.2f}",
            one.binds,
            f"{one.links:.2f}",
        )
        for one in ranked
    ]
    columns = ("context", "expert", "GiB needed", "seconds at the least", "of", "links, seconds")
    return Table("Meshes that fit, counted from the config", columns, rows)


def run(console: Console, planned: Case, best: int, plan: Callable[[Candidate], int]) -> int:
    """Prints the ranking and plans the best meshes.

    Args:
      console: where to print.
      planned: the case; its own mesh gives what is not tried.
      best: how many to plan.
      plan: plans one and returns an exit status.

    Returns:
      0 if one of them fits, else 1.
    """
    ranked = candidates(planned)
    plan_report.show(console, [table(ranked)])
    if not ranked:
        console.print("no mesh fits")
        return 1
    return min(plan(one) for one in ranked[:best])
