"""Checkpoints: training state and data position, saved together and checked before they are used.

One folder per step::

    00000040/state            written by Orbax in the background, renamed into place when complete
    00000040/manifest.json    written last, by this module: the commit marker

Orbax alone does not suffice as a judge of what it loads: flipped bytes in the array data come back
as wrong numbers without an error (its zarr3 chunks carry no checksum), and so does a folder whose
commit marker is gone. The manifest therefore lists size and SHA-256 of every file, and a folder
is only restored if all of them agree. It also holds the shape and dtype of every leaf, so that a
checkpoint of another model is refused by name before anything is read, the position in the data,
and the caller's metadata. All processes of a run must call the same methods; process 0 alone writes
what Orbax does not. Nothing depends on their number, so a run may go on with another.

This is the only module that imports Orbax.
"""

import concurrent.futures
import copy
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from c2.config import ConfigError

State = TypeVar("State")

_LOG = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_TEMPORARY = ".orbax-checkpoint-tmp"  # how Orbax marks a folder that it still writes
_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is one line for the user."""


class ForeignCheckpointError(ConfigError):
    """A sound checkpoint that belongs to another model or run; the message is one line."""


class Checkpoints:
    """The checkpoints of one run: one directory, one writer, at most one save in flight.

    Args:
        directory: Where the step folders live (a local or network file system); created by the
            first save.
        keep: How many of the newest checkpoints stay.
        keep_every: Checkpoints at multiples of this step stay for ever; ``None`` for none.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3, keep_every: int | None = None):
        if keep < 1:
            raise ConfigError(f"keep: {keep} checkpoints; must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise ConfigError(f"keep_every: {keep_every} steps; must be at least 1, or none")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._keep_every = keep_every
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        logging.getLogger("absl").addFilter(_is_news)

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lives."""
        return self.directory / f"{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a folder, in ascending order; some may be incomplete or damaged."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdigit())

    def save(
        self,
        step: int,
        state: Any,
        batches: Iterator[Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts saving ``state`` and the position of ``batches``; returns once both are copied.

        The caller may donate ``state`` and draw from ``batches`` at once. A folder that is already
        there for this step (a damaged one, after a restart from an older step) is replaced.

        Args:
            step: Global step, the name of the checkpoint.
            state: Any pytree of arrays.
            batches: Live Grain iterator; its state is the same in all processes. None for none.
            metadata: JSON-able values that :meth:`metadata` gives back.

        Raises:
            CheckpointError: This save cannot start, or the one before it failed.
        """
        self.wait()
        manifest = {
            "step": step,
            "metadata": dict(metadata or {}),
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "leaves": _describe(state),
            "data": None if batches is None else copy.deepcopy(batches.get_state()),
        }
        folder = self.folder(step)
        try:
            response = ocp.save_checkpointables_async(folder, {"state": state}, overwrite=True)
        except Exception as error:
            raise self._failed(folder, error) from error
        self._pending = self._thread.submit(self._finish, folder, response, manifest)

    def wait(self) -> None:
        """Blocks until the save in flight, if any, is on disk.

        Raises:
            CheckpointError: It failed; the checkpoints before it are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> int | None:
        """The newest step whose files are all there and unchanged.

        Every newer folder is skipped with one warning that names it. Reads all bytes of the
        checkpoint it returns. Deletes what a killed or failed save has left behind.
        """
        self.wait()
        self._sweep()
        step = self._newest_sound() if jax.process_index() == 0 else None
        if jax.process_count() > 1:  # all processes must agree, and one reader is enough
            agreed = multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step))
            step = None if agreed < 0 else int(agreed)
        return step

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata given to :meth:`save`, without touching the state.

        Raises:
            CheckpointError: There is no readable manifest for this step.
        """
        return self._manifest(step)["metadata"]

    def restore(self, step: int, state: State, batches: Iterator[Any] | None = None) -> State:
        """Reads the state of a step and moves ``batches`` to where they were.

        Args:
            step: A step that :meth:`latest` returned.
            state: The tree to fill: arrays or ``jax.ShapeDtypeStruct``; its shardings are used,
                its values are not.
            batches: A fresh iterator of the same pipeline; ``None`` leaves the data alone.

        Returns:
            A tree of the type of ``state``.

        Raises:
            ForeignCheckpointError: A leaf is missing, or has another shape or dtype, or
                ``batches`` raises a ``ConfigError`` because its data are others.
            CheckpointError: Orbax or the iterator refuses the content.
        """
        folder = self.folder(step)
        manifest = self._manifest(step)
        _require_same_leaves(folder, manifest["leaves"], _describe(state))
        if batches is not None:
            _warn_about_grain(folder, manifest["versions"])
            _move(folder, batches, manifest.get("data"))
        return _load(folder, jax.tree.map(_abstract, state))

    def close(self) -> None:
        """Waits for the save in flight and ends the background thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._sweep()  # again: threads of a failed save may have gone on writing for a moment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(
        self, folder: Path, response: ocp.AsyncResponse[None], manifest: dict[str, Any]
    ) -> None:
        try:
            response.result()
            if jax.process_index() == 0:
                _write_manifest(folder, manifest)
                self._prune(manifest["step"])
        except Exception as error:
            raise self._failed(folder, error) from error

    def _failed(self, folder: Path, error: Exception) -> CheckpointError:
        # A full disk stays full as long as the half-written folder is there.
        for path in (folder, *self.directory.glob(f"{folder.name}{_TEMPORARY}*")):
            if jax.process_index() == 0 and not (path / _MANIFEST).exists():
                shutil.rmtree(path, ignore_errors=True)
        return CheckpointError(f"{folder}: could not be saved: {_one_line(error)}")

    def _newest_sound(self) -> int | None:
        for step in reversed(self.steps()):
            try:
                _require_same_files(self.folder(step), self._manifest(step)["files"])
            except CheckpointError as problem:
                _LOG.warning("checkpoint skipped: %s", problem)
            else:
                return step
        return None

    def _manifest(self, step: int) -> dict[str, Any]:
        path = self.folder(step) / _MANIFEST
        try:
            stored = json.loads(path.read_bytes())
            if stored["sha256"] != _digest(stored["manifest"]):
                raise ValueError("checksum differs")
            return stored["manifest"]
        except FileNotFoundError:
            raise CheckpointError(
                f"{path.parent}: no {_MANIFEST}; its save did not finish"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path.parent}: {_MANIFEST} is damaged ({_one_line(error)})"
            ) from None

    def _prune(self, newest: int) -> None:
        """Deletes what the retention rule does not keep."""
        # Folders after the newest save are damaged ones of an abandoned attempt: they do not
        # count as kept, and the run replaces them when it gets there.
        steps = [step for step in self.steps() if step <= newest]
        complete = [step for step in steps if (self.folder(step) / _MANIFEST).exists()]
        kept = set(complete[-self._keep :])
        if self._keep_every is not None:
            kept |= {step for step in complete if step % self._keep_every == 0}
        for step in set(steps) - kept:
            (self.folder(step) / _MANIFEST).unlink(missing_ok=True)  # first: it is the marker
            shutil.rmtree(self.folder(step))
        self._sweep()

    def _sweep(self) -> None:
        """Deletes folders of unfinished saves; to be called while no save is in flight."""
        if jax.process_index() == 0:
            for path in self.directory.glob(f"*{_TEMPORARY}*"):
                shutil.rmtree(path, ignore_errors=True)


def _describe(state: Any) -> dict[str, str]:
    """Leaf path -> ``dtype[shape]``, in tree order."""
    return {
        jax.tree_util.keystr(path): _shape_and_dtype(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _shape_and_dtype(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", type(leaf).__name__)
    return f"{dtype}[{','.join(map(str, np.shape(leaf)))}]"


def _load(folder: Path, state: State) -> State:
    try:
        return ocp.load_checkpointables(folder, {"state": state})["state"]
    except Exception as error:
        reason = error.__cause__ or error  # Orbax wraps it in "incompatible handler"
        raise CheckpointError(f"{folder}: cannot be restored: {_one_line(reason)}") from error


def _move(folder: Path, batches: Iterator[Any], position: Any) -> None:
    try:
        batches.set_state(position)
    except ConfigError as error:  # the iterator's word that its data are others
        raise ForeignCheckpointError(f"{folder}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"the position in the data is not legal: {_one_line(error)}"
        raise CheckpointError(f"{folder}: cannot be restored: {reason}") from error


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return leaf


def _require_same_leaves(folder: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    for name in {**wanted, **saved}:
        there, here = saved.get(name, "absent"), wanted.get(name, "absent")
        if there != here:
            raise ForeignCheckpointError(
                f"{folder}: belongs to another run: {name} is {there} in the checkpoint "
                f"but {here} here; use another directory or the configuration it was made with"
            )


def _require_same_files(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    for name, expected in files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"{folder}: {name} has {size} bytes instead of {expected['bytes']}"
                )
            if _file_digest(path) != expected["sha256"]:
                raise CheckpointError(f"{folder}: {name} is damaged (checksum differs)")
        except OSError as error:
            raise CheckpointError(f"{folder}: {name}: {error.strerror}") from None


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest["files"] = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _file_digest(path),
        }
        for path in paths
    }
    temporary = folder / f"{_MANIFEST}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"sha256": _digest(manifest), "manifest": manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / _MANIFEST)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _warn_about_grain(folder: Path, versions: dict[str, str]) -> None:
    saved, installed = versions["grain"], importlib.metadata.version("grain")
    if saved != installed:
        _LOG.warning(
            "%s: data position saved by grain %s, read by %s: the same order is not promised",
            folder, saved, installed,
        )  # fmt: skip


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__


def _is_news(record: logging.LogRecord) -> bool:
    # Orbax logs a traceback per internal thread for an error that it also raises to us.
    return "_SignalingThread.run() raised" not in str(record.msg)
