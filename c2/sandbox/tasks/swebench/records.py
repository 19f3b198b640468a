"""Records of SWE-bench and sets in its format: a repository, a commit, two patches, test names."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2.config import ConfigError
from c2.sandbox.tasks import git_tasks
from c2.sandbox.tasks.gates import Candidate
from c2.sandbox.tasks.swebench.logs import Status
from c2.sandbox.tasks.task import is_plain_path, steers


@dataclass(frozen=True, kw_only=True)
class Record:
    """One task; the fields are those of the format, of which others are ignored.

    Attributes:
      instance_id: unique name.
      repo: OWNER/NAME of the repository.
      base_commit: where the work begins.
      problem_statement: what is asked for.
      patch: the solution.
      test_patch: changes of the tests.
      fail_to_pass: tests that have to change to passing.
      pass_to_pass: tests that have to stay so.
      version: of the project, by which environments are chosen.
    """

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    version: str = ""

    def __post_init__(self) -> None:
        if not self.fail_to_pass:
            raise ConfigError(f"FAIL_TO_PASS: {self.instance_id} has none")
        if both := set(self.fail_to_pass) & set(self.pass_to_pass):
            raise ConfigError(f"PASS_TO_PASS: {min(both)!r} is in FAIL_TO_PASS too")


def read(path: Path) -> Iterator[Record]:
    """The records of a file with one in each line, or with a list of them.

    Raises:
      ConfigError: for what is no record, naming its place.
    """
    text = path.read_text()
    lines = text.splitlines() if not text.lstrip().startswith("[") else [text]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        for item in data if isinstance(data, list) else [data]:
            try:
                yield record(item)
            except ConfigError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error


def record(data: Mapping[str, Any]) -> Record:
    """A record from a row.

    Raises:
      ConfigError: if a field is missing or of another type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"a {type(data).__name__}; legal is an object with the fields of a task")
    texts = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch")
    for name in texts:
        if not isinstance(data.get(name), str):
            raise ConfigError(f"{name}: it is missing or no text")
    return Record(
        **{name: data[name] for name in texts},
        fail_to_pass=_names(data, "FAIL_TO_PASS"),
        pass_to_pass=_names(data, "PASS_TO_PASS"),
        version=str(data.get("version", "")),
    )


def candidate(item: Record, repository: Path, requires: Iterable[str]) -> Candidate:
    """The task of a record whose tests pytest can run, with files from a local copy of its history.

    Its tests are named by the record, so `Candidate.solved` with them makes the task at once;
    `gates.gate` finds out whether they hold here.

    Raises:
      ConfigError: if the commit is not there or a patch does not fit.
    """
    files = git_tasks.tree(repository, item.base_commit)
    solution = apply(files, item.patch, f"{item.instance_id}: patch")
    tested = apply(files, item.test_patch, f"{item.instance_id}: test_patch")
    changed = [path for path in solution if solution[path] != files.get(path)]
    return Candidate(
        id=f"swebench/{item.instance_id}",
        family="swebench",
        split_keys={"repository": item.repo},
        prompt=item.problem_statement,
        files=files,
        solution=files | {path: solution[path] for path in changed if not steers(path)},
        hidden_tests={
            path: text for path, text in tested.items() if _decides(path, item, files, text)
        },
        editable=git_tasks.folders(changed),
        requires=tuple(requires),
        metadata={"version": item.version},
    )


def unresolved(item: Record, statuses: Mapping[str, Status]) -> dict[str, str]:
    """The tests of a record that did not pass in a log, with their status; empty if resolved."""
    return {
        name: statuses.get(name, "missing")
        for name in item.fail_to_pass + item.pass_to_pass
        if statuses.get(name) != "PASSED"
    }


def apply(files: Mapping[str, str], patch: str, where: str) -> dict[str, str]:
    """Files with a patch in git's format applied; `where` names it in errors.

    Raises:
      ConfigError: if it does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode(errors="surrogateescape"))
        env = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CEILING_DIRECTORIES": folder}
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"], cwd=folder, env=env | git_tasks.ENV,
            input=patch.encode(errors="surrogateescape"), capture_output=True,
        )  # fmt: skip
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise ConfigError(f"{where}: {(said or ['git failed'])[0]}")
        return {
            path: file.read_bytes().decode(errors="surrogateescape")
            for file in sorted(Path(folder).rglob("*"))
            if is_plain_path(path := file.relative_to(folder).as_posix())
            and file.is_file()
            and not file.is_symlink()
        }


def _decides(path: str, item: Record, files: Mapping[str, str], text: str) -> bool:
    """Whether a file is of the tests: changed by their patch, or named by them."""
    named = {name.partition("::")[0] for name in item.fail_to_pass + item.pass_to_pass}
    return files.get(path) != text or path in named


def _names(data: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Test names, which are a list or, in the original files, JSON of one."""
    value = data.get(field, [])
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{field}: not JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{field}: legal is a list of test names")
    return tuple(value)
