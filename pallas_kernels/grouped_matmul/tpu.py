"""The two grouped products as Pallas kernels for TPUs.

A program works on one visit: one tile of rows and one group that has rows in it. Visits are in
order, so those of one tile, or of one group, follow each other while its result stays on the chip.
A program sums over all of k, or over the rows of its visit; there is no tiling of k.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.visits import ROWS, Visits, visits

COLUMNS = 256  # of a tile
_VMEM = 12 << 20  # bytes for the tiles of a program, of the 16 MiB that smaller chips let it have


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    transposed: bool = False,
    scales: tuple[jax.Array, jax.Array] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.xla.matmul`."""
    rows, k = lhs.shape
    n = rhs.shape[1 if transposed else 2]
    columns = min(n, COLUMNS)
    tiles = 2 * (ROWS + columns) * k * lhs.dtype.itemsize  # two of each: one loads, one is in use
    if not (rows and n and 0 < tiles <= _VMEM):
        raise NotImplementedError(
            f"rows, k, n = {rows, k, n}: must not be empty, and tiles of {tiles} bytes for all of "
            f"k must fit into {_VMEM}"
        )
    plan = _plan(group_sizes, rows)

    def kernel(group, tile, begin, end, lhs_ref, rhs_ref, *refs):
        v, out_ref = pl.program_id(1), refs[-1]

        @pl.when((v == 0) | (tile[v] != tile[jnp.maximum(v - 1, 0)]))
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        @pl.when(end[v] > begin[v])
        def _():
            product = _dot(lhs_ref[...], rhs_ref[0], (1, 1 if transposed else 0))
            if scales is not None:
                product = product * refs[0][...] * refs[1][0]
            mine = _mine(tile[v], begin[v], end[v])
            out_ref[...] = jnp.where(mine, product.astype(dtype), out_ref[...])

    here = pl.BlockSpec((ROWS, columns), lambda j, v, group, tile, *_: (tile[v], j))
    operands = [lhs, rhs]
    specs = [
        pl.BlockSpec((ROWS, k), lambda j, v, group, tile, *_: (tile[v], 0)),
        pl.BlockSpec((1, columns, k), lambda j, v, group, *_: (group[v], j, 0))
        if transposed
        else pl.BlockSpec((1, k, columns), lambda j, v, group, *_: (group[v], 0, j)),
    ]
    if scales is not None:
        operands += [scales[0][:, None], scales[1][:, None]]
        specs += [
            pl.BlockSpec((ROWS, 1), lambda j, v, group, tile, *_: (tile[v], 0)),
            pl.BlockSpec((1, 1, columns), lambda j, v, group, *_: (group[v], 0, j)),
        ]
    grid = (pl.cdiv(n, columns), len(plan.group))
    out = jax.ShapeDtypeStruct((rows, n), dtype)
    return _call(kernel, grid, specs, here, out, interpret)(*plan, *operands)


def weight_gradient(
    lhs: jax.Array,
    d_out: jax.Array,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.xla.weight_gradient`."""
    (rows, k), n = lhs.shape, d_out.shape[1]
    features, columns = min(k, COLUMNS), min(n, COLUMNS)
    plan = _plan(group_sizes, rows)

    def kernel(group, tile, begin, end, lhs_ref, d_out_ref, out_ref):
        v = pl.program_id(2)

        @pl.when((v == 0) | (group[v] != group[jnp.maximum(v - 1, 0)]))
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        @pl.when(end[v] > begin[v])
        def _():
            mine = _mine(tile[v], begin[v], end[v])
            # both sides: zero times a neighbour's NaN would be NaN
            x, dy = (jnp.where(mine, ref[...], 0) for ref in (lhs_ref, d_out_ref))
            out_ref[0] += _dot(x, dy, (0, 0))

    specs = [
        pl.BlockSpec((ROWS, features), lambda i, j, v, group, tile, *_: (tile[v], i)),
        pl.BlockSpec((ROWS, columns), lambda i, j, v, group, tile, *_: (tile[v], j)),
    ]
    here = pl.BlockSpec((1, features, columns), lambda i, j, v, group, *_: (group[v], i, j))
    grid = (pl.cdiv(k, features), pl.cdiv(n, columns), len(plan.group))
    out = jax.ShapeDtypeStruct((len(group_sizes), k, n), jnp.float32)
    return _call(kernel, grid, specs, here, out, interpret)(*plan, lhs, d_out).astype(dtype)


def _plan(group_sizes: jax.Array, rows: int) -> Visits:
    """Visits; those of rows behind the last group count as empty ones of that group."""
    plan, last = visits(group_sizes, rows), len(group_sizes) - 1
    end = jnp.where(plan.group > last, plan.begin, plan.end)
    return plan._replace(group=jnp.minimum(plan.group, last), end=end)


def _call(kernel, grid, in_specs, out_spec, out_shape, interpret):
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(Visits._fields),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_spec,
        ),
        interpret=interpret,  # by XLA: TPU interpretation through callbacks can hang on one core
    )


def _mine(tile: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
    row = tile * ROWS + jax.lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
    return (row >= begin) & (row < end)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Sums over one axis of each, f32 numbers in full precision."""
    full = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = ((axes[:1], axes[1:]), ((), ()))
    return jax.lax.dot_general(a, b, contracted, full, preferred_element_type=jnp.float32)
