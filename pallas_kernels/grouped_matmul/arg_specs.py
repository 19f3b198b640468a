"""Arguments that tests and the benchmark run the grouped matmul on."""

from typing import NamedTuple

import numpy as np


class ArgSpec(NamedTuple):
    """Rows, features and the sizes of the groups."""

    rows: int
    k: int
    n: int
    group_sizes: tuple[int, ...]

    def arrays(self, seed: int = 0, *, octaves: int = 0) -> tuple[np.ndarray, ...]:
        """F32 lhs, rhs and gradient of the result, standard normal; int32 group sizes.

        With ``octaves``, slices along every axis get factors of up to 2**octaves in either
        direction: to MXFP8, blocks along different axes of normal numbers look almost the same.
        """
        rng = np.random.default_rng(seed)
        shapes = (self.rows, self.k), (len(self.group_sizes), self.k, self.n), (self.rows, self.n)
        arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
        for x in arrays:
            for axis, size in enumerate(x.shape):
                powers = rng.integers(-octaves, octaves, size, endpoint=True)
                x *= np.exp2(np.float32(powers)).reshape(-1, *(1,) * (x.ndim - 1 - axis))
        return *arrays, np.array(self.group_sizes, np.int32)


BENCH = ArgSpec(4096, 1024, 1024, (600, 500, 0, 700, 300, 900, 596, 500))
AOT = {  # an expert's projections at the size of DeepSeek-V3; compiled for chips, not run
    name: ArgSpec(8192, k, n, (2000, 900, 0, 1500, 800, 1300, 700, 900))
    for name, (k, n) in {"gate and up": (7168, 2 * 2048), "down": (2048, 7168)}.items()
}
TESTS = {  # one shape, so that tests compile one program for all
    name: ArgSpec(392, 96, 160, group_sizes)
    for name, group_sizes in {
        "ragged, some rows left": (0, 7, 0, 121, 128, 1, 0),
        "short": (3, 1, 30, 2, 5, 0, 4),
        "one owns all": (0, 0, 0, 392, 0, 0, 0),
        "all empty": (0,) * 7,
        "whole blocks": (128, 0, 0, 128, 32, 96, 8),
    }.items()
}
