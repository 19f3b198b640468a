"""From a seed to a task and its solution; the same in every process."""

import difflib
import functools
import random
from collections.abc import Sequence

from c2.config import ConfigError
from c2.sandbox.tasks.in_process import run_tests
from c2.sandbox.tasks.minirepo import cases, faults, layout, prompts
from c2.sandbox.tasks.minirepo.cases import Case
from c2.sandbox.tasks.minirepo.layout import LEVELS, Layout
from c2.sandbox.tasks.minirepo.source import Package
from c2.sandbox.tasks.minirepo.splits import HELD_FAMILIES, HELD_TEMPLATES, SPLITS, split
from c2.sandbox.tasks.task import Solved, Task

FAMILIES = tuple(faults.FAMILIES)
_WITHOUT_SETTINGS = ("operator", "constant")  # families that can be about any template together
_SLIPS = ("operator", "boundary", "name")  # families of mistakes that almost any code allows
_ATTEMPTS = 100
_DRAWS = 2000


def generate(seed: int, family: str, level: int = 1) -> Task:
    """The task of a seed.

    Args:
      seed: any whole number.
      family: one of `FAMILIES`.
      level: one of `LEVELS`; `layout.draw` says what they are.

    Raises:
      ConfigError: for another family or level.
    """
    return generate_solved(seed, family, level).task


def draw(
    seed: int, level: int = 1, part: str = "train", *, families: Sequence[str] = FAMILIES
) -> Task:
    """A task of a split.

    Args:
      seed: any whole number.
      level: one of `LEVELS`.
      part: one of `splits.SPLITS`.
      families: those that the split has of them are equally likely.

    Raises:
      ConfigError: for another level, split or family, or if the split has none of the families.
    """
    if part not in SPLITS:
        raise ConfigError(f"part: {part!r}; legal are {', '.join(SPLITS)}")
    legal = [name for name in families if (name in HELD_FAMILIES) == (part == "family")]
    if not legal:
        raise ConfigError(f"families: split {part!r} has none of {', '.join(families)}")
    rng = random.Random(f"{seed}/{level}/{part}")
    family = rng.choice(legal)  # before any rejection, which would favour some
    for _ in range(_DRAWS):
        task = generate(rng.getrandbits(32), family, level)
        if split(task) == part:
            return task
    raise RuntimeError(f"no task of split {part} after {_DRAWS} draws: family {family}")


def sound(seed: int, level: int = 2) -> dict[str, str]:
    """The files of a package like those that tasks of split "train" are about, without a fault.

    Args:
      seed: any whole number.
      level: one of `LEVELS`.
    """
    rng = random.Random(f"{seed}/sound/{level}")
    for _ in range(_DRAWS):
        drawn = layout.draw(rng, rng.choice(_WITHOUT_SETTINGS), level, HELD_TEMPLATES)
        if not set(drawn.templates) & set(HELD_TEMPLATES):
            return drawn.package.files()
    raise RuntimeError(f"no package after {_DRAWS} draws: seed {seed}, level {level}")


def from_id(name: str) -> Task:
    """The generated task with an id, made anew.

    Raises:
      ConfigError: if there can be no such task.
    """
    source, *parts = name.split("/")
    if source != "minirepo" or len(parts) != 3 or not (parts[1] + parts[2]).isdecimal():
        raise ConfigError(f"task: {name!r}; legal are minirepo/FAMILY/LEVEL/SEED")
    family, level, seed = parts
    return generate(int(seed), family, int(level))


def solve(task: Task) -> dict[str, str]:
    """The files of the solution of a generated task, made anew from its seed."""
    _, family, level, seed = task.id.split("/")
    return generate_solved(int(seed), family, int(level)).solution


