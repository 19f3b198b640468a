"""Scores what an agent made of a task, in a clean place that the agent never saw.

The place gets the task's own files, the allowed part of the agent's changes, and nothing else:
hidden tests and the nonce travel on standard input and are never on disk. `runner` says how tests
are kept apart from the code. Python starts without `site` and without its environment variables,
and there is no pytest: conftest.py, sitecustomize, `.pth`, ini options and plugins have no effect.

Tasks of real projects have tests that only pytest can run, in one process with the code and from
disk. `pytest_runner` says what holds there; only the task's own conftest.py files have an effect.
"""

import functools
import importlib.resources
import json
import posixpath
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from c2.sandbox.protocol import (
    MAX_OUTPUT,
    Backend,
    ExecResult,
    Handle,
    SandboxError,
    SandboxLost,
    Spec,
    SupportsJobs,
)
from c2.sandbox.tasks import place, python_env
from c2.sandbox.tasks.task import Task

MAX_CHANGE = 1 << 18  # characters of changed files
TEST_S, TOTAL_S = 5.0, 20.0  # for one test, for all of a task
START_S = 20.0  # beside that, for the runner
PLANTED = "def test_a():\n    assert 1 == 2\n\n\ndef test_b():\n    raise OSError('planted')\n"

Run = Callable[[Sequence[str], Mapping[str, str], bytes], ExecResult]
"""Runs a command in a fresh place whose working directory holds the given files and nothing else.

Takes the command, the files, and its standard input. Raises `SandboxError` if that is not possible.
Everything the command started has to be gone when it returns.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a task.

    Attributes:
      kind: "scored": the tests gave a verdict; "policy_failure": the agent's code prevented one,
        or its changes are not acceptable at all; "infrastructure_failure": not the agent's fault,
        to be run again or left out, never to be counted as 0.
      reward: 1.0 if all tests passed, else 0.0; None after an infrastructure failure.
      failed: the tests that did not pass and why, id -> one line. The lines are written by
        untrusted code.
      changed: allowed paths that differ from the task's.
      ignored: other paths that differ; they were put back. Not an offence, but worth a look.
      reason: why there is no verdict; "" if there is one.
    """

    kind: Literal["scored", "policy_failure", "infrastructure_failure"]
    reward: float | None
    failed: dict[str, str]
    changed: tuple[str, ...]
    ignored: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Command:
    """What to run, and the nonce without which an answer does not count.

    Attributes:
      argv: program and arguments.
      stdin: its standard input.
      nonce: what it has to repeat.
      files: what has to lie in the repository beside or instead of its own files.
      wires: ids of planted tests, which fail wherever results are what they should be.
    """

    argv: tuple[str, ...]
    stdin: bytes
    nonce: str
    files: Mapping[str, str] = field(default_factory=dict)
    wires: tuple[str, ...] = ()


def grade(task: Task, files: Mapping[str, str], run: Run) -> Outcome:
    """Scores a repository.

    Args:
      task: what was to be done.
      files: the repository as the agent left it, path -> text; read it after all of the agent's
        processes are gone. Files that are not UTF-8 are read with `surrogateescape`.
      run: where to run the tests.
    """
    tree, changed, ignored = grading_tree(task, files)

    def outcome(kind, reward, reason="", failed=None) -> Outcome:
        return Outcome(
            kind=kind, reward=reward, failed=failed or {}, changed=changed, ignored=ignored,
            reason=reason,
        )  # fmt: skip

    if sum(len(tree.get(path, "")) for path in changed) > MAX_CHANGE:
        return outcome("policy_failure", 0.0, f"changed files of over {MAX_CHANGE} characters")
    if inside := [path for path in tree if any(path.startswith(f"{other}/") for other in tree)]:
        return outcome("policy_failure", 0.0, f"{inside[0]} is inside of a file")
    command = _command(task)
    try:
        result = run(command.argv, tree | command.files, command.stdin)
    except SandboxLost as error:
        blame = error.reason in ("exited", "deadline")  # the code can bring about these two
        kind, reward = ("policy_failure", 0.0) if blame else ("infrastructure_failure", None)
        return outcome(kind, reward, str(error))
    except SandboxError as error:
        return outcome("infrastructure_failure", None, str(error))
    started, results = verdict(result.stdout, command.nonce, task.test_ids + command.wires)
    if not started:
        return outcome("infrastructure_failure", None, _why_not_started(result))
    if results is None or not result.ok:
        ending = result.killed or (result.signal and f"signal {result.signal}") or result.code
        return outcome("policy_failure", 0.0, f"no verdict; the tests' process ended: {ending}")
    if not all([results.pop(wire) for wire in command.wires]):
        return outcome("policy_failure", 0.0, "a test passed that has to fail: results are forged")
    failed = {name: why for name, why in results.items() if why}
    return outcome("scored", 0.0 if failed else 1.0, failed=failed)


