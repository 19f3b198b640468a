"""Arguments that tests and the benchmark run NVFP4 on."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.mxfp8.arg_specs import normal, wild
from pallas_kernels.nvfp4 import reference

__all__ = ["BENCH", "TESTS", "ArgSpec", "near_ties", "normal", "wild"]


class ArgSpec(NamedTuple):
    """Shape and dtype of ``x``, and what an outer scale belongs to."""

    shape: tuple[int, ...]
    dtype: type
    scale: str


BENCH = ArgSpec((4096, 4096), ml_dtypes.bfloat16, "token")
TESTS = (
    ArgSpec((40, 96), ml_dtypes.bfloat16, "token"),
    ArgSpec((40, 96), np.float32, "token"),
    ArgSpec((40, 96), ml_dtypes.bfloat16, "tensor"),
    ArgSpec((40, 96), np.float32, "tensor"),
    ArgSpec((2, 64, 32), ml_dtypes.bfloat16, "token"),
    ArgSpec((2, 64, 32), np.float32, "tensor"),
    ArgSpec((2, 3, 32), ml_dtypes.bfloat16, "token"),
    ArgSpec((32,), np.float32, "token"),
    ArgSpec((0, 32), np.float32, "token"),
)


def near_ties(tokens: int, n: int, seed: int = 0) -> np.ndarray:
    """F32 [tokens, n] whose quotients x / fl(s * g) lie within 3 units of a tie, on either side.

    Only the first element of each block is random: it is the largest and fixes the scales.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.normal(size=(tokens, n // 16, 16)).astype(np.float32)
    blocks *= np.exp2(rng.integers(-40, 40, size=(tokens, 1, 1))).astype(np.float32)
    blocks[..., 0] = np.abs(blocks).max(-1)
    blocks[..., 1:] = 0
    _, scales, g = reference.quantize(blocks.reshape(tokens, n))
    d = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * g[:, None]
    ties = rng.choice(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]), (*d.shape, 15))
    near = (ties * d[..., None]).view(np.int32) + rng.integers(-3, 4, ties.shape, dtype=np.int32)
    blocks[..., 1:] = near.view(np.float32) * rng.choice(np.float32([-1, 1]), ties.shape)
    return blocks.reshape(tokens, n)
