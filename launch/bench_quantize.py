"""Rounding of a bfloat16 matrix of 4096 x 4096 to MXFP8 and NVFP4.

The peer is torchao under `torch.compile`: `to_mx` with RCEIL scales, and the two-level
`nvfp4_quantize`. Its outer scale belongs to the tensor, ours to each token; both include the
maximum that it needs.
"""

import importlib.util
import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from launch.bench_case import Case, Step, timed
from pallas_kernels.mxfp8 import arg_specs

SHAPE = arg_specs.BENCH.shape
PEER, UNIT, SAME_WORK = "torchao", "elements", False


def cases(dtypes: Sequence[str]) -> dict[str, Case]:
    """A case per format; none without bfloat16."""
    for name in ("torch", "torchao"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"no module named {name!r}")
    formats = ("mxfp8", "nvfp4") if "bfloat16" in dtypes else ()
    return {
        name: Case(partial(_ours, name), partial(_peer, name), SHAPE[0] * SHAPE[1])
        for name in formats
    }


def _ours(name: str) -> Step:
    import jax

    from c2.parallel import mesh as meshes
    from pallas_kernels import mxfp8, nvfp4

    quantize = {"mxfp8": mxfp8.quantize, "nvfp4": nvfp4.quantize}[name]
    mesh = meshes.data_mesh()
    rows = jax.sharding.PartitionSpec("data")
    run = jax.jit(jax.shard_map(quantize, mesh=mesh, in_specs=rows, out_specs=rows))
    x = meshes.place(arg_specs.normal(SHAPE, arg_specs.BENCH.dtype), mesh)
    return timed(lambda: jax.block_until_ready(run(x)))


def _peer(name: str) -> Step:
    import torch
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

    def mxfp8(x):
        return mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, mx_tensor.ScaleCalculationMode.RCEIL)

    def nvfp4(x):
        scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max().float())
        return nvfp4_tensor.nvfp4_quantize(x, 16, scale)

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    quantize = torch.compile({"mxfp8": mxfp8, "nvfp4": nvfp4}[name])
    x = torch.from_numpy(arg_specs.normal(SHAPE, np.float32)).bfloat16()
    return timed(lambda: quantize(x))