def grading_tree(
    task: Task, files: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """The task's files with the allowed changes, the changed paths, and the ignored ones."""
    differing = sorted(
        path for path in task.files.keys() | files.keys() if task.files.get(path) != files.get(path)
    )
    changed = tuple(path for path in differing if task.allows(path))
    ignored = tuple(path for path in differing if not task.allows(path))
    kept = {path: text for path, text in task.files.items() if path not in changed}
    return kept | {path: files[path] for path in changed if path in files}, changed, ignored


def _command(task: Task) -> Command:
    # The tests from the task, whatever the tree has at their paths.
    paths = {path.partition("::")[0] for path in task.test_ids}
    tests = {path: (task.files | task.hidden_tests)[path] for path in paths}
    if task.requires:
        return pytest_command(tests | task.hidden_tests, sorted(paths), task.test_ids)
    return tests_command(task.files, tests, task.test_ids)


def tests_command(
    files: Mapping[str, str], tests: Mapping[str, str], ids: Sequence[str]
) -> Command:
    """The command that runs tests on the repository in its working directory.

    Args:
      files: the task's own files. What is at their top becomes stand-ins in the tests; files that
        an agent has added do not, or it could put its own `math` into a test.
      tests: test files that `ids` are in, path -> text.
      ids: PATH::FUNCTION.
    """
    nonce = secrets.token_hex(16)
    request = {
        "nonce": nonce,
        "packages": sorted({path.partition("/")[0].removesuffix(".py") for path in files}),
        "tests": dict(tests),
        "ids": list(ids),
        "test_s": TEST_S,
        "total_s": TOTAL_S,
    }
    return Command(("python3", *_isolated("runner.py")), json.dumps(request).encode(), nonce)


def pytest_command(
    files: Mapping[str, str],
    paths: Sequence[str],
    ids: Sequence[str] | None,
    *,
    seed: int | None = None,
) -> Command:
    """The command that runs tests by pytest; two that have to fail are planted among them.

    Args:
      files: test files and what they need, path -> text.
      paths: which of them to run.
      ids: the tests to run; None means all, and there are no planted ones.
      seed: of the order of the tests; None sorts them.
    """
    nonce = secrets.token_hex(16)
    planted = posixpath.join(posixpath.dirname(paths[0]), f"test_{secrets.token_hex(6)}.py")
    wires = () if ids is None else (f"{planted}::test_a", f"{planted}::test_b")
    request = {
        "nonce": nonce,
        "path": [python_env.SITE],
        "files": [*paths, planted] if wires else list(paths),
        "ids": [*ids, *wires] if wires else None,
        "seed": seed,
    }
    return Command(
        ("python3", *_isolated("pytest_runner.py")),
        json.dumps(request).encode(),
        nonce,
        {**files, planted: PLANTED} if wires else dict(files),
        wires,
    )


@functools.cache
def _isolated(name: str) -> tuple[str, ...]:
    source = importlib.resources.files("c2.sandbox.tasks").joinpath(name).read_text()
    return ("-I", "-S", "-B", "-c", source)


def verdict(
    stdout: bytes, nonce: str, ids: Sequence[str] | None
) -> tuple[bool, dict[str, str] | None]:
    """What the runner said: whether it started, and the results of exactly the tests `ids`.

    The results, id -> "" or why it failed, are None unless standard output is the two lines of the
    runner and nothing else, with the right nonce and every test once. `ids` of None takes any.
    """
    messages = [_message(line) for line in stdout.splitlines()]
    started = bool(messages) and messages[0] == {"nonce": nonce, "state": "ready"}
    if not started or len(messages) != 2:
        return started, None
    results = messages[1].pop("results", None)
    whole = (
        messages[1] == {"nonce": nonce, "state": "done"}
        and isinstance(results, dict)
        and (ids is None or results.keys() == set(ids))
        and all(isinstance(why, str) for why in results.values())
    )
    return started, results if whole else None


def begin(
    backend: Backend, handle: Handle, argv: Sequence[str]
) -> Callable[[bytes, float], ExecResult]:
    """Lets a command load where that is possible; what is returned gives it input and seconds."""
    if not isinstance(backend, SupportsJobs):
        return lambda stdin, timeout_s: backend.exec(
            handle, argv, stdin=stdin, timeout_s=timeout_s, max_output=MAX_OUTPUT
        )
    job = backend.prepare(handle, argv)
    return lambda stdin, timeout_s: backend.finish(handle, job, stdin, timeout_s=timeout_s)


def in_sandbox(backend: Backend, spec: Spec, *, timeout_s: float = TOTAL_S + START_S) -> Run:
    """Runs each command in a new sandbox, which is closed afterwards.

    Args:
      backend: where sandboxes come from.
      spec: what they are like; tasks with `Task.requires` need them in a layer at
        `python_env.SITE`.
      timeout_s: seconds for a command.
    """

    def run(argv: Sequence[str], files: Mapping[str, str], stdin: bytes) -> ExecResult:
        handle = backend.create(spec)
        try:
            finish = begin(backend, handle, argv)
            place.put(backend, handle, files)
            return finish(stdin, timeout_s)
        finally:
            backend.close(handle)

    return run


def _message(line: bytes) -> dict:
    """A line of JSON as a dict; an empty one for anything else and for repeated keys."""

    def unique(pairs: list) -> dict:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    try:
        message = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _why_not_started(result: ExecResult) -> str:
    said = result.error or result.stderr.decode(errors="replace").strip()[-200:]
    return f"the tests' runner did not start: {said or 'it said nothing'}"
