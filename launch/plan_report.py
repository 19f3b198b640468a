"""The tables of a plan, on the terminal and in Markdown."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.table
from rich.console import Console

from launch import roofline
from launch.plan_analytic import CONTEXT, Needs
from launch.plan_case import Case
from launch.plan_compiled import Compiled, Moved
from launch.roofline import GIB, Chip, Fabric

WAITS = 8  # that are shown
LISTED = 8  # likewise, of collectives that the design does not name


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, names of columns and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def show(console: Console, tables: Sequence[Table]) -> None:
    """Prints tables."""
    for table in tables:
        drawn = rich.table.Table(title=table.title, box=rich.box.SIMPLE_HEAD, title_justify="left")
        for number, name in enumerate(table.columns):
            drawn.add_column(name, justify="left" if number == 0 else "right")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)


def markdown(title: str, tables: Sequence[Table]) -> str:
    """The same as a document."""
    lines = [f"# {title}", ""]
    for table in tables:
        rules = [":---", *["---:"] * (len(table.columns) - 1)]
        grid = [table.columns, tuple(rules), *table.rows]
        lines += [f"## {table.title}", "", *(f"| {' | '.join(row)} |" for row in grid), ""]
    return "\n".join(lines)


def analytic(planned: Case, needs: Needs, fabric: Fabric) -> list[Table]:
    """What the step needs."""
    chip = fabric.chip
    where, layout = planned.topology, planned.layout
    facts = [
        ("devices", f"{where.devices:,} ({where.name})"),
        ("mesh", " x ".join(f"{name} {length}" for name, length in fabric.axes.items())),
        (
            "context, expert parallel ranks",
            f"{layout.context}, {layout.expert}; experts see {layout.expert_micro_batches} parts",
        ),
        ("parameters, of these used by a token", _two(needs.parameters)),
        ("tokens of a step", f"{planned.tokens:,} (rows of {planned.phase.context:,})"),
        ("kernels", planned.model.kernels),
        ("model TFLOPs of a device and step", _number(needs.model_flops / 1e12)),
        ("TFLOPs with recomputation", _number(needs.hardware_flops / 1e12)),
        ("seconds for these at the peak", _number(_seconds(needs.hardware_flops, chip))),
    ]
    memory = [(kind, _bytes(size)) for kind, size in (needs.state | needs.working).items()]
    memory += [("memory of a device", _bytes(chip.hbm))]
    traffic = [
        (t.purpose, t.kind, " x ".join(t.axes), _bytes(t.moved), _number(_time(t, fabric)))
        for t in needs.traffic
    ]
    return [
        Table("The step", ("", "value"), facts),
        Table("Memory of a device, counted from the config", ("", "bytes"), memory),
        Table(
            "What must reach a device in a step",
            ("purpose", "as", "over", "bytes", "seconds"),
            traffic,
        ),
    ]


def compiled(needs: Needs, fabric: Fabric, found: Compiled) -> list[Table]:
    """What the compiler made of it."""
    schedule, chip = found.schedule, fabric.chip
    memory = [(kind, _bytes(size)) for kind, size in found.memory.items()]
    memory += [("needed", _bytes(found.hbm)), ("memory of a device", _bytes(chip.hbm))]
    least: dict[str, float] = {}
    for traffic in needs.traffic:
        least[traffic.purpose] = least.get(traffic.purpose, 0.0) + traffic.moved
    rows = []
    for name in sorted(found.moved.keys() | least.keys()):
        moved = found.moved.get(name, Moved())
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(moved.kinds.items()))
        least_of, ratio = "", ""
        if name in least:
            least_of, ratio = _bytes(least[name]), f"{moved.bytes / least[name]:.2f}"
        beside = f"{moved.beside / moved.bytes:.0%}" if moved.bytes else ""
        rows.append(
            (name, kinds, _number(moved.runs), _bytes(moved.bytes), least_of, ratio, beside)
        )
    counted = sum(schedule.flops.values())
    times = [
        ("compute", _number(schedule.compute), ""),
        ("memory", _number(schedule.memory), ""),
        *(
            (name, _number(seconds), _number(schedule.exposed.get(name, 0.0)))
            for name, seconds in sorted(schedule.links.items(), key=lambda x: -x[1])
        ),
    ]
    longest = sorted(schedule.waits.items(), key=lambda x: -x[1])[:WAITS]
    waits = [(what, _number(seconds)) for what, seconds in longest]
    facts = [
        ("FLOPs counted / analytic", f"{counted / needs.hardware_flops:.2f}"),
        ("step, seconds", _number(schedule.seconds)),
        ("bound by", schedule.binds),
        ("MFU", f"{roofline.mfu(needs.model_flops, schedule.seconds, chip):.1%}"),
        ("compiled in, seconds", f"{found.seconds['compile']:.0f}"),
        ("traced in, seconds", f"{found.seconds['trace']:.0f}"),
        ("host memory", _bytes(found.host_bytes)),
    ]
    if found.trips_unknown:
        facts.append(("loops of unknown length, counted once", str(found.trips_unknown)))
    tables = [
        Table("Memory of a device, as compiled", ("", "bytes"), memory),
        Table(
            "Collectives of the module",
            ("purpose", "in the text", "runs", "bytes", "least", "ratio", "beside other work"),
            rows,
        ),
        Table("Seconds of a step", ("resource", "busy", "exposed"), times),
        Table("Longest waits of a step", ("collective", "seconds"), waits),
        Table("Result", ("", "value"), facts),
    ]
    if found.unexpected:
        ranked = sorted(found.unexpected.items(), key=lambda item: -item[1])
        lines = [(line, _bytes(moved)) for line, moved in ranked[:LISTED]]
        if rest := ranked[LISTED:]:
            lines.append((f"{len(rest)} other kinds", _bytes(sum(moved for _, moved in rest))))
        title = "Collectives that the design does not name"
        tables.append(Table(title, ("collective", "bytes"), lines))
    return tables


def summary(planned: Case, needs: Needs, fabric: Fabric, found: Compiled) -> Table:
    """One row for a table of plans."""
    schedule, layout = found.schedule, planned.layout
    least = sum(t.moved for t in needs.traffic if t.purpose == CONTEXT)
    context = found.moved[CONTEXT].bytes / least if least and CONTEXT in found.moved else 1.0
    return Table(
        "Row",
        (
            "slice",
            "context",
            "CP, EP",
            "needed",
            "of",
            "CP traffic / least",
            "step",
            "MFU",
            "bound by",
            "compiled",
        ),
        [
            (
                planned.topology.name,
                f"{planned.phase.context // 1024}k",
                f"{layout.context}, {layout.expert}",
                _bytes(found.hbm),
                _bytes(fabric.chip.hbm),
                f"{context:.2f}",
                f"{_number(schedule.seconds)} s",
                f"{roofline.mfu(needs.model_flops, schedule.seconds, fabric.chip):.0%}",
                schedule.binds,
                f"{found.seconds['compile']:.0f} s, {_bytes(found.host_bytes)}",
            )
        ],
    )


def plain(planned: Case, needs: Needs, found: Compiled | None) -> dict[str, Any]:
    """Everything, for programs."""
    result = {
        "study": planned.title,
        "phase": planned.phase.name,
        "topology": dataclasses.asdict(planned.topology),
        "mesh": dataclasses.asdict(planned.layout),
        "analytic": dataclasses.asdict(needs),
    }
    if found is not None:
        result["compiled"] = dataclasses.asdict(found) | {"hbm": found.hbm}
    return result


def _seconds(flops: float, chip: Chip) -> float:
    return flops / chip.flops["bf16"]


def _time(traffic, fabric: Fabric) -> float:
    return fabric.seconds(traffic.kind, traffic.moved, fabric.group(traffic.axes))


def _two(parameters: dict[str, int]) -> str:
    return f"{parameters['total']:,}, {parameters['active']:,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(size: float) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= 0.1 * unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 2**10:,.1f} KiB"
