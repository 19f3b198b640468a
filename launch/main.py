"""Runs one study.

  python -m launch.main --list
  python -m launch.main --config=experiments/NAME.py[:variant] [--workdir=DIR] [--config.KEY=VALUE]

Config overrides: --config.KEY=VALUE (or --config.KEY VALUE) sets one key of the study's config, for
example --config.model.hidden=64 --config.phases.0.steps=10 --config.seeds='[1, 2]'
--config.limit=none. --print_config shows all keys. An unknown key or a wrong type is refused.

The same command resumes an interrupted run. A finished run is shown, not computed again: choose
another --workdir for that. --config=DIR/config.json runs a saved config (or the output of
--print_config), with overrides if you like.

--processes=N runs a study on N processes of this machine; launch/README.md has Slurm, Kubernetes
and Cloud TPU.

Exit status: 0 finished, also if claims are "not shown"; 1 failed; 2 bad input; 130 interrupted;
143 stopped by SIGTERM.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import rich.box
import rich.markup
import rich.table
from absl import app, flags, logging
from rich.console import Console

from c2.config import ConfigError, differences, from_dict, override, to_dict
from experiments import registry
from experiments.study import Run
from launch import jax_setup, processes, provenance, report, run_dir, services
from launch.processes import Processes


class RunError(Exception):
    """A study failed at run time; the message is one line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A parsed command line; `command` is what repeats it."""

    command: tuple[str, ...]
    config: str | None
    overrides: tuple[str, ...]
    workdir: str | None
    processes: Processes
    services: str
    list: bool
    print_config: bool
    dry_run: bool
    debug: bool


def parse(argv: Sequence[str], values: flags.FlagValues = flags.FLAGS) -> Options:
    """Parses a command line, program name first, into `values`.

    Raises:
      ConfigError: for an unknown flag, a stray argument or an override without a value.
    """
    rest, overrides = split_overrides(argv)
    _define(values)
    if {"--help", "-help", "-h"} & set(rest):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)  # absl's own would exit with 1
    try:
        stray = values(rest)[1:]
    except flags.Error as error:
        raise ConfigError(f"{error} (--help lists the flags)") from error
    if stray:
        raise ConfigError(f"unexpected argument {stray[0]!r}; all arguments are --NAME=VALUE")
    names = ("config", "workdir", "services", "list", "print_config", "dry_run", "debug")
    spread = (values[name].value for name in ("processes", "process_id", "coordinator"))
    return Options(
        command=("python", "-m", "launch.main", *argv[1:]),
        overrides=tuple(overrides),
        processes=processes.parse(*spread),
        **{name: values[name].value for name in names},
    )


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of a command line.

    Returns:
      The remaining words and the assignments ("KEY=VALUE").

    Raises:
      ConfigError: if a key has no value.
    """
    rest, assignments = [], []
    words = iter(argv)
    for word in words:
        dashes, is_override, assignment = word.partition("-config.")
        if not is_override or dashes not in ("", "-"):
            rest.append(word)
            continue
        if "=" not in assignment:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{word}: no value; write {word}=VALUE")
            assignment = f"{assignment}={value}"
        assignments.append(assignment)
    return rest, assignments


def execute(options: Options) -> int:
    """Does what the command line says; every failure becomes one line on stderr.

    Returns:
      The exit status.
    """
    try:
        return _dispatch(options)
    except KeyboardInterrupt:
        return _fail(f"interrupted; to resume: {shlex.join(options.command)}", 130)
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        return _fail(_one_line(error), 2 if isinstance(error, ConfigError) else 1)


def run_main(argv: Sequence[str]) -> int:
    """One command line in this process, without absl's process-wide state; returns the status."""
    try:
        return execute(parse(argv, flags.FlagValues()))
    except ConfigError as error:
        return _fail(str(error), 2)


def _define(values: flags.FlagValues) -> None:
    define = {"flag_values": values}
    flags.DEFINE_string(
        "config",
        None,
        "The study: NAME or experiments/NAME.py or the path of your own study file, each with an"
        " optional :variant; or a saved config.json.",
        **define,
    )
    flags.DEFINE_string(
        "workdir", None, "The run folder. Default: runs/NAME or runs/NAME-variant.", **define
    )
    flags.DEFINE_string(
        "processes",
        "1",
        "On how many processes the study runs. They are started here, unless --process_id says"
        " which of them this is; `cluster`: as jax detects under Slurm, Kubernetes or Cloud TPU.",
        **define,
    )
    flags.DEFINE_integer(
        "process_id",
        os.environ.get(processes.PROCESS_ID),
        "Which of the processes this is, from 0.",
        **define,
    )
    flags.DEFINE_string(
        "coordinator",
        os.environ.get(processes.COORDINATOR),
        "HOST:PORT at which process 0 waits for the others.",
        **define,
    )
    flags.DEFINE_enum(
        "services",
        "local",
        services.KINDS,
        "Where the services of reinforcement learning run: in processes of this machine, in actors"
        " of Ray (of the cluster at RAY_ADDRESS, else one started here), or inside this process.",
        **define,
    )
    flags.DEFINE_bool("list", False, "List the studies.", **define)
    flags.DEFINE_bool("print_config", False, "Print the resolved config as JSON.", **define)
    flags.DEFINE_bool("dry_run", False, "Check everything and write nothing.", **define)
    flags.DEFINE_bool("debug", False, "Print the traceback of a failure.", **define)


