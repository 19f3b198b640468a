"""What a study is made of: the `Run` it gets from the launcher and the `Result` it gives back.

A study is one file, `experiments/NAME.py` or a file of your own anywhere. It defines

    VARIANTS = ("mini", "full")    # optional; the first is the default
    MULTI_PROCESS = True           # optional; several processes can share a run, see below
    def get_config(variant: str = "mini") -> Config    # a frozen dataclass, see c2/config.py
    def run(config: Config, run: Run) -> Result

and its docstring is the runbook: the question in the first line; then the exact command, what to
expect (numbers and figures) and the minutes it takes on 2 cores. Without `VARIANTS`, `get_config`
is called without an argument. Studies are listed without being imported, so `VARIANTS` must be a
literal.

With `--processes` every process calls `run`, with the same config and workdir, and jax has the
devices of all. Those other than `jax.process_index() == 0` write no files but their part of a
checkpoint, their console is mute, and nobody looks at their `Result`.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.console import Console

from c2.rl.calls import Launcher
from c2.rl.in_process import InProcess

if TYPE_CHECKING:
    import matplotlib.figure

Relation = Literal["<", "<=", ">", ">="]
Verdict = Literal["shown", "not shown"]

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement with the number that decides it: `measured relation bound`.

    The bound is chosen before the run and must be able to fail: "not shown" is a legal outcome.

    Attributes:
      statement: one sentence that is true exactly if the comparison holds.
      measured: the measured value; NaN (nothing could be measured) is never "shown".
      bound: what it is compared with; finite.
      relation: how it is compared.
      seeds: number of independent repetitions behind `measured`.
      note: one sentence of context, e.g. the spread over seeds or why the size is too small.
    """

    statement: str
    measured: float
    bound: float
    relation: Relation
    seeds: int
    note: str = ""

    def __post_init__(self) -> None:
        """Accepts numpy and jax scalars.

        Raises:
          ValueError: for an unknown relation, a bound that is not finite or fewer than 1 seed.
        """
        object.__setattr__(self, "measured", float(self.measured))
        object.__setattr__(self, "bound", float(self.bound))
        if self.relation not in get_args(Relation):
            raise ValueError(f"relation: {self.relation!r} is none of {get_args(Relation)}")
        if not math.isfinite(self.bound):
            raise ValueError(f"bound: {self.bound} can never decide {self.statement!r}")
        if self.seeds < 1:
            raise ValueError(f"seeds: a measurement needs at least 1, not {self.seeds}")

    @property
    def verdict(self) -> Verdict:
        """Whether the comparison holds; any comparison with NaN does not."""
        return "shown" if _COMPARE[self.relation](self.measured, self.bound) else "not shown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture on disk, made by `Run.save_figure`.

    Attributes:
      path: relative to the workdir, with forward slashes.
      caption: what is drawn, with units, and what to see in it.
    """

    path: str
    caption: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a study found; the launcher writes it to `result.json` and `report.md`.

    Attributes:
      summary: markdown, a few sentences: what was found and what this size cannot show.
      claims: statements with verdicts.
      figures: pictures in reading order.
      tables: title -> rows; the keys of a table's rows are its columns.
      metrics: flat scalars for later comparison, e.g. {"heldout/bits_per_byte": 2.1}.
    """

    summary: str
    claims: Sequence[Claim] = ()
    figures: Sequence[Figure] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def joined(*results: Result) -> Result:
    """The results of several parts of a study as one, in their order."""
    return Result(
        summary="\n\n".join(result.summary.strip() for result in results),
        claims=[claim for result in results for claim in result.claims],
        figures=[figure for result in results for figure in result.figures],
        tables={title: rows for result in results for title, rows in result.tables.items()},
        metrics={name: value for result in results for name, value in result.metrics.items()},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a study gets from the launcher.

    In a test or notebook: `run(get_config(), Run(workdir=tmp_path, console=Console(quiet=True)))`.

    Attributes:
      workdir: an existing folder for checkpoints, metrics and figures. After an interruption the
        study starts again in the same folder and continues from what it finds there. Bad input
        (`ConfigError`) should be found before the first line of `metrics.jsonl` and the first
        checkpoint: then a new folder is removed, and the corrected command can use it.
      console: where progress and messages are printed.
      services: makes what starts the services of reinforcement learning.
    """

    workdir: Path
    console: Console = dataclasses.field(default_factory=Console)
    services: Callable[[], Launcher] = InProcess

    def save_figure(self, figure: "matplotlib.figure.Figure", name: str, *, caption: str) -> Figure:
        """Writes `figures/NAME.png` into the workdir."""
        path = self.workdir / "figures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        return Figure(path=path.relative_to(self.workdir).as_posix(), caption=caption)


def new_figure(
    rows: int = 1, cols: int = 1, *, width: float = 5.0, height: float = 3.6
) -> tuple["matplotlib.figure.Figure", Any]:
    """A figure and its axes, as `pyplot.subplots` but without pyplot's global state or windows.

    Args:
      rows: number of panels from top to bottom.
      cols: number of panels from left to right.
      width: of one panel, inches.
      height: of one panel, inches.

    Returns:
      The figure and one `Axes`, or an array of them, squeezed as by `Figure.subplots`.
    """
    import matplotlib.figure  # takes a third of a second, which no `--list` should pay

    figure = matplotlib.figure.Figure((cols * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, cols)
