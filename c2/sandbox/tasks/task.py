"""What a task is: a repository, a prompt, and the tests that decide."""

import dataclasses
import fnmatch
import hashlib
import json
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass, field

from c2.config import ConfigError, from_dict, to_dict

MAX_PATH = 200

# Files that change how programs start or how tests are found; never part of a solution.
_STEERING = (
    "conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "pytest.ini", ".pytest.ini",
    "tox.ini", "setup.cfg", "setup.py", "pyproject.toml", "test_*.py", "*_test.py",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """A repository with something to do. An agent sees `prompt` and `files`, nothing else.

    The repository is these files alone: no history and no copy of the solution.

    Attributes:
      id: unique name.
      family: kind of task.
      split_keys: what held-out splits are made by, for example {"template": "clamp"}.
      prompt: what the agent is asked for.
      files: the repository, path -> text; paths are relative, with forward slashes.
      hidden_tests: test files which the agent never sees, path -> text. Tests are functions
        `test_*` without arguments that import the repository's modules, call their functions with
        plain data and assert on the results. Where pytest runs them they are what it can run, with
        the files that they need, and take the place of files of the repository.
      fail_to_pass: ids PATH::FUNCTION, of hidden or visible tests, that fail now and have to pass.
      pass_to_pass: ids of tests that pass now and still have to.
      editable: patterns, as of `fnmatch`, of paths that a solution may change, add or delete.
      level: difficulty, 1 and more.
      metadata: for people and statistics.
      requires: pins with hashes, as `python_env.install` takes them, of pytest and all else that
        tests need; they are then run by `pytest_runner`. Empty: by `runner`, and they need nothing.
    """

    id: str
    family: str
    split_keys: dict[str, str]
    prompt: str
    files: dict[str, str]
    hidden_tests: dict[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    editable: tuple[str, ...]
    level: int = 1
    metadata: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("files", "hidden_tests"):
            if bad := [path for path in getattr(self, name) if not is_plain_path(path)]:
                raise ConfigError(f"{name}.{bad[0]!r}: legal are relative paths without '..'")
        both = self.files.keys() & self.hidden_tests.keys()
        if both and not self.requires:
            raise ConfigError(f"hidden_tests.{min(both)}: it is in `files` too")
        if not self.fail_to_pass:
            raise ConfigError("fail_to_pass: it is empty; a task needs a test that fails")
        if len(set(self.test_ids)) != len(self.test_ids):
            raise ConfigError("pass_to_pass: a test is named twice")
        for test in self.test_ids:
            path, _, function = test.partition("::")
            if path not in self.files.keys() | self.hidden_tests.keys() or not function:
                raise ConfigError(f"fail_to_pass: {test!r}; legal is PATH::FUNCTION of a test file")

    @property
    def test_ids(self) -> tuple[str, ...]:
        """All tests that decide."""
        return self.fail_to_pass + self.pass_to_pass

    @property
    def content_hash(self) -> str:
        """SHA-256 of all but the id, in hexadecimal; the same in every process."""
        content = to_dict(self)
        del content["id"]
        if not self.requires:  # tasks older than this field keep their names
            del content["requires"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def allows(self, path: str) -> bool:
        """Whether a solution may change this path; files that steer test runs never."""
        return is_plain_path(path) and matches(path, self.editable) and not steers(path)

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Solved:
    """A task with the files of its solution, path -> text."""

    task: Task
    solution: dict[str, str]


def from_json(text: str) -> Task:
    """Reads what `Task.to_json` wrote.

    Raises:
      ConfigError: if it is not JSON or not a task.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"task: not JSON: {error}") from error
    return from_dict(Task, data, where="task")


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of some patterns, as of `fnmatch`, fits a path."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def steers(path: str) -> bool:
    """Whether a file changes how programs start or how tests are found."""
    return matches(posixpath.basename(path), _STEERING)


def is_plain_path(path: str) -> bool:
    """Whether a path is short printable ASCII, relative, in normal form, and stays below."""
    return (
        path not in ("", ".", "..")
        and not path.startswith(("/", "../"))
        and len(path) <= MAX_PATH
        and path.isascii()
        and path.isprintable()
        and posixpath.normpath(path) == path
    )