def _dispatch(options: Options) -> int:
    console = Console()
    if options.list:
        console.print(_studies_table())
        return 0
    if not options.config:
        raise ConfigError("--config is missing; --list shows the studies, --help the flags")
    spread = options.processes
    if spread.starts_others and not (options.print_config or options.dry_run):
        return processes.start(spread.count, options.command[3:])
    jax_setup.quiet_logs()
    study, defaults, config = resolve(options.config, options.overrides)
    if options.print_config:
        print(json.dumps(run_dir.manifest(study, config), indent=2))
        return 0
    default_workdir = Path("runs") / study.title.replace(":", "-")
    workdir = Path(options.workdir) if options.workdir else default_workdir
    changes = differences(to_dict(defaults), to_dict(config))
    if not (spread.alone or study.multi_process):
        raise ConfigError(f"--processes: {study.title} runs on one process; legal: 1")
    make_services = services.launcher(options.services, workdir)
    folder = run_dir.check(workdir, study, config)  # all look before they meet, one writes after
    index = 0
    if not (options.dry_run or (spread.alone and folder.state == "finished")):
        index = _start_jax(spread)
    console.quiet = index > 0
    _announce(console, study, workdir, folder, changes)
    if options.dry_run:
        console.print("dry run: nothing was started or written")
    elif folder.state == "finished":
        _show(console, run_dir.read_json(workdir / run_dir.RESULT), workdir)
    else:
        start = {
            "time": provenance.now(),
            "command": options.command,
            "overrides": options.overrides,
            "changes": changes,
            "git": provenance.git_revision(),
            "versions": provenance.versions(),
            "machine": provenance.machine(),
        }
        run = Run(workdir=workdir, console=console, services=make_services)
        _run(run, study, config, start, index)
    return 0


def _start_jax(spread: Processes) -> int:
    """Sets up this process and meets the others; says which one it is."""
    jax_setup.enable_compilation_cache()
    jax_setup.split_cpu()
    jax_setup.release_compiler_memory()
    try:
        return processes.join(spread)
    except RuntimeError as error:
        raise RunError(str(error)) from error


def resolve(spec: str, overrides: Sequence[str] = ()) -> tuple[registry.Study, Any, Any]:
    """The study, its default config and the config to run, from the value of `--config`.

    Raises:
      ConfigError: for an unknown study, variant or key, or a config that is not legal.
    """
    if spec.endswith(".json"):
        saved = run_dir.read_manifest(Path(spec))
        study = registry.load(f"{saved['study']}:{saved['variant']}")
        defaults = study.get_config()
        config = from_dict(type(defaults), saved["config"], where=f"{spec}: config")
    else:
        study = registry.load(spec)
        config = defaults = study.get_config()
    return study, defaults, override(config, overrides)


def _run(run: Run, study: registry.Study, config: Any, start: dict[str, Any], index: int) -> None:
    workdir = run.workdir
    if index > 0:
        with _logged(workdir / f"error.{index}.log"):
            study.run(config, run)
        return
    with run_dir.opened(workdir, study, config, start) as folder:
        began = time.perf_counter()
        with _logged(workdir / run_dir.ERRORS):
            result = study.run(config, run)
            ending = {
                "finished": provenance.now(),
                "seconds": round(time.perf_counter() - began, 2),
                "resumed": folder.state == "started",
                "devices": provenance.devices(),
            }
            text = report.markdown(result, study, start, ending)
            stored = report.to_dict(result, study, ending)
            run_dir.write_text(workdir / run_dir.REPORT, text)
            run_dir.write_json(workdir / run_dir.RESULT, stored)
    _show(run.console, stored, workdir)


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Makes one line of an exception that is no bad input; the rest goes to a file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise RunError(_log(error, path)) from error


def _log(error: Exception, path: Path) -> str:
    """Writes the traceback down; returns the line that says what failed and where to read on."""
    try:
        run_dir.write_text(path, "".join(traceback.format_exception(error)))
    except OSError:  # most likely the disk is full, which is also why the study failed
        return _one_line(error)
    return f"{_one_line(error)} (traceback: {path})"


def _announce(
    console: Console,
    study: registry.Study,
    workdir: Path,
    folder: run_dir.Folder,
    changes: Sequence[str],
) -> None:
    state = {"new": "new run", "started": "resuming", "finished": "already finished"}[folder.state]
    lines = [
        f"study    {study.title}: {study.info.question}",
        f"workdir  {workdir} ({state})",
        *(f"config   {change}" for change in changes),
        *(f"changed  {change} (since the last start)" for change in folder.runtime_changes),
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _show(console: Console, stored: dict[str, Any], workdir: Path) -> None:
    console.print(report.claims_table(report.claims_of(stored)))
    path = rich.markup.escape(str(workdir / run_dir.REPORT))
    console.print(f"report: {path}", highlight=False, soft_wrap=True)


def _studies_table() -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("study", no_wrap=True)
    table.add_column("variants")
    table.add_column("question")
    for info in registry.discover().values():
        table.add_row(info.name, " ".join(info.variants), rich.markup.escape(info.question))
    return table


def _one_line(error: BaseException) -> str:
    if isinstance(error, ConfigError | RunError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _fail(message: str, status: int) -> int:
    print(f"error: {message}" if status != 130 else message, file=sys.stderr)
    return status


def _parse_or_exit(argv: Sequence[str]) -> Options:
    try:
        return parse(argv)
    except ConfigError as error:
        sys.exit(_fail(str(error), 2))


def _main(options: Options) -> int:
    logging.set_verbosity(logging.WARNING)  # `app.run` raises it to INFO, which orbax uses a lot
    status = execute(options)
    if status and options.processes.member:
        processes.leave(status)
    return status


def main() -> NoReturn:
    """Starts the process."""
    app.run(_main, flags_parser=_parse_or_exit)


if __name__ == "__main__":
    main()
