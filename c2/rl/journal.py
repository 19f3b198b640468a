"""What has happened to groups and rollouts, on disk: the group checkpoints of report section 6.

One file to which records are appended and in which nothing ever changes. A process that is killed
leaves at most one torn record at the end, which the next one cuts off. With the trainer's own
checkpoint it says all that a restart needs: which prompts have begun, which rollouts have come to a
score, and what every step was trained on.
"""

import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save

from c2.records import Effort, Generation, Rollout
from c2.rl.schedule import Job, OpenGroup

_FRAME = struct.Struct("<III")  # length of the header, of the body, and a checksum
_MAX = 1 << 31


class JournalError(Exception):
    """The journal cannot be one: what it says does not fit together."""


class Journal:
    """Opens the journal of a run, or begins it.

    Attributes:
      prompts: of the groups that have begun, in their order.
      versions: the oldest that tokens of these groups can have.
      batches: groups of every step that has been decided.
      evaluations: what an evaluation has found, by version.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there.

        Raises:
          OSError: if the file cannot be read or written.
          JournalError: if its records do not fit together.
        """
        self.prompts: list[str] = []
        self.versions: list[int] = []
        self.batches: list[list[int]] = []
        self.evaluations: dict[int, Any] = {}
        # of the rollouts of every group, by sample: where they are; None for lost ones
        self._places: list[dict[int, tuple[int, int] | None]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by `__exit__`
        self._end = self._read()
        self._file.truncate(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begun(self, group: int, prompt: str, version: int) -> None:
        """A group begins; this version is the oldest that its tokens can have."""
        self._append({"kind": "begun", "group": group, "prompt": prompt, "version": version})

    def scored(self, job: Job, rollout: Rollout) -> None:
        """A rollout has come to a score."""
        header = {"kind": "scored", "group": job.group, "sample": job.sample}
        self._append(header, pack(rollout))

    def lost(self, job: Job) -> None:
        """A rollout was given up, through no fault of the policy."""
        self._append({"kind": "lost", "group": job.group, "sample": job.sample})

    def batch(self, groups: Sequence[int]) -> None:
        """The next step is going to be trained on these groups; returns when that is on disk."""
        self._append({"kind": "batch", "groups": list(groups)})
        self._file.flush()
        os.fsync(self._file.fileno())

    def evaluated(self, version: int, found: Any) -> None:
        """A version has been evaluated."""
        self._append({"kind": "evaluated", "version": version, "found": found})

    def rollouts(self, group: int) -> dict[int, Rollout]:
        """The rollouts of a group that have come to a score, by sample, in order of samples."""
        there = sorted((sample, at) for sample, at in self._places[group].items() if at)
        file = self._file.fileno()
        return {sample: unpack(os.pread(file, size, start)) for sample, (start, size) in there}

    def open_groups(self, size: int, least: int) -> list[OpenGroup]:
        """Groups that have begun, are in no batch, and are not void."""
        picked = {group for batch in self.batches for group in batch}
        groups = []
        for index in range(len(self.prompts)):
            if index not in picked:
                lost = {sample for sample, at in self._places[index].items() if at is None}
                if size - len(lost) >= least:
                    scored = {s: r.oldest_version for s, r in self.rollouts(index).items()}
                    groups.append(OpenGroup(index, self.versions[index], scored, lost))
        return groups

    def _append(self, header: dict[str, Any], body: bytes = b"") -> None:
        data = json.dumps(header).encode()
        checksum = _checksum(data, body)
        self._note(header, self._end + _FRAME.size + len(data), len(body))
        self._file.write(_FRAME.pack(len(data), len(body), checksum) + data + body)
        self._file.flush()  # what a killed process has written stays; `batch` fears power cuts, too
        self._end += _FRAME.size + len(data) + len(body)

    def _read(self) -> int:
        """Notes all whole records; returns where they end."""
        self._file.seek(0)
        end = 0
        while len(frame := self._file.read(_FRAME.size)) == _FRAME.size:
            length, size, checksum = _FRAME.unpack(frame)
            if length + size > _MAX:
                break
            data, body = self._file.read(length), self._file.read(size)
            if len(body) < size or _checksum(data, body) != checksum:
                break
            self._note(json.loads(data), end + _FRAME.size + length, size)
            end += _FRAME.size + length + size
        return end

    def _note(self, header: dict[str, Any], start: int, size: int) -> None:
        match header:
            case {"kind": "begun", "group": group, "prompt": prompt, "version": version}:
                if group != len(self.prompts):
                    raise JournalError(f"group {group} begins after {len(self.prompts)} others")
                self.prompts.append(prompt)
                self.versions.append(version)
                self._places.append({})
            case {"kind": "batch", "groups": groups}:
                self.batches.append(groups)
            case {"kind": "evaluated", "version": version, "found": found}:
                self.evaluations[version] = found
            case {"group": group, "sample": sample}:
                if group >= len(self.prompts) or sample in self._places[group]:
                    raise JournalError(f"rollout {sample} of group {group} ends twice or unbegun")
                self._places[group][sample] = (start, size) if size else None


def _checksum(header: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(header, 1))  # not 0 for nothing: lost blocks are zeros


def pack(rollout: Rollout) -> bytes:
    """A rollout as bytes."""
    rest = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    rest["effort"] = dataclasses.asdict(rollout.effort)
    return pack_chain(rest.pop("generations"), rest)


def unpack(data: bytes) -> Rollout:
    """The rollout that `pack` wrote."""
    generations, rest = unpack_chain(data)
    rest |= {"effort": Effort(**rest["effort"]), "transcript": tuple(rest["transcript"])}
    return Rollout(**rest, generations=generations)


def pack_chain(generations: Sequence[Generation], rest: Mapping[str, Any]) -> bytes:
    """Generations as safetensors, with something else as JSON in the metadata."""
    arrays = {
        f"{number}.{field.name}": np.ascontiguousarray(getattr(link, field.name))
        for number, link in enumerate(generations)
        for field in dataclasses.fields(link)
    }
    return save(arrays, metadata={"rest": json.dumps(rest, default=dict)})


def unpack_chain(data: bytes) -> tuple[tuple[Generation, ...], dict[str, Any]]:
    """What `pack_chain` was given."""
    (length,) = struct.unpack("<Q", data[:8])
    rest = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["rest"])
    arrays, names = load(data), [field.name for field in dataclasses.fields(Generation)]
    links = (
        {name: arrays[f"{i}.{name}"] for name in names} for i in range(len(arrays) // len(names))
    )
    return tuple(Generation(**link) for link in links), rest
