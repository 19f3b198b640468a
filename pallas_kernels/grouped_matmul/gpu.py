"""The two grouped products on NVIDIA GPUs: everything but how a chip multiplies.

A program computes one tile of a result: the rows of one visit, or features of one group. It sums
over blocks of k, or of the group's rows, while the next blocks are on their way into shared memory.
Two or more programs fit onto a multiprocessor, so that one stores while another multiplies. Where a
tile of rows is shared by groups, every visit multiplies all of it and stores the rows of its group.

No GPU has run this yet. That it compiles for one says nothing about memory order; jax's
interpreter, from jax 0.12 on, checks values and races of kernels that multiply bf16 or plain FP8.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registers
from pallas_kernels.grouped_matmul.visits import ROWS, visits

TILE = ROWS  # rows of a tile of the result, and columns if the operand does not say otherwise
_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


class Operand(NamedTuple):
    """An operand as the kernels read it. Features are the rows of a left one, columns of a right.

    Attributes:
      values: [..., features, summed] or [..., summed, features].
      axis: which of these two axes is summed over, 1 or 0.
      depth: elements of that axis that a step multiplies.
      scales: of blocks, if any: [..., tile of features, block, ...], equally many for every step.
      tile: features of a tile.
    """

    values: jax.Array
    axis: int
    depth: int
    scales: jax.Array | None = None
    tile: int = TILE

    @property
    def features(self) -> int:
        """How many rows or columns."""
        return self.values.shape[-1 - self.axis]

    @property
    def summed(self) -> int:
        """How many elements a product sums over."""
        return self.values.shape[self.axis - 2]

    @property
    def arrays(self) -> list[jax.Array]:
        """Values and scales."""
        return [self.values] if self.scales is None else [self.values, self.scales]

    def blocks(self, tile: jax.Array, begin: jax.Array | int) -> list[plgpu.BlockSpec]:
        """Which blocks of `arrays` the steps read: those of the tile, from step ``begin`` on."""

        def values(i):
            return (tile, begin + i) if self.axis == 1 else (begin + i, tile)

        def scales(i):
            return tile, begin + i, *(0,) * len(rest)

        shape = (self.tile, self.depth) if self.axis == 1 else (self.depth, self.tile)
        # a block is in use until the step behind it waits for its product
        specs = [plgpu.BlockSpec(shape, values, delay_release=1)]
        if self.scales is not None:
            _, blocks, *rest = self.scales.shape[self.values.ndim - 2 :]
            shape = 1, blocks * self.depth // self.summed, *rest
            specs.append(plgpu.BlockSpec(shape, scales, delay_release=1))
        return specs


class Chip(NamedTuple):
    """How a chip multiplies.

    Attributes:
      accumulate: (lhs, rhs, steps, refs of their arrays, blocks of these) -> f32 [rows, columns]
        of a tile: the sum over the steps, zeros if there are none.
      layout: of that sum in registers.
    """

    accumulate: Callable[..., jax.Array]
    layout: plgpu.Layout


def matmul(
    chip: Chip,
    lhs: Operand,
    rhs: Operand,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
    scales: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.xla.matmul`. The values of ``rhs`` are [group, ...].

    Raises:
      NotImplementedError: if tiles and steps do not divide the shapes. Rows need only come in
        eights.
    """
    rows, n, k, groups = lhs.features, rhs.features, lhs.summed, len(rhs.values)
    multiples = 8, lhs.depth, rhs.tile
    if not rows or any(size % by for size, by in zip((rows, k, n), multiples, strict=True)):
        raise NotImplementedError(f"rows, k, n = {rows, k, n}: positive multiples of {multiples}")
    plan = visits(group_sizes, rows)
    operands = [*lhs.arrays, *rhs.arrays]
    if scales is not None:
        row_scales, column_scales = scales
        row_scales = jnp.pad(row_scales, (0, -rows % TILE))
        grouped = jnp.arange(len(row_scales)) < group_sizes.sum()
        # behind the last group they may be NaN, which zero sums would not survive
        operands += [jnp.where(grouped, row_scales, 0), column_scales]

    def kernel(group, tile, begin, end, *refs):
        *inputs, out = refs
        visit, column = jax.lax.axis_index("visit"), jax.lax.axis_index("column")
        here = tile[visit] * TILE
        first = jnp.maximum(begin[visit] - here, 0)
        count = jnp.minimum(end[visit] - here, TILE) - first
        columns = pl.ds(column * rhs.tile, rhs.tile)

        @pl.when(count > 0)
        def _():
            owner = jnp.minimum(group[visit], groups - 1)
            split = len(lhs.arrays)
            matrix = [ref.at[owner] for ref in inputs[split : split + len(rhs.arrays)]]
            steps = jnp.where(group[visit] < groups, k // lhs.depth, 0)
            blocks = [*lhs.blocks(tile[visit], 0), *rhs.blocks(column, 0)]
            total = chip.accumulate(lhs, rhs, steps, [*inputs[:split], *matrix], blocks)
            if scales is not None:
                vectors = inputs[-2].at[pl.ds(here, TILE)], inputs[-1].at[owner, columns]
                for axis, vector in enumerate(vectors):
                    vector = registers.load(vector, chip.layout.reduce(1 - axis))
                    total *= registers.spread(vector, total.shape, (axis,), chip.layout)

            def store(tile_ref):
                tile_ref[...] = total.astype(dtype)
                plgpu.commit_smem()
                _store_rows(tile_ref, out.at[:, columns], here, first, count)

            pl.run_scoped(store, plgpu.SMEM(total.shape, dtype))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, n), dtype),
        grid=(len(plan.group), n // rhs.tile),
        grid_names=("visit", "column"),
        compiler_params=_PARAMS,
    )(*plan, *operands)


