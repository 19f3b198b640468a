"""Tasks from real code: what there is, what is in them, and whether they are sound.

    python -m launch.tasks list
    python -m launch.tasks show tomlkit
    python -m launch.tasks build --out=tasks.jsonl                   # all, or the projects named
    python -m launch.tasks gate tomlkit                              # runs the gates again
    python -m launch.tasks draft boltons 24.1.0 25.0.0 --license=BSD-3-Clause \
        --source='boltons/*' --tests='tests/*'                       # a new release pair
    python -m launch.tasks commit --repo=DIR --commit=HEAD --out=task.jsonl

`gate` and `commit` run a project's tests some tens of times, in sandboxes; `build` runs nothing.
Source distributions come from the package index that pip is configured for, and are kept.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import rich
import rich.box
from absl import flags
from rich.markup import escape
from rich.table import Table

from c2.config import ConfigError
from c2.data.files import atomic
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.protocol import Resources, SandboxError, Spec
from c2.sandbox.tasks import git_tasks, leaks, python_env, release_pairs
from c2.sandbox.tasks.gates import Candidate, Gated, gate
from c2.sandbox.tasks.grade import Run, in_sandbox
from c2.sandbox.tasks.release_pairs import Recipe, changelog, index

TESTS_S = 240.0  # for one run of a project's tests
RECIPES = Path(release_pairs.__file__).parent / "recipes"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def show_list(options: flags.FlagValues, projects: Sequence[str]) -> None:
    """The default list with its figures."""
    table = Table(box=rich.box.SIMPLE_HEAD)
    for name in (
        "project",
        "from",
        "to",
        "license",
        "fail to pass",
        "pass to pass",
        "mutants killed",
    ):
        words = name in ("project", "license")
        table.add_column(name, justify="left" if words else "right", no_wrap=words)
    for project, recipe in _chosen(projects).items():
        found = recipe.found
        figures = (
            ("?", "?", "?")
            if found is None
            else (
                str(sum(map(len, found.fail_to_pass.values()))),
                str(sum(map(len, found.pass_to_pass.values()))),
                f"{found.killed} of {found.mutants}",
            )
        )
        table.add_row(
            project, recipe.base.version, recipe.solution.version, recipe.license, *figures
        )
    rich.print(table)


def show(options: flags.FlagValues, projects: Sequence[str]) -> None:
    """Prompt, changed files and tests of release pairs."""
    if not projects:
        raise ConfigError("show: name a project; `list` lists them")
    for recipe in _chosen(projects).values():
        solved = release_pairs.build(recipe, _cache(options))
        task = solved.task
        changed = [path for path, text in solved.solution.items() if task.files.get(path) != text]
        rich.print(f"[bold]{task.id}[/]\n{escape(task.prompt)}")
        rich.print(f"[bold]changed by the solution[/]: {escape(', '.join(changed))}")
        rich.print(f"[bold]fail to pass[/]: {escape(', '.join(task.fail_to_pass))}")
        rich.print(f"[bold]pass to pass[/]: {len(task.pass_to_pass)} tests\n")


def build(options: flags.FlagValues, projects: Sequence[str]) -> None:
    """Writes tasks, one line of JSON each."""
    recipes = _chosen(projects).values()
    with atomic(_out(options)) as path, path.open("w") as file:
        for recipe in recipes:
            file.write(release_pairs.build(recipe, _cache(options)).task.to_json() + "\n")
    rich.print(f"{len(recipes)} tasks in {escape(options.out)}")


def gates(options: flags.FlagValues, projects: Sequence[str]) -> None:
    """Puts release pairs through their gates and writes what was found into their recipes."""
    recipes = _chosen(projects, Path(options.recipes))
    failed = []
    with _places(release_pairs.requires(), options) as run:
        for project, recipe in recipes.items():
            candidate = release_pairs.candidate(recipe, _cache(options))
            found = _gated(candidate, run, project)
            if found.solved is None:
                failed.append(project)
                continue
            recipe = dataclasses.replace(recipe, found=release_pairs.found(found, PYTHON))
            _write(Path(options.recipes), recipe)
    if failed:
        raise ConfigError(f"no tasks: {', '.join(failed)}")


def draft(options: flags.FlagValues, words: Sequence[str]) -> None:
    """Writes the recipe of a new release pair, which then has to pass its gates."""
    if len(words) != 3 or not options.license or not options.source or not options.tests:
        raise ConfigError(
            "draft: needed are PROJECT BASE SOLUTION, --license, --source and --tests"
        )
    project, *versions = words
    there = index.find(project)
    if missing := [version for version in versions if version not in there]:
        raise ConfigError(f"draft: {project} {missing[0]} is no source distribution of the index")
    base, solution = (there[version] for version in versions)
    files = index.unpack(index.fetch(project, solution, _cache(options)))
    entry = changelog.entry(files, solution.version)
    if not entry:
        raise ConfigError(f"draft: no change log of {project} speaks of {solution.version}")
    recipe = Recipe(
        project=project, license=options.license, base=base, solution=solution,
        source=tuple(options.source), tests=tuple(options.tests), entry=entry,
    )  # fmt: skip
    rich.print(f"{escape(str(_write(Path(options.recipes), recipe)))}:\n{escape(entry)}")


def commit(options: flags.FlagValues, words: Sequence[str]) -> None:
    """Makes a task of a commit of a git repository, if it passes the gates."""
    if words or not options.repo or not options.commit:
        raise ConfigError("commit: needed are --repo, --commit and --out")
    out, pins = _out(options), release_pairs.requires()
    patterns = {"source": options.source, "tests": options.tests}
    candidate = git_tasks.candidate(
        Path(options.repo).expanduser(), options.commit, requires=pins,
        **{name: value for name, value in patterns.items() if value},
    )  # fmt: skip
    with _places(pins, options) as run:
        found = _gated(candidate, run, "")
    if found.solved is None:
        raise ConfigError(f"commit: {options.commit} makes no task: {found.reason}")
    with atomic(out) as path:
        path.write_text(found.solved.task.to_json() + "\n")


VERBS: dict[str, Callable[[flags.FlagValues, Sequence[str]], None]] = {
    "list": show_list, "show": show, "build": build, "gate": gates, "draft": draft,
    "commit": commit,
}  # fmt: skip


def _gated(candidate: Candidate, run: Run, project: str) -> Gated:
    found = gate(candidate, run)
    if found.solved and (copies := leaks.copies(found.solved, run, project)):
        found = dataclasses.replace(found, solved=None, reason=f"a copy is at {copies[0]}")
    task = found.solved and found.solved.task
    counts = f"{len(task.fail_to_pass)} + {len(task.pass_to_pass)} tests" if task else found.reason
    killed = f"{found.killed} of {found.mutants} mutants killed"
    rich.print(f"{candidate.id}: {escape(counts)}, {len(found.dropped)} dropped, {killed}")
    return found


def _chosen(projects: Sequence[str], folder: Path = RECIPES) -> dict[str, Recipe]:
    recipes = {
        path.stem: release_pairs.read(path.read_text(), path.name)
        for path in sorted(folder.glob("*.json"))
    }
    if unknown := [name for name in projects if name not in recipes]:
        raise ConfigError(f"no recipe for {unknown[0]!r}; there are {', '.join(recipes)}")
    return {name: recipes[name] for name in projects or recipes}


def _write(folder: Path, recipe: Recipe) -> Path:
    path = folder / f"{recipe.project}.json"
    with atomic(path) as temporary:
        temporary.write_text(release_pairs.write(recipe))
    return path


@contextmanager
def _places(pins: Sequence[str], options: flags.FlagValues) -> Iterator[Run]:
    """Sandboxes in which the tests run."""
    with Bwrap() as backend:
        layer = python_env.layer(backend, pins, _cache(options))
        spec = Spec(layers=(layer,), resources=Resources(memory_mb=1024))
        yield in_sandbox(backend, spec, timeout_s=TESTS_S)


def _cache(options: flags.FlagValues) -> Path:
    return Path(options.cache).expanduser()


def _out(options: flags.FlagValues) -> Path:
    if not options.out:
        raise ConfigError("--out is missing; it names the file of tasks to write")
    return Path(options.out).expanduser()


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    string = functools.partial(flags.DEFINE_string, flag_values=values, module_name="launch.tasks")
    many = functools.partial(flags.DEFINE_list, flag_values=values, module_name="launch.tasks")
    string("cache", "~/.cache/c2/packages", "Where downloads are kept.")
    string("out", None, "The file of tasks to write.")
    string("recipes", str(RECIPES), "The folder of recipes, for `gate` and `draft`.")
    string("license", None, "Of a drafted project, as an SPDX expression.")
    many("source", None, "Patterns of what a solution may change.")
    many("tests", None, "Patterns of tests and of what they need.")
    string("repo", None, "A git repository.")
    string("commit", None, "The commit that becomes a task.")
    return values


def run_main(argv: Sequence[str]) -> int:
    """One command line; every failure is one line on stderr. Returns the exit status."""
    values = _flags()
    if {"--help", "-help", "-h"} & set(argv) or len(argv) == 1:
        print(f"{__doc__}\nflags:\n{values.module_help('launch.tasks')}")
        return 0
    try:
        _, verb, *words = values(list(argv))
        if verb not in VERBS:
            raise ConfigError(f"{verb!r} is no verb; legal are {', '.join(VERBS)}")
        VERBS[verb](values, words)
    except (ConfigError, flags.Error) as error:
        return _fail(str(error), 2)
    except (SandboxError, OSError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def main() -> NoReturn:
    """Starts the process."""
    sys.exit(run_main(sys.argv))


if __name__ == "__main__":
    main()