@functools.lru_cache(maxsize=256)  # all rollouts of a group, and experts, ask for the same
def _generated(seed: int, family: str, level: int) -> tuple[Solved, Package, str]:
    """A solved task, its package without a fault, and the name of the first function to spoil."""
    if family not in FAMILIES:
        raise ConfigError(f"family: {family!r}; legal are {', '.join(FAMILIES)}")
    if level not in LEVELS:
        raise ConfigError(f"level: {level!r}; legal are {', '.join(map(str, LEVELS))}")
    rng = random.Random(f"{seed}/{family}/{level}")
    for _ in range(_ATTEMPTS):
        drawn = layout.draw(rng, family, level, HELD_TEMPLATES)
        sound = drawn.package
        spoilt = _spoil(rng, family, drawn)
        if spoilt is None or changes(spoilt.files(), sound.files()) < len(drawn.targets):
            continue
        chosen = cases.choose(rng, sound, spoilt, drawn.chain, drawn.shown)
        if chosen is None:
            continue
        old_names = _old_names(drawn, spoilt)
        visible = cases.test_files(sound.name, "tests", chosen.visible)
        hidden = cases.test_files(sound.name, "hidden", chosen.hidden)
        if family == "rename":
            hidden |= cases.absence_tests(sound, "hidden", old_names)
        tests = visible | hidden
        ids = cases.test_ids(tests)
        before = run_tests(spoilt.files(), tests, ids)
        if any(run_tests(sound.files(), tests, ids).values()):
            raise RuntimeError(f"the solution fails: seed {seed}, family {family}, level {level}")
        keys = {"family": family, "template": "+".join(sorted(drawn.templates))}
        task = Task(
            id=f"minirepo/{family}/{level}/{seed}",
            family=family,
            split_keys=keys | {"combination": f"{family}/{keys['template']}/{sound.name}"},
            prompt=_prompt(rng, family, drawn, old_names, chosen.symptom),
            files=spoilt.files() | visible,
            hidden_tests=hidden,
            fail_to_pass=tuple(test for test in ids if before[test]),
            pass_to_pass=tuple(test for test in ids if not before[test]),
            editable=(f"{sound.name}/*.py",),
            level=level,
        )
        return Solved(task, sound.files() | visible), sound, drawn.targets[0]
    raise RuntimeError(f"no task after {_ATTEMPTS} draws: seed {seed}, {family}, level {level}")


def generate_solved(seed: int, family: str, level: int = 1) -> Solved:
    """As `generate`, with the solution."""
    return _generated(seed, family, level)[0]


def slip(task: Task, rng: random.Random) -> dict[str, str] | None:
    """The files after a wrong attempt at a generated task: another fault takes the place of one.

    It is of the same family if that has another one, else of one that has; None if none has.
    """
    _, family, level, seed = task.id.split("/")
    solved, sound, target = _generated(int(seed), family, int(level))
    for kind in dict.fromkeys((family, *_SLIPS)):
        options = faults.candidates(kind, sound, sound.function(target))
        found = [solved.solution | package.files() for package in options]
        if wrong := [files for files in found if files not in (task.files, solved.solution)]:
            return rng.choice(wrong)
    return None


def changes(old: dict[str, str], new: dict[str, str]) -> int:
    """How many separate places of some files differ."""
    return sum(
        tag != "equal"
        for path in old
        for tag, *_ in difflib.SequenceMatcher(
            None, old[path].splitlines(), new[path].splitlines(), autojunk=False
        ).get_opcodes()
    )


def _spoil(rng: random.Random, family: str, drawn: Layout) -> Package | None:
    """The package with a fault in every target, or None if one can have none."""
    package = drawn.package
    for name in drawn.targets:
        options = faults.candidates(family, package, package.function(name))
        if not options:
            return None
        package = rng.choice(options)
    return package


def _old_names(drawn: Layout, spoilt: Package) -> dict[str, str]:
    """The targets' names in the spoilt package, by those in the sound one."""
    pairs = zip(drawn.package.functions, spoilt.functions, strict=True)
    names = {sound.name: other.name for sound, other in pairs}
    return {name: names[name] for name in drawn.targets}


def _prompt(
    rng: random.Random, family: str, drawn: Layout, old_names: dict[str, str], symptom: Case
) -> str:
    where = drawn.package.function(drawn.targets[0]) if family == "feature" else symptom.function
    return prompts.write(
        rng,
        family,
        names=" and ".join(drawn.targets),
        renames=" and ".join(f"{old} to {name}" for name, old in old_names.items()),
        symptom=symptom.function.name,
        place=f"{drawn.package.name}/{where.module}.py",
        example=symptom.report,
    )
