"""What a release pair is made of: a small file each, beside this one."""

import collections
import importlib.resources
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from c2.config import ConfigError, from_dict, located, to_dict
from c2.sandbox.tasks.gates import Candidate, Gated
from c2.sandbox.tasks.release_pairs import index
from c2.sandbox.tasks.release_pairs.index import Sdist
from c2.sandbox.tasks.task import Solved, matches, steers

PROMPT = (
    "Change {project} {base} so that it does what the change log of its next release says:\n\n"
    "{entry}\n\nHidden tests decide; the tests that pass now have to pass then, too.\n"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the gates found with these tests, on CPython of version `python`.

    Attributes:
      dropped: how many tests do not count, by reason.
    """

    python: str
    fail_to_pass: dict[str, tuple[str, ...]]
    pass_to_pass: dict[str, tuple[str, ...]]
    dropped: dict[str, int]
    mutants: int
    killed: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Two releases of a project: the code of one, the tests of the next.

    Attributes:
      project: its name on the package index.
      license: of both, as an SPDX expression.
      base: the release to begin with.
      solution: the next one.
      source: patterns of the files that a solution may change.
      tests: patterns of the tests and the files that they need; those of `solution` are hidden.
      entry: what the change log says of the solution.
      found: what the gates found; None means that nobody has run them.
    """

    project: str
    license: str
    base: Sdist
    solution: Sdist
    source: tuple[str, ...]
    tests: tuple[str, ...]
    entry: str
    found: Found | None = None

    @property
    def id(self) -> str:
        """Of the task."""
        return f"release/{self.project}/{self.solution.version}"


def recipes() -> dict[str, Recipe]:
    """The default list: project -> recipe."""
    folder = importlib.resources.files("c2.sandbox.tasks.release_pairs") / "recipes"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    found = (read(file.read_text(), file.name) for file in files)
    return {recipe.project: recipe for recipe in found}


def read(text: str, where: str) -> Recipe:
    """A recipe from JSON.

    Raises:
      ConfigError: if it is none; `where` says in which file.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    with located(where):
        return from_dict(Recipe, data, where="recipe")


def write(recipe: Recipe) -> str:
    """The text that `read` reads."""
    return json.dumps(to_dict(recipe), indent=1, ensure_ascii=False) + "\n"


def requires() -> tuple[str, ...]:
    """Pins of pytest and all else that the tests of the default list need."""
    text = importlib.resources.files("c2.sandbox.tasks.release_pairs") / "requirements.txt"
    return tuple(re.sub(r"\\\n\s*", "", text.read_text()).splitlines())


def candidate(recipe: Recipe, cache: Path) -> Candidate:
    """The task that a recipe describes, before or without its gates.

    Raises:
      SandboxError: if the index does not give what the recipe names.
    """
    base, new = (
        index.unpack(index.fetch(recipe.project, sdist, cache))
        for sdist in (recipe.base, recipe.solution)
    )
    hidden = _chosen(new, recipe.tests)
    source = {
        path: text
        for path, text in _chosen(new, recipe.source).items()
        if path not in hidden and not steers(path)
    }
    return Candidate(
        id=recipe.id,
        family="release",
        split_keys={"project": recipe.project},
        prompt=PROMPT.format(
            project=recipe.project, base=recipe.base.version, entry=recipe.entry.strip()
        ),
        files=base,
        solution=base | source,
        hidden_tests=hidden,
        editable=recipe.source,
        requires=requires(),
        metadata={"license": recipe.license},
    )


def build(recipe: Recipe, cache: Path) -> Solved:
    """The task of a recipe that has passed its gates, with its solution.

    Raises:
      ConfigError: if the gates have not been run.
      SandboxError: if the index does not give what the recipe names.
    """
    if recipe.found is None:
        raise ConfigError(f"{recipe.project}: `found` is missing; run the gates first")
    fail, keep = map(_ids, (recipe.found.fail_to_pass, recipe.found.pass_to_pass))
    return candidate(recipe, cache).solved(fail, keep)


def found(gated: Gated, python: str) -> Found:
    """What the gates found, as recipes store it."""
    task = gated.solved.task
    return Found(
        python=python,
        fail_to_pass=_by_file(task.fail_to_pass),
        pass_to_pass=_by_file(task.pass_to_pass),
        dropped=dict(collections.Counter(why.partition(":")[0] for why in gated.dropped.values())),
        mutants=gated.mutants,
        killed=gated.killed,
    )


def _chosen(files: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    return {path: text for path, text in files.items() if matches(path, patterns)}


def _by_file(ids: Iterable[str]) -> dict[str, tuple[str, ...]]:
    files: dict[str, tuple[str, ...]] = {}
    for path, _, name in (test.partition("::") for test in ids):
        files[path] = (*files.get(path, ()), name)
    return files


def _ids(by_file: Mapping[str, Iterable[str]]) -> list[str]:
    return [f"{path}::{name}" for path, names in by_file.items() for name in names]
