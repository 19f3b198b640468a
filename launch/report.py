"""What a person sees of a result: `report.md` and the table of claims at the terminal."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.table
import rich.text

from experiments.registry import Study
from experiments.study import Claim, Result
from launch import run_dir


def to_dict(result: Result, study: Study, ending: Mapping[str, Any]) -> dict[str, Any]:
    """The content of result.json; for `ending` see `markdown`."""
    return {
        "study": study.info.name,
        "variant": study.variant,
        "question": study.info.question,
        **ending,
        "summary": result.summary,
        "claims": [{**vars(claim), "verdict": claim.verdict} for claim in result.claims],
        "metrics": result.metrics,
        "tables": result.tables,
        "figures": [vars(figure) for figure in result.figures],
    }


def claims_of(stored: Mapping[str, Any]) -> list[Claim]:
    """The claims in a result.json."""
    return [
        Claim(**{key: value for key, value in claim.items() if key != "verdict"})
        for claim in stored["claims"]
    ]


def claims_table(claims: Sequence[Claim]) -> rich.table.Table:
    """The claims with their verdicts, for a terminal."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("claim")
    for heading in ("measured", "bound", "seeds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for claim in claims:
        style = "green" if claim.verdict == "shown" else "yellow"
        table.add_row(
            rich.text.Text(claim.statement),  # Text: a "[0, 1]" in it is no markup
            _cell(claim.measured),
            f"{claim.relation} {_cell(claim.bound)}",
            str(claim.seeds),
            rich.text.Text(claim.verdict, style=style),
        )
    return table


def markdown(
    result: Result, study: Study, start: Mapping[str, Any], ending: Mapping[str, Any]
) -> str:
    """The report.

    Args:
      result: what the study found.
      study: the study that ran.
      start: this start's entry in overrides.json.
      ending: `finished` (time), `seconds` (wall time of this start), `resumed` (whether earlier
        starts did a part of the work) and `devices`.
    """
    resumed = " since it was resumed" if ending["resumed"] else ""
    shown = sum(claim.verdict == "shown" for claim in result.claims)
    sections = [
        f"# {study.info.question or study.title}",
        f"`{study.title}`: {shown} of {len(result.claims)} claims shown,"
        f" {ending['seconds']:.1f} s{resumed}.",
        result.summary.strip(),
    ]
    if result.claims:
        rows = [
            {
                "claim": claim.statement,
                "measured": claim.measured,
                "bound": f"{claim.relation} {_cell(claim.bound)}",
                "seeds": claim.seeds,
                "verdict": f"**{claim.verdict}**",
                "note": claim.note,
            }
            for claim in result.claims
        ]
        sections += ["## Claims", _table(rows)]
    if result.figures:
        sections.append("## Figures")
        for figure in result.figures:
            caption = " ".join(figure.caption.split())
            sections.append(f"![{caption}]({figure.path})\n\n*{caption}*")
    for title, rows in result.tables.items():
        sections += [f"## {title}", _table(rows)]
    if result.metrics:
        rows = [{"metric": key, "value": value} for key, value in result.metrics.items()]
        sections += ["## Metrics", _table(rows)]
    sections += ["## How it was run", _provenance(study, start, ending)]
    return "\n\n".join(sections) + "\n"


def _provenance(study: Study, start: Mapping[str, Any], ending: Mapping[str, Any]) -> str:
    git = start["git"]
    revision = f"{git['revision']}{' with local changes' if git['dirty'] else ''}" if git else ""
    changes = [f"`{change}`" for change in start["changes"]]
    versions = [f"{name} {version}" for name, version in start["versions"].items()]
    facts = {
        "Command": f"`{shlex.join(start['command'])}`",
        f"Changes from `{study.title}`": "; ".join(changes) or "none",
        "Config": f"[{run_dir.CONFIG}]({run_dir.CONFIG})",
        "Time": f"{start['time']} to {ending['finished']}",
        "Machine": ", ".join(filter(None, [start["machine"], ending["devices"]])),
        "Revision": revision or "not in git",
        "Versions": ", ".join(versions),
    }
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table; its columns are the keys of all rows in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if hasattr(value, "tolist"):  # numpy and jax scalars
        value = value.tolist()
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).splitlines()).replace("|", "\\|")