def _store_rows(
    tile_ref: jax.Ref, out: jax.Ref, here: jax.Array, first: jax.Array, count: jax.Array
) -> None:
    """Copies ``count`` rows, from ``first`` on, of the tile of rows ``here`` and following.

    The shapes of copies are static: there is one for every binary digit that ``count`` may have.
    """
    for digit in reversed(range(TILE.bit_length())):
        size = 1 << digit

        @pl.when(count & size != 0)
        def _(size=size, first=first):
            source = tile_ref.at[pl.ds(first, size)]
            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(here + first, size)])

        first += count & size
    plgpu.wait_smem_to_gmem(0)


def weight_gradient(
    chip: Chip, lhs: Operand, d_out: Operand, group_sizes: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.xla.weight_gradient`.

    Sizes must be multiples of `TILE`, and the rows that fill groups up zeros.

    Raises:
      NotImplementedError: if tiles do not divide the shapes.
    """
    rows, k, n, groups = lhs.summed, lhs.features, d_out.features, len(group_sizes)
    multiples = TILE, lhs.tile, d_out.tile
    if any(size % by for size, by in zip((rows, k, n), multiples, strict=True)):
        raise NotImplementedError(f"rows, k, n = {rows, k, n}: multiples of {multiples}")
    counts = group_sizes // lhs.depth

    def kernel(begin, count, *refs):
        *inputs, out = refs
        group, feature, column = map(jax.lax.axis_index, ("group", "feature", "column"))
        blocks = [*lhs.blocks(feature, begin[group]), *d_out.blocks(column, begin[group])]
        total = chip.accumulate(lhs, d_out, count[group], inputs, blocks)

        def store(tile_ref):
            tile_ref[...] = total.astype(dtype)
            plgpu.commit_smem()
            here = pl.ds(feature * lhs.tile, lhs.tile), pl.ds(column * d_out.tile, d_out.tile)
            plgpu.copy_smem_to_gmem(tile_ref, out.at[group, *here])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(store, plgpu.SMEM(total.shape, dtype))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((groups, k, n), dtype),
        grid=(groups, k // lhs.tile, n // d_out.tile),
        grid_names=("group", "feature", "column"),
        compiler_params=_PARAMS,
    )(jnp.cumsum(counts) - counts, counts, *lhs.arrays, *d_out.arrays)
