"""Tasks from the commits of a git repository: the parent's files, the commit's tests and message.

Only objects are read, by commands that run no filter, hook or helper that the repository's own
configuration may name, and fetch nothing. What an agent gets is files, so nothing of the history
and of the commit can be reached; `start_history` gives it a repository of its own.
"""

import os
import posixpath
import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from c2.config import ConfigError
from c2.sandbox.protocol import Backend, Handle, ToolError
from c2.sandbox.tasks.gates import Candidate
from c2.sandbox.tasks.task import is_plain_path, matches, steers

TESTS = ("test/*", "tests/*", "*/test/*", "*/tests/*", "test_*.py", "*/test_*.py", "*_test.py")
MAX_FILE = 1 << 19  # bytes; larger files are left out
TRAILER = re.compile(r"[A-Za-z][A-Za-z-]*: \S.*")
ENV = {
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_REPLACE_OBJECTS": "1",
    "LC_ALL": "C",
}  # fmt: skip
SAFE = (
    "-c",
    "safe.directory=*",
    "-c",
    "core.fsmonitor=false",
    "-c",
    f"core.hooksPath={os.devnull}",
)
WHO = {"GIT_AUTHOR_NAME": "user", "GIT_AUTHOR_EMAIL": "user@sandbox", "GIT_AUTHOR_DATE": "@0 +0000"}


def candidate(
    repository: Path,
    commit: str,
    *,
    requires: Sequence[str],
    tests: Sequence[str] = TESTS,
    source: Sequence[str] | None = None,
) -> Candidate:
    """The task of a commit, before its gates.

    Args:
      repository: a work tree or a bare repository.
      commit: any name of it.
      requires: pins with hashes, as of `Task.requires`.
      tests: patterns of test files and of what they need.
      source: patterns of what a solution may change; None means the folders of other files that
        the commit changes.

    Raises:
      ConfigError: if there is no such commit, it does not have one parent, or it changes nothing
        or no test.
    """
    new = _resolved(repository, commit)
    parents = _git(repository, "rev-list", "--parents", "--max-count=1", new).decode().split()[1:]
    if len(parents) != 1:
        raise ConfigError(f"commit: {commit} has {len(parents)} parents; legal are commits with 1")
    before, after = tree(repository, parents[0]), tree(repository, new)
    changed = [path for path in before | after if before.get(path) != after.get(path)]
    work = [path for path in changed if not matches(path, tests) and not steers(path)]
    hidden = {path: text for path, text in after.items() if matches(path, tests)}
    if not work or not any(path in hidden for path in changed):
        what = "no test" if work else "nothing but tests"
        raise ConfigError(f"commit: {commit} changes {what}, which makes no task")
    patterns = tuple(source) if source is not None else folders(work)
    message = _git(repository, "log", "--max-count=1", "--format=%B", new)
    return Candidate(
        id=f"commit/{repository.absolute().name.removesuffix('.git')}/{new[:12]}",
        family="commit",
        split_keys={"repository": repository.absolute().name},
        prompt=prompt(message.decode(errors="replace")),
        files=before,
        solution=before
        | {path: after[path] for path in work if path in after and matches(path, patterns)},
        hidden_tests=hidden,
        editable=patterns,
        requires=tuple(requires),
        metadata={"commit": new},
    )


def tree(repository: Path, revision: str) -> dict[str, str]:
    """The regular files of a revision, path -> text; large ones and odd names are left out."""
    found: dict[str, str] = {}
    listed = _git(repository, "ls-tree", "-r", "-z", "--long", "--end-of-options", revision)
    for entry in filter(None, listed.split(b"\0")):
        facts, _, name = entry.partition(b"\t")
        mode, _, sha, size = facts.split()
        path = name.decode(errors="surrogateescape")
        if mode not in (b"100644", b"100755") or not is_plain_path(path):
            continue
        if not size.isdigit():
            raise ConfigError(f"repository: {repository}: the content of {path} is missing")
        if int(size) <= MAX_FILE:
            found[path] = sha.decode()
    wanted = "".join(f"{sha}\n" for sha in found.values()).encode()
    data, place = _git(repository, "cat-file", "--batch", stdin=wanted), 0
    for path in found:
        head, _, _ = data[place : place + 200].partition(b"\n")
        start = place + len(head) + 1
        place = start + int(head.split()[2]) + 1
        found[path] = data[start : place - 1].decode(errors="surrogateescape")
    return found


def prompt(message: str) -> str:
    """A commit message without the lines at its end that name people and tickets."""
    parts = re.split(r"\n\s*\n", message.strip())
    while len(parts) > 1 and all(map(TRAILER.fullmatch, parts[-1].splitlines())):
        parts.pop()
    return "\n\n".join(parts)


def start_history(backend: Backend, handle: Handle, folder: str) -> None:
    """Makes a git repository of one commit in a folder of a sandbox, by the git inside.

    Raises:
      ToolError: if that fails.
    """
    script = "git init -q . && git add -A && git commit -q --no-verify --allow-empty -m Start"
    people = WHO | {name.replace("AUTHOR", "COMMITTER"): text for name, text in WHO.items()}
    result = backend.exec(handle, ["sh", "-c", script], cwd=folder, env=people | ENV)
    if not result.ok:
        said = (result.error or result.stderr.decode(errors="replace")).strip()
        raise ToolError(f"no history can be made in {folder}: {said[-200:]}")


def folders(paths: Collection[str]) -> tuple[str, ...]:
    """Patterns of all in the folders of some files, or of the files where they are in none."""
    folders = {posixpath.dirname(path) for path in paths}
    tops = {folder for folder in folders if not any(_below(folder, other) for other in folders)}
    loose = [path for path in paths if "/" not in path]
    return tuple(sorted([*loose, *(f"{folder}/*" for folder in tops if folder)]))


def _resolved(repository: Path, commit: str) -> str:
    name = f"{commit}^{{commit}}"
    try:
        return _git(repository, "rev-parse", "--verify", "--end-of-options", name).decode().strip()
    except ConfigError as error:
        raise ConfigError(f"commit: {commit}: {error}") from error


def _below(folder: str, other: str) -> bool:
    return bool(other) and folder.startswith(f"{other}/")


def _git(repository: Path, *words: str, stdin: bytes = b"") -> bytes:
    env = {"PATH": os.environ.get("PATH", os.defpath), **ENV}
    command = ["git", "-C", str(repository), "--no-pager", *SAFE, *words]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, env=env)
    except FileNotFoundError as error:
        raise ConfigError("git: it is not installed") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"repository: {repository}: {(said or ['git failed'])[-1]}")
    return done.stdout
