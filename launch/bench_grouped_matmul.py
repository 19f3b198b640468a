"""Grouped matmul 4096 x 1024 x 1024 with 8 groups, one of them empty.

The peer is `jax.lax.ragged_dot`, in the same program otherwise: on both sides every device holds
all rows and an equal share of the columns of the matrices.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from launch.bench_case import Case, Step, timed
from pallas_kernels.grouped_matmul import arg_specs

SPEC = arg_specs.BENCH
PEER, UNIT, SAME_WORK = "jax.lax.ragged_dot", "GFLOP", False
PRODUCTS = {"forward": 1, "gradients": 2}


def cases(dtypes: Sequence[str]) -> dict[str, Case]:
    """Two cases per precision: the product, and both of its gradients."""
    return {
        f"{dtype} {what}": Case(
            partial(_prepare, dtype, what, peer=False),
            partial(_prepare, dtype, what, peer=True),
            products * 2e-9 * SPEC.rows * SPEC.k * SPEC.n,
        )
        for dtype in dtypes
        for what, products in PRODUCTS.items()
    }


def _prepare(dtype: str, what: str, *, peer: bool) -> Step:
    import jax

    from c2.parallel import mesh as meshes
    from pallas_kernels.grouped_matmul import grouped_matmul

    product = jax.lax.ragged_dot if peer else grouped_matmul

    def forward(lhs, rhs, d_out, group_sizes):
        return product(lhs, rhs, group_sizes)

    def gradients(lhs, rhs, d_out, group_sizes):
        _, pullback = jax.vjp(lambda lhs, rhs: product(lhs, rhs, group_sizes), lhs, rhs)
        d_lhs, d_rhs = pullback(d_out)
        return jax.lax.psum(d_lhs, "data"), d_rhs

    spec = jax.sharding.PartitionSpec
    whole, columns, matrices = spec(), spec(None, "data"), spec(None, None, meshes.DATA)
    mesh, in_specs = meshes.data_mesh(), (whole, matrices, columns, whole)
    f, out_specs = {
        "forward": (forward, columns),
        "gradients": (gradients, (whole, matrices)),
    }[what]
    # check_vma off: the sum over devices is the explicit psum above
    run = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )
    *floats, group_sizes = SPEC.arrays()
    arrays = (*(x.astype(np.dtype(dtype)) for x in floats), group_sizes)
    args = jax.device_put(arrays, tuple(jax.sharding.NamedSharding(mesh, s) for s in in_specs))
    return timed(lambda: jax.block_until_ready(run(*args)))
