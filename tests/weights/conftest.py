"""A small model that trains by itself, and a store that fails on demand."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from c2.weights.shards import Part, Want
from c2.weights.store import Store, open_store

SHAPES = {"a": (5, 7), "b": (9,), "empty": (0, 3), "scalar": (), "z": (3, 2, 4)}
DTYPES = {"a": "bfloat16", "b": "float32", "empty": "bfloat16", "scalar": "float32", "z": "uint8"}


class Trainer:
    """States of a model in several storage types, one per step."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._masters = {name: self._rng.normal(0, 0.02, s) for name, s in SHAPES.items()}
        self.step = 0

    def train(self) -> dict[str, np.ndarray]:
        """The weights after one more step."""
        self.step += 1
        state = {}
        for name, values in self._masters.items():
            moved = values + 1e-4 * self._rng.choice([-1, 0, 1], values.shape)
            self._masters[name] = moved
            if DTYPES[name] == "uint8":
                moved = np.abs(moved * 1000).astype(np.uint8)
            state[name] = np.asarray(moved).astype(np.dtype(DTYPES[name]))
        return state


def parts(state: dict[str, np.ndarray], cuts: list[float], rank: int) -> dict[str, Part]:
    """A rank's rows of everything; ``cuts`` are shares of the leading axis, ascending."""
    mine = {}
    for name, values in state.items():
        if values.shape == ():
            if rank == 0:
                mine[name] = Part(values)
            continue
        start, stop = bounds(len(values), cuts, rank)
        mine[name] = Part(values[start:stop], start, len(values))
    return mine


def bounds(rows: int, cuts: list[float], rank: int) -> tuple[int, int]:
    """First row of a rank and the row after its last."""
    borders = [0, *(round(cut * rows) for cut in cuts), rows]
    return borders[rank], borders[rank + 1]


def wanted(cuts: list[float], rank: int) -> dict[str, Want]:
    """What a reader of such a share asks for."""
    return {
        name: Want(DTYPES[name], shape, *(bounds(shape[0], cuts, rank) if shape else ()))
        for name, shape in SHAPES.items()
    }


def same(tensors: dict[str, np.ndarray], state: dict[str, np.ndarray], cuts, rank) -> bool:
    """Whether a reader's rows are those of a state, bit for bit."""
    for name, values in state.items():
        start, stop = bounds(len(values), cuts, rank) if values.shape else (None, None)
        rows = values[start:stop] if values.shape else values
        held = tensors[name]
        if (held.dtype, held.shape, held.tobytes()) != (rows.dtype, rows.shape, rows.tobytes()):
            return False
    return len(tensors) == len(state)


class Flaky:
    """A store whose operations fail when they are told to.

    Attributes:
      countdown: operations until the next failure; None for none.
      lost: whether the failing operation is done all the same, and only its answer is lost.
      count: operations so far.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.countdown, self.lost, self.count = None, False, 0

    def _run(self, operation, *args):
        self.count += 1
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.countdown = None
                if self.lost:
                    operation(*args)
                raise OSError("the network is down")
        return operation(*args)

    def read(self, name, start=None, stop=None):
        return self._run(self._store.read, name, start, stop)

    def write(self, name, data):
        return self._run(self._store.write, name, data)

    def create(self, name, data):
        return self._run(self._store.create, name, data)

    def names(self, folder):
        return self._run(self._store.names, folder)

    def remove(self, name):
        return self._run(self._store.remove, name)

    def sweep(self):
        return self._run(self._store.sweep)


_numbers = itertools.count()


@pytest.fixture(scope="session")
def new_store():
    """Opens an empty store in memory."""
    return lambda: open_store(f"memory://weights-{next(_numbers)}")


@pytest.fixture(scope="session")
def toy():
    """The names of this file."""
    return SimpleNamespace(Trainer=Trainer, parts=parts, wanted=wanted, same=same, Flaky=Flaky)
