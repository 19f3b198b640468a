"""Arguments that tests and the benchmark run MXFP8 on."""

from typing import NamedTuple

import ml_dtypes
import numpy as np


class ArgSpec(NamedTuple):
    """Shape and dtype of ``x``, and the axis of its blocks."""

    shape: tuple[int, ...]
    dtype: type
    axis: int


BENCH = ArgSpec((4096, 4096), ml_dtypes.bfloat16, -1)
TESTS = (
    ArgSpec((40, 160), ml_dtypes.bfloat16, -1),
    ArgSpec((40, 160), np.float32, -1),
    ArgSpec((96, 40), ml_dtypes.bfloat16, 0),
    ArgSpec((96, 40), np.float32, 0),
    ArgSpec((2, 3, 64), ml_dtypes.bfloat16, -1),
    ArgSpec((2, 64, 3), ml_dtypes.bfloat16, -2),
    ArgSpec((0, 32), np.float32, -1),
)


def normal(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Standard normal numbers, what activations behind a norm look like."""
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def wild(shape: tuple[int, ...], dtype: type, seed: int = 0) -> np.ndarray:
    """Finite numbers of every size, subnormal ones and zeros of both signs included.

    Rows differ in size most, numbers of a row by up to 2**12.
    """
    rng = np.random.default_rng(seed)
    powers = rng.uniform(-150, 115, (*shape[:-1], 1)) + rng.integers(-6, 7, shape)
    signs = rng.choice([-1, -0.0, 0, 1], size=shape, p=[0.45, 0.05, 0.05, 0.45])
    x = rng.uniform(1, 2, size=shape) * np.exp2(powers) * signs
    return x.astype(np.float32).astype(dtype)
