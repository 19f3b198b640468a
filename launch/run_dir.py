"""The run folder: what a run leaves on disk, and who may continue in an old one.

    config.json      study, variant and resolved config; `--config=DIR/config.json` reruns it
    overrides.json   one entry per start: time, command, git revision, versions, machine
    metrics.jsonl, checkpoints/, figures/  written by the study
    report.md        for people
    result.json      for programs; written last, so its presence means that the run is finished
    error.log        traceback of the last failed start; error.N.log: that of process N

The same command in the same folder resumes. A start whose config differs in a field that belongs to
the run's identity is refused; a change of `runtime` fields only is accepted and recorded. Every
file appears complete or not at all. Bad input that shows before there are metrics or checkpoints
takes a new folder back, with all that was prepared in it.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from c2.config import ConfigError, differences, from_dict, identity, runtime_keys, to_dict
from experiments.registry import Study

CONFIG, OVERRIDES, RESULT, REPORT = "config.json", "overrides.json", "result.json", "report.md"
ERRORS = "error.log"
METRICS, CHECKPOINTS = "metrics.jsonl", "checkpoints"  # results, unlike all else a study writes
_LOCK = ".lock"
_MOST_CHANGES = 10  # that an error message lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folder:
    """What a run folder holds for a config.

    Attributes:
      state: "new": nothing yet; "started": to be resumed; "finished": has a result.
      runtime_changes: `differences` from the stored config, all in runtime fields.
    """

    state: Literal["new", "started", "finished"]
    runtime_changes: list[str] = dataclasses.field(default_factory=list)


def manifest(study: Study, config: Any) -> dict[str, Any]:
    """The content of config.json; `runtime` names the keys that may change between starts."""
    return {
        "study": study.info.reference,
        "variant": study.variant,
        "config": to_dict(config),
        "runtime": runtime_keys(config),
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads a config.json.

    Raises:
      ConfigError: if it cannot be read, or is not such a file.
    """
    data = read_json(path)
    kinds = {"study": str, "variant": str, "config": dict}
    if not isinstance(data, dict) or any(not isinstance(data.get(k), kinds[k]) for k in kinds):
        raise ConfigError(f"{path}: not a saved config; it needs the keys {', '.join(kinds)}")
    return data


def check(workdir: Path, study: Study, config: Any) -> Folder:
    """Decides whether a run may use a folder; touches nothing.

    Raises:
      ConfigError: if the folder is a file, holds something else, or holds a run of another study or
        with another identity; the message lists the differing keys, old -> new.
    """
    stored_at = workdir / CONFIG
    if not os.path.exists(stored_at):  # which, unlike Path.exists, never raises
        _check_unused(workdir)
        return Folder(state="new")
    stored = read_manifest(stored_at)
    old_name = Path(stored["study"]).stem
    if old_name != study.info.name:
        changes = [f"study: {old_name} -> {study.info.name}"]
    else:
        old = _rebuild(stored, stored_at, config)
        changes = differences(identity(old), identity(config))
    if changes:
        shown = "; ".join(changes[:_MOST_CHANGES])
        more = f"; and {len(changes) - _MOST_CHANGES} more" if changes[_MOST_CHANGES:] else ""
        raise ConfigError(
            f"--workdir={workdir}: holds a run with another config: {shown}{more};"
            " choose another --workdir or keep the old values"
        )
    return Folder(
        state="finished" if (workdir / RESULT).exists() else "started",
        runtime_changes=differences(to_dict(old), to_dict(config)),
    )


@contextlib.contextmanager
def opened(workdir: Path, study: Study, config: Any, start: Mapping[str, Any]) -> Iterator[Folder]:
    """Holds a run folder for this process alone: creates or resumes it and records the start.

    A new folder whose config turns out to be bad before the study has results is removed again, so
    that the corrected command finds no old config in its way.

    Args:
      workdir: the folder; it and its parents are created.
      study: what runs.
      config: its resolved config.
      start: the entry for overrides.json.

    Raises:
      ConfigError: as `check`, or if another process holds the folder.
      OSError: if the folder cannot be written.
    """
    check(workdir, study, config)  # before anything is created
    created = [path for path in (workdir, *workdir.parents) if not os.path.exists(path)]
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--workdir={workdir}: {error.strerror}") from error
    with _locked(workdir):
        folder = check(workdir, study, config)
        try:
            if folder.state == "new" or folder.runtime_changes:
                write_json(workdir / CONFIG, manifest(study, config))
            _record(workdir, {**start, "runtime_changes": folder.runtime_changes})
            yield folder
        except ConfigError:
            if folder.state == "new" and not _has_results(workdir):
                _remove(workdir, created)
            raise


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
      ConfigError: if it cannot be read or parsed.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error


def write_json(path: Path, data: Any) -> None:
    """Writes strict JSON atomically; inf and nan become strings, arrays become lists."""
    write_text(path, json.dumps(_strict(data), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: after a crash or on a full disk the old content is still there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _rebuild(stored: Mapping[str, Any], path: Path, config: Any) -> Any:
    try:
        return from_dict(type(config), stored["config"], where=f"{path}: config")
    except ConfigError as error:
        raise ConfigError(f"{error}; choose another --workdir") from error


def _record(workdir: Path, start: Mapping[str, Any]) -> None:
    path = workdir / OVERRIDES
    starts = read_json(path)["starts"] if path.exists() else []
    write_json(path, {"starts": [*starts, start]})


def _check_unused(workdir: Path) -> None:
    try:
        names = os.listdir(workdir)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--workdir={workdir}: {error.strerror}") from error
    # A start that was killed before its config.json existed leaves only such files.
    if foreign := [name for name in names if name != _LOCK and not name.endswith(".partial")]:
        raise ConfigError(
            f"--workdir={workdir}: holds files ({min(foreign)}, ...) but no {CONFIG}, so it is not"
            " a run folder; choose a new or an empty folder"
        )


def _has_results(workdir: Path) -> bool:
    metrics, checkpoints = workdir / METRICS, workdir / CHECKPOINTS
    lines = metrics.exists() and metrics.stat().st_size > 0
    return lines or (checkpoints.exists() and any(checkpoints.iterdir()))


def _remove(workdir: Path, created: Sequence[Path]) -> None:
    """Empties a folder that was empty and removes the folders that did not exist before."""
    for path in workdir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in created:
        with contextlib.suppress(OSError):  # somebody else has put something there
            folder.rmdir()


@contextlib.contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    # The kernel releases a flock when its holder dies, however it dies; the file itself stays.
    with open(workdir / _LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"--workdir={workdir}: in use by another process; choose another --workdir"
            raise ConfigError(message) from error
        yield


def _strict(value: Any) -> Any:
    """Plain data that strict JSON can hold; numpy and jax values through their `tolist`."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return _strict(value.tolist()) if hasattr(value, "tolist") else value
