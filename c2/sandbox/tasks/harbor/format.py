"""Reads tasks in Harbor's format."""

import posixpath
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2.config import ConfigError
from c2.sandbox.protocol import Resources
from c2.sandbox.tasks.harbor import dockerfile

_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}  # MiB


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task.

    Attributes:
      id: name in task.toml, else of the folder.
      prompt: what the agent is asked for.
      metadata: whatever its author has noted.
      files: what is in `environment/`, path -> content; the Dockerfile among it.
      tests: what is in `tests/`.
      solution: what is in `solution/`.
      resources: hard limits; of the format's units, those that a sandbox has.
      agent_s, verifier_s, build_s: seconds that they may take.
      env: variables of the environment.
      verifier_env: variables of the tests beside them.
      unsupported: what the task wants that is not to be had here.
    """

    id: str
    prompt: str
    metadata: dict[str, Any]
    files: dict[str, bytes]
    tests: dict[str, bytes]
    solution: dict[str, bytes]
    resources: Resources
    agent_s: float
    verifier_s: float
    build_s: float
    env: dict[str, str]
    verifier_env: dict[str, str]
    unsupported: tuple[str, ...]


def read(folder: Path) -> HarborTask:
    """Reads a task.

    Raises:
      ConfigError: if a file or a field is missing or wrong.
    """
    try:
        data = tomllib.loads((folder / "task.toml").read_text())
        prompt = (folder / "instruction.md").read_text()
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder}: {error}") from error
    kinds = {name: _section(data, name) for name in ("task", "metadata", "agent", "verifier")}
    environment = _section(data, "environment")
    files, tests, solution = (
        _files(folder / name) for name in ("environment", "tests", "solution")
    )
    if "test.sh" not in tests:
        raise ConfigError(f"{folder}/tests/test.sh: there is none")
    return HarborTask(
        id=str(kinds["task"].get("name", folder.absolute().name)),
        prompt=prompt,
        metadata=kinds["metadata"],
        files=files,
        tests=tests,
        solution=solution,
        resources=Resources(
            cpus=float(environment.get("cpus") or 1),
            memory_mb=_megabytes(environment, "memory") or 2048,
            disk_mb=_megabytes(environment, "storage") or 1024,
        ),
        agent_s=float(kinds["agent"].get("timeout_sec") or 600.0),
        verifier_s=float(kinds["verifier"].get("timeout_sec") or 600.0),
        build_s=float(environment.get("build_timeout_sec") or 600.0),
        env=_variables(environment, "environment.env"),
        verifier_env=_variables(kinds["verifier"], "verifier.env"),
        unsupported=_unsupported(data, environment, files),
    )


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"task.toml: {name}: legal is a table")
    return section


def _variables(section: Mapping[str, Any], where: str) -> dict[str, str]:
    """Variables, but for those whose value is to be taken from this machine."""
    found = section.get("env", {})
    if not isinstance(found, dict):
        raise ConfigError(f"task.toml: {where}: legal is a table")
    return {name: str(value) for name, value in found.items() if "${" not in str(value)}


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    """Of `memory_mb` and the like, or of the older `memory = "2G"`."""
    if (number := environment.get(f"{name}_mb")) is not None:
        return int(number)
    if (text := environment.get(name)) is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", str(text), re.IGNORECASE)
    if not match:
        raise ConfigError(f"task.toml: environment.{name}: {text!r}; legal is for example '2G'")
    return max(int(float(match[1]) * _SIZES[match[2].upper()]), 1)


def _files(folder: Path) -> dict[str, bytes]:
    """The regular files of a folder; links could lead anywhere."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


_WANTED: tuple[tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]], ...] = (
    ("several steps", lambda data, _: data.get("steps")),
    ("a GPU or TPU", lambda _, place: place.get("gpus") or place.get("tpu")),
    ("another system than Linux", lambda _, place: place.get("os", "linux") != "linux"),
    ("an MCP server", lambda _, place: place.get("mcp_servers")),
    ("an allow-list of hosts", lambda _, place: place.get("network_mode") == "allowlist"),
)


def _unsupported(
    data: Mapping[str, Any], environment: Mapping[str, Any], files: Mapping[str, bytes]
) -> tuple[str, ...]:
    found = [name for name, wanted in _WANTED if wanted(data, environment)]
    if any(posixpath.basename(path).startswith("docker-compose.") for path in files):
        found.append("docker compose")
    return (*found, *dockerfile.unknown(files.get("Dockerfile", b"").decode(errors="replace")))
