"""Turns a change of a real project into a task, or says why it is none.

Only running the tests tells which of them decide. A test counts if it has the same result in all
runs, in other orders each time, without a network: it passes with the solution, and before either
passes (`pass_to_pass`) or fails for another reason than a name that cannot be imported
(`fail_to_pass`); a test whose whole file cannot be imported before says nothing and is dropped.
Then wrong solutions have to be found out, and doing nothing must not be enough.
"""

import dataclasses
import hashlib
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from c2.config import ConfigError
from c2.sandbox.protocol import SandboxError
from c2.sandbox.tasks.grade import Run, grade, pytest_command, verdict
from c2.sandbox.tasks.mutants import mutants
from c2.sandbox.tasks.task import Solved, Task, matches

TEST_FILES = ("test_*.py", "*_test.py", "test.py", "tests.py")
MISSING_NAME = ("ImportError", "ModuleNotFoundError")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A task of which nobody knows yet what its tests say; the fields are those of `Task`.

    Attributes:
      solution: all files as they should be, path -> text.
    """

    id: str
    family: str
    prompt: str
    files: dict[str, str]
    solution: dict[str, str]
    hidden_tests: dict[str, str]
    editable: tuple[str, ...]
    requires: tuple[str, ...]
    split_keys: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def solved(self, fail_to_pass: Collection[str], pass_to_pass: Collection[str]) -> Solved:
        """The task in which these tests decide."""
        shared = {field.name for field in dataclasses.fields(Task)} & vars(self).keys()
        task = Task(
            **{name: getattr(self, name) for name in shared},
            fail_to_pass=tuple(fail_to_pass),
            pass_to_pass=tuple(pass_to_pass),
        )
        return Solved(task, self.solution)


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """How strict the gates are.

    Attributes:
      repeats: runs with the solution, and as many without.
      mutants: wrong solutions that are tried; fewer if there are not so many.
      killed: share of them that has to fail.
      max_tests: tests that decide; those of the files with failing ones come first.
    """

    repeats: int = 3
    mutants: int = 8
    killed: float = 0.5
    max_tests: int = 400

    def __post_init__(self) -> None:
        for name, least in (("repeats", 2), ("mutants", 0), ("max_tests", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal are {least} and more")
        if not 0 <= self.killed <= 1:
            raise ConfigError(f"killed: {self.killed}; legal are 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Gated:
    """What the gates found.

    Attributes:
      solved: the task, or None.
      reason: why there is none; "" if there is one.
      dropped: tests that do not count and why not.
      mutants: how many wrong solutions were tried.
      killed: how many of them failed.
    """

    solved: Solved | None = None
    reason: str = ""
    dropped: dict[str, str] = field(default_factory=dict)
    mutants: int = 0
    killed: int = 0


def gate(candidate: Candidate, run: Run, config: GateConfig = GateConfig()) -> Gated:
    """Puts a candidate through all gates; costs some tens of test runs.

    Raises:
      SandboxError: if tests cannot be run at all.
    """
    if not test_paths(candidate.hidden_tests):
        return Gated(reason="it has no tests")
    after = _runs(candidate, candidate.solution, run, config.repeats)
    if {} in after:
        return Gated(reason="with the solution the tests do not come to an end")
    before = _runs(candidate, candidate.files, run, config.repeats)
    fail, keep, dropped = sort_tests(before, after)
    if not fail:
        return Gated(reason="no test fails before and passes with the solution", dropped=dropped)
    solved = candidate.solved(fail, chosen(fail, keep, config.max_tests))
    outcome = grade(solved.task, candidate.files, run)
    if (outcome.kind, outcome.reward) != ("scored", 0.0):
        return Gated(reason=f"doing nothing is {outcome.kind}: {outcome.reason}", dropped=dropped)
    outcome = grade(solved.task, candidate.solution, run)
    if outcome.reward != 1.0:
        why = outcome.reason or next(iter(outcome.failed.items()))
        return Gated(reason=f"the solution is {outcome.kind}: {why}", dropped=dropped)
    wrong = mutants(candidate.files, candidate.solution, config.mutants)
    killed = sum(_reward(solved.task, candidate.solution | mutant, run) != 1.0 for mutant in wrong)
    found = {"dropped": dropped, "mutants": len(wrong), "killed": killed}
    if killed < config.killed * len(wrong):
        return Gated(reason=f"{killed} of {len(wrong)} wrong solutions are found out", **found)
    return Gated(solved=solved, **found)


def sort_tests(
    before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]
) -> tuple[list[str], list[str], dict[str, str]]:
    """Tests that have to change to passing, tests that have to stay so, and why others are dropped.

    Args:
      before: per run without the solution, id -> "" or why it failed.
      after: likewise with it.
    """
    fail, keep, dropped = [], [], {}
    for name in sorted({name for results in after for name in results}):
        path = name.partition("::")[0]
        ends = {results.get(name) for results in after}
        starts = [results.get(name) for results in before]
        if ends != {""}:
            why = max(filter(None, ends), default="it is not run")
            dropped[name] = "flaky" if "" in ends else f"the solution fails: {why}"
        elif set(starts) == {""}:
            keep.append(name)
        elif "" in starts:
            dropped[name] = "flaky before"
        elif any(path in results for results in before) or None in starts:
            dropped[name] = "it cannot be imported before"
        elif any(why.startswith(MISSING_NAME) for why in starts):
            dropped[name] = "it misses only a name before"
        else:
            fail.append(name)
    return fail, keep, dropped


def chosen(fail: Collection[str], keep: Collection[str], count: int) -> list[str]:
    """At most `count` tests, less those in `fail`, of `keep`; always the same."""
    files = {name.partition("::")[0] for name in fail}

    def rank(name: str) -> tuple[bool, str]:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return name.partition("::")[0] not in files, digest

    return sorted(sorted(keep, key=rank)[: max(count - len(fail), 0)])


def test_paths(files: Collection[str]) -> list[str]:
    """The files that hold tests by the usual names."""
    return sorted(path for path in files if matches(posixpath.basename(path), TEST_FILES))


def _reward(task: Task, files: Mapping[str, str], run: Run) -> float:
    outcome = grade(task, files, run)
    if outcome.reward is None:
        raise SandboxError(outcome.reason)
    return outcome.reward


def _runs(
    candidate: Candidate, files: Mapping[str, str], run: Run, count: int
) -> list[dict[str, str]]:
    """The results of all tests, id -> "" or why not, in `count` orders; {} if there are none."""
    found = []
    for seed in range(count):
        command = pytest_command(
            candidate.hidden_tests, test_paths(candidate.hidden_tests), None, seed=seed
        )
        result = run(command.argv, {**files, **command.files}, command.stdin)
        started, results = verdict(result.stdout, command.nonce, None)
        if not started:
            raise SandboxError(f"pytest does not start: {result.stderr[-300:]!r}")
        found.append(results or {})
    return found
