"""Rollout checkpoints: a restart loses nothing that an agent has done (report section 6).

Of every rollout that runs there is a folder with one file, replaced in one step, and the layers of
files that it names. The file has the conversation, its tokens with versions, log-probabilities and
routes, and the checksums of all; once the rollout has ended it is the rollout itself, which stays
until the controller knows it for good. What a killed process has left half written is named by no
such file and goes with the next checkpoint.
"""

import dataclasses
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from c2.agent.harness import Saved
from c2.records import Generation, Rollout
from c2.rl.journal import pack, pack_chain, unpack, unpack_chain
from c2.sandbox.tools.calls import TodoItem

_CHECKSUM = 16  # bytes
_GOING, _ENDED = b"going", b"ended"  # what a file begins with


class CheckpointError(Exception):
    """A checkpoint that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A rollout between two turns.

    Attributes:
      saved: the conversation.
      generations: its tokens so far.
      events: its transcript so far.
      todo: the agent's list of things to do.
      layers: folders with what the sandbox has changed, the lowest first.
    """

    saved: Saved
    generations: tuple[Generation, ...]
    events: tuple[Mapping[str, Any], ...]
    todo: tuple[TodoItem, ...]
    layers: tuple[Path, ...] = ()


class RolloutFolder:
    """The checkpoint of one rollout."""

    def __init__(self, root: Path, prompt: str, sample: int) -> None:
        """Makes nothing yet."""
        self._folder = _of_prompt(root, prompt) / str(sample)
        self._file = self._folder / "checkpoint"

    def load(self) -> Checkpoint | Rollout | None:
        """What there is: where it goes on, how it has ended, or nothing.

        Raises:
          CheckpointError: if it cannot be used, in one line.
        """
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return None
        kind, checksum, body = data[:5], data[5 : 5 + _CHECKSUM], data[5 + _CHECKSUM :]
        if checksum != _hash(kind + body).digest():
            raise CheckpointError(f"{self._file}: its checksum is wrong")
        try:
            return unpack(body) if kind == _ENDED else self._going(body)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{self._file}: other code has written it: {error!r}") from error

    def save(self, checkpoint: Checkpoint, snapshot: Callable[[Path], None]) -> None:
        """Puts a checkpoint in the place of the last one.

        Args:
          checkpoint: all but the newest layer, which goes on top of those that it has.
          snapshot: fills an empty folder with that.

        Raises:
          Exception: what `snapshot` has raised.
          OSError: if there is no room, say. The last checkpoint stays then.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        newest = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            snapshot(newest)
            layers = {path.name: _tree_hash(path) for path in (*checkpoint.layers, newest)}
            rest = {
                "saved": dataclasses.asdict(checkpoint.saved),
                "events": checkpoint.events,
                "todo": list(map(vars, checkpoint.todo)),
                "layers": layers,
            }
            self._write(_GOING, pack_chain(checkpoint.generations, rest))
        except BaseException:
            _remove(newest)
            raise
        self._clear(layers)

    def end(self, rollout: Rollout) -> None:
        """Keeps a rollout that has come to its end, in the place of its checkpoint."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write(_ENDED, pack(rollout))
        self._clear(())

    def _going(self, body: bytes) -> Checkpoint:
        generations, rest = unpack_chain(body)
        layers = tuple(self._folder / name for name in rest["layers"])
        for layer in layers:
            if _tree_hash(layer) != rest["layers"][layer.name]:
                raise CheckpointError(f"{layer}: its checksum is wrong")
        return Checkpoint(
            saved=Saved.from_dict(rest["saved"]),
            generations=generations,
            events=tuple(rest["events"]),
            todo=tuple(TodoItem(**item) for item in rest["todo"]),
            layers=layers,
        )

    def _write(self, kind: bytes, body: bytes) -> None:
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        new.write_bytes(kind + _hash(kind + body).digest() + body)
        new.rename(self._file)

    def _clear(self, kept: Iterable[str]) -> None:
        """Removes what the newest checkpoint does not name."""
        for path in self._folder.iterdir():
            if path != self._file and path.name not in kept:
                _remove(path)


def forget(root: Path, prompts: Iterable[str]) -> None:
    """Removes the checkpoints of all rollouts of some prompts."""
    for prompt in prompts:
        _remove(_of_prompt(root, prompt))


def _of_prompt(root: Path, prompt: str) -> Path:
    return root / _hash(prompt.encode()).hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _hash(data: bytes = b""):
    return hashlib.blake2b(data, digest_size=_CHECKSUM)


def _tree_hash(folder: Path) -> str:
    """Of names, kinds, rights and contents in a folder, through no links; "" if there is none."""
    if not folder.is_dir():
        return ""
    found = _hash()
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(folders + files):
            path = os.path.join(place, name)
            info = os.lstat(path)
            found.update(f"{os.path.relpath(path, folder)!r} {info.st_mode}\n".encode())
            if os.path.islink(path):
                found.update(os.fsencode(os.readlink(path)))
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()
