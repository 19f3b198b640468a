"""Metrics of a run: one JSON object a line for programs, TensorBoard events for people.

``metrics.jsonl`` holds a step at most once, also after a crash: a run that resumes first calls
:meth:`MetricsLog.rewind`. JSON has neither NaN nor infinity: they are written as ``null`` and read
back as NaN.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import numpy as np

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

_LOG = logging.getLogger(__name__)


class MetricsLog:
    """Writes ``metrics.jsonl`` and ``tensorboard/`` in the directory of a run.

    Args:
        directory: Created by the first write. Lines that are already there are kept.
        mute: Whether nothing is written, since another process of the run does it.
    """

    def __init__(self, directory: str | Path, *, mute: bool = False):
        self.path = Path(directory) / "metrics.jsonl"
        self._mute = mute
        self._file: TextIO | None = None
        self._events: SummaryWriter | None = None

    def rewind(self, step: int = sys.maxsize) -> None:
        """Forgets the lines after ``step`` (-1: all of them) and mends a torn last line.

        The file is replaced by a rename, so that a crash leaves either the old or the new one.
        """
        if self._mute:
            return
        # Imported late: it imports torch, for seconds, where that happens to be installed.
        from tensorboardX import SummaryWriter

        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_rows(self.path) if self.path.exists() else []
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        purge = step + 1 if step < sys.maxsize else None  # TensorBoard hides older events from here
        self._events = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one line; it has left this process when the call returns.

        Args:
            step: Global step; a step is written once.
            metrics: Name -> number, string or array. Arrays become nested lists in the file;
                TensorBoard gets the numbers only.
        """
        if self._mute:
            return
        if self._file is None:
            self.rewind()
        row = {"step": step} | {name: _plain(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if not isinstance(value, str) and np.ndim(value) == 0:
                self._events.add_scalar(name, float(value), step)
        self._events.flush()

    def close(self) -> None:
        """Closes both files; a later write opens them again."""
        if self._file is not None:
            self._file.close()
            self._events.close()
        self._file = self._events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; one that a crash tore is left out with a warning."""
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            row["step"]
        except (ValueError, KeyError, TypeError):
            _LOG.warning("%s: line %d is not a complete line of metrics; left out", path, number)
        else:
            rows.append(row)
    return rows


def read_columns(path: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The file by metric: name -> (steps int64 [n], values [n, ...]), where it was written.

    Values are float64 (``null`` is NaN), or strings (dtype object).
    """
    columns: dict[str, tuple[list[int], list[Any]]] = {}
    for row in read_rows(path):
        for name, value in row.items():
            steps, values = columns.setdefault(name, ([], []))
            steps.append(row["step"])
            values.append(value)
    return {name: (np.array(steps), _array(values)) for name, (steps, values) in columns.items()}


def _array(values: list[Any]) -> np.ndarray:
    # Strings as objects: numpy's own fixed-width strings lose trailing NUL characters.
    return np.array(values, object if isinstance(values[0], str) else np.float64)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":  # bfloat16 and its like
        array = array.astype(np.float32)
    return _legal(array.tolist())


def _legal(value: Any) -> Any:
    if isinstance(value, list):
        return [_legal(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
