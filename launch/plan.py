"""What it takes to train a study's model on a slice of accelerators that is not there.

    python -m launch.plan --config=experiments/kimi_k25.py:32k --topology=v5p:8x8x16
    python -m launch.plan --config=... --topology=b200:64x8 --config.mesh.context=4 --phase=main
    python -m launch.plan --config=... --topology=v5p:8x8x16 --sweep

Counts parameters, memory, FLOPs and traffic from the config; compiles the real training step ahead
of time and reads from the scheduled module what it exchanges, when, and how long it takes at the
chips' peaks. `launch/plan.md` explains the tables. Without the extra `aot` there is no compiler,
and only the first part is printed. Kernels are those made for the chips.

Exit status: 0 done; 1 the step does not compile, or does not fit; 2 bad input; 130 interrupted.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.markup import escape

from c2.config import ConfigError
from launch import jax_setup, plan_case, targets
from launch.main import split_overrides

BEST = 2  # meshes of a sweep that are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A parsed command line."""

    config: str
    overrides: tuple[str, ...]
    topology: str
    phase: str | None
    sweep: bool
    out: str | None


def parse(argv: Sequence[str]) -> Options:
    """Parses a command line, program name first.

    Raises:
      ConfigError: for a flag that is unknown or missing, or a stray argument.
    """
    rest, overrides = split_overrides(argv)
    values = flags.FlagValues()
    define = {"flag_values": values}
    flags.DEFINE_string("config", None, "The study, as for launch.main.", **define)
    flags.DEFINE_string(
        "topology", None, "The slice: 'v5p:8x8x16', or 'b200:64x8' (hosts x GPUs).", **define
    )
    flags.DEFINE_string("phase", None, "A phase of the study; by default the first.", **define)
    flags.DEFINE_bool("sweep", False, f"Rank meshes and compile the best {BEST}.", **define)
    flags.DEFINE_string("out", None, "A folder; by default one in runs/plan.", **define)
    if {"--help", "-help", "-h"} & set(rest):
        print(__doc__, values.get_help(), sep="\n")
        sys.exit(0)
    try:
        stray = values(rest)[1:]
    except flags.Error as error:
        raise ConfigError(f"{error} (--help lists the flags)") from error
    if stray:
        raise ConfigError(f"unexpected argument {stray[0]!r}; all arguments are --NAME=VALUE")
    for name in ("config", "topology"):
        if not values[name].value:
            raise ConfigError(f"--{name} is missing; --help lists the flags")
    names = (f.name for f in dataclasses.fields(Options) if f.name != "overrides")
    return Options(overrides=tuple(overrides), **{name: values[name].value for name in names})


def main(argv: Sequence[str]) -> int:
    """Plans; returns the exit status."""
    try:
        return _run(parse(argv))
    except (ConfigError, targets.TargetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(options: Options) -> int:
    targets.prepare()  # also keeps jax from looking for chips
    from launch import plan_mesh, plan_sweep

    where = plan_mesh.topology(options.topology)
    planned = plan_case.case(options.config, options.overrides, options.phase, where)
    console = Console()
    name = f"{planned.title}-{where.name}".replace(":", "-")
    folder = Path(options.out) if options.out else Path("runs") / "plan" / name
    if not options.sweep:
        return plan(console, planned, options, folder)

    def one(found: plan_sweep.Candidate) -> int:
        layout = found.planned.layout
        inside = folder / f"context{layout.context}-expert{layout.expert}"
        chosen = dataclasses.replace(options, overrides=(*options.overrides, *found.overrides))
        return plan(console, found.planned, chosen, inside)

    return plan_sweep.run(console, planned, BEST, one)


def plan(console: Console, planned: plan_case.Case, options: Options, folder: Path) -> int:
    """Prints and saves a plan; returns the exit status."""
    from launch import plan_analytic, plan_compiled, plan_mesh, plan_report

    needs, fabric = plan_analytic.needs(planned), plan_mesh.fabric(planned)
    tables = plan_report.analytic(planned, needs, fabric)
    plan_report.show(console, tables)
    found, status = None, 0
    if reason := targets.missing(planned.topology.name):
        console.print(f"not compiled: {escape(reason)}", soft_wrap=True)
    else:
        try:
            result, text = _compile(console, planned, options)
        except plan_compiled.CompileError as error:
            console.print(f"does not compile: {escape(str(error))}", soft_wrap=True)
            status = 1
        else:
            found = plan_compiled.read(result, text, planned, needs, fabric)
            more = plan_report.compiled(needs, fabric, found)
            plan_report.show(console, more)
            tables += [*more, plan_report.summary(planned, needs, fabric, found)]
            status = int(found.hbm > fabric.chip.hbm)
    folder.mkdir(parents=True, exist_ok=True)
    plain = plan_report.plain(planned, needs, found)
    (folder / "plan.json").write_text(json.dumps(plain, indent=1))
    title = f"{planned.title} on {planned.topology.name}"
    (folder / "plan.md").write_text(plan_report.markdown(title, tables))
    console.print(f"saved: {escape(str(folder / 'plan.md'))}", soft_wrap=True)
    return status


def _compile(console: Console, planned: plan_case.Case, options: Options):
    from launch import plan_compiled

    request = {
        "config": options.config,
        "overrides": options.overrides,
        "phase": planned.phase.name,
        "topology": planned.topology.name,
    }
    start = time.monotonic()
    with console.status("starting the compiler") as status:

        def tell(stage: str, resident: int) -> None:
            seconds = time.monotonic() - start
            status.update(f"{stage}: {seconds:.0f} s, {resident / 2**30:.1f} GiB of host memory")

        return plan_compiled.compile_step(request, tell)


if __name__ == "__main__":
    jax_setup.quiet_logs()
    sys.exit(main(sys.argv))
