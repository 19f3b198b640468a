"""Which rows of which tensors a rank holds, on either side."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """A writer's rows of one tensor.

    Attributes:
      values: [rows, ...], or [] for a scalar; anything that `numpy.asarray` takes.
      start: the tensor's row that they begin with.
      rows: of the whole tensor; None if they are all.
    """

    values: np.ndarray
    start: int = 0
    rows: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = tuple(self.values.shape)
        return shape if self.rows is None else (self.rows, *shape[1:])


class Want(NamedTuple):
    """A reader's rows of one tensor.

    Attributes:
      dtype: name of the storage type, of the whole tensor.
      shape: of the whole tensor.
      start: first row.
      stop: row after the last one; None for the end, ``start`` for no rows at all.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int | None = None

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of the wanted rows."""
        if not self.shape:
            return ()
        stop = self.shape[0] if self.stop is None else self.stop
        return (stop - self.start, *self.shape[1:])

    @property
    def flat(self) -> tuple[int, int]:
        """The wanted elements [start, stop) of the flat tensor."""
        start = self.start * int(np.prod(self.shape[1:], dtype=np.int64))
        return start, start + int(np.prod(self.held, dtype=np.int64))


def whole(tensors: Mapping[str, np.ndarray]) -> dict[str, Part]:
    """All of every tensor."""
    return {name: Part(values) for name, values in tensors.items()}


def wants(tensors: Mapping[str, np.ndarray]) -> dict[str, Want]:
    """All of tensors in the form of these; `jax.ShapeDtypeStruct`s will do."""
    return {name: Want(str(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
