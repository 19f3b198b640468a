"""Test cases of a package: arguments, results, and whether the spoilt package gives others."""

import random
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from c2.sandbox.tasks.in_process import Modules
from c2.sandbox.tasks.minirepo.source import Function, Package

_WORDS = ("red", "blue", "green", "sun", "moon", "star")
_DRAWN = 12
VISIBLE, HIDDEN = 2, 3


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      function: what is called.
      args: its arguments.
      want: what the sound package gives.
      got: what the spoilt one gives; for an exception a `Raised`.
    """

    function: Function
    args: tuple
    want: Any
    got: Any

    @property
    def fails(self) -> bool:
        """Whether the two differ."""
        return repr(self.got) != repr(self.want)

    @property
    def report(self) -> str:
        """What a person would say about it."""
        if isinstance(self.got, Raised):
            return f"{self.call} fails: {self.got.kind}"
        return f"{self.call} gives {self.got!r}, want {self.want!r}"

    @property
    def call(self) -> str:
        """The call as Python text, with the module."""
        arguments = ", ".join(map(repr, self.args))
        return f"{self.function.module}.{self.function.name}({arguments})"


@dataclass(frozen=True)
class Raised:
    """An exception in the place of a result."""

    kind: str


@dataclass(frozen=True)
class Chosen:
    """Cases by the name of the test that asserts them, and a failing visible one."""

    visible: dict[str, list[Case]]
    hidden: dict[str, list[Case]]
    symptom: Case


def choose(
    rng: random.Random,
    sound: Package,
    spoilt: Package,
    chain: Collection[str],
    shown: Collection[str],
) -> Chosen | None:
    """Cases for all functions, or None if too few of them tell the two packages apart.

    Args:
      rng: draws arguments.
      sound: the package as it should be.
      spoilt: the package with its faults.
      chain: functions whose results differ.
      shown: those of them that get a visible test.
    """
    visible, hidden, symptoms = {}, {}, []
    for function in sound.functions:
        found = _draw(rng, sound, spoilt, function)
        telling = [case for case in found if case.fails]
        concerned = function.name in chain
        if len(found) < VISIBLE + HIDDEN or (concerned and len(telling) <= HIDDEN):
            return None
        if not concerned:
            seen, unseen = found[:1], found[1:2]
        else:
            # One failing case is shown, with one that may pass; the others stay hidden.
            seen, unseen = [found[0], found[-1]], found[1 : 1 + HIDDEN]
        if function.name in shown or not concerned:
            visible[f"test_{function.name}"] = seen
        if function.name in shown:
            symptoms += seen[:1]
        for number, case in enumerate(unseen, 1):
            hidden[f"test_{function.name}_{number}"] = [case]
    return Chosen(visible, hidden, rng.choice(symptoms))


def _draw(rng: random.Random, sound: Package, spoilt: Package, function: Function) -> list[Case]:
    """Cases of one function on which the sound package does not raise; those that fail first."""
    modules = [Modules(package.files()) for package in (sound, spoilt)]
    drawn = {}
    for _ in range(_DRAWN):
        args = _arguments(rng, function)
        drawn.setdefault(repr(args), args)
    cases = []
    for args in drawn.values():
        want, got = (_result(package, sound.name, function, args) for package in modules)
        if not isinstance(want, Raised):
            cases.append(Case(function, args, want, got))
    return sorted(cases, key=lambda case: not case.fails)


def test_files(package: str, folder: str, cases: Mapping[str, Iterable[Case]]) -> dict[str, str]:
    """Test files, one for each module of the package.

    Args:
      package: its name.
      folder: where the files go.
      cases: what each test asserts, name of the test -> cases, all of one module.
    """
    tests: dict[str, list[str]] = {}
    for name, asserted in cases.items():
        lines = [f"    assert {case.call} == {case.want!r}" for case in asserted]
        module = next(iter(asserted)).function.module
        tests.setdefault(module, []).append("\n".join([f"def {name}():", *lines]))
    return {
        f"{folder}/test_{module}.py": "\n\n".join((f"from {package} import {module}", *texts))
        + "\n"
        for module, texts in tests.items()
    }


def absence_tests(package: Package, folder: str, old_names: Mapping[str, str]) -> dict[str, str]:
    """A file with a test for each renamed function, new name -> old, that the old name is gone."""
    modules = {old: package.function(new).module for new, old in old_names.items()}
    imports = "\n".join(
        f"from {package.name} import {it}" for it in dict.fromkeys(modules.values())
    )
    texts = [
        f"def test_no_{old}():\n    assert not hasattr({module}, {old!r})"
        for old, module in modules.items()
    ]
    return {f"{folder}/test_names.py": "\n\n".join((imports, *texts)) + "\n"}


def test_ids(tests: Mapping[str, str]) -> list[str]:
    """The ids PATH::FUNCTION of all tests in some files."""
    return [
        f"{path}::{name}"
        for path, text in tests.items()
        for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)
    ]


def _result(modules: Modules, package: str, function: Function, args: tuple) -> Any:
    try:
        module = modules.load(f"{package}.{function.module}")
        return getattr(module, function.name)(*args)
    except Exception as error:
        return Raised(type(error).__name__)


def _arguments(rng: random.Random, function: Function) -> tuple:
    numbers = [rng.randint(0, 9) for _ in range(rng.randint(3, 5))]
    table = {word: rng.randint(0, 9) for word in rng.sample(_WORDS, 3)}
    values = []
    for kind in function.params.values():
        # Numbers that also are in the list or the table show faults at boundaries.
        known = numbers + list(table.values()) if rng.random() < 0.5 else range(10)
        values.append({
            "numbers": lambda: list(numbers) if rng.random() < 0.9 else [],
            "number": lambda known=known: rng.choice(known),
            "count": lambda: rng.randint(1, 6),
            "text": lambda: " ".join(rng.sample(_WORDS, rng.randint(1, 3))),
            "table": lambda: dict(table),
            "key": lambda: rng.choice([*table, *_WORDS[:2]]),
        }[kind]())  # fmt: skip
    return tuple(values)
