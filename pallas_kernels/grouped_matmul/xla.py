"""The two grouped products in plain XLA: the CPU path.

A loop over the groups, and inside it one over blocks of rows. Blocks have a fixed shape, whatever
the sizes of groups and arrays, so a row's result does not depend on its company. A group's last
block overlaps the next group; its foreign rows are computed and not stored. All arithmetic is f32,
in which products of bf16 numbers are exact; on most CPUs a bf16 matmul would convert anyway.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.stored_bits import from_bits, to_bits

ROWS = 128  # of a block: more waste work at the ends of groups, fewer reuse a matrix less


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dtype: jnp.dtype,
    *,
    transposed: bool = False,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Every row times the matrix of its group; zeros behind the last group.

    Args:
      lhs: [rows, k].
      rhs: [group, k, n], or [group, n, k] if ``transposed``.
      group_sizes: int32 [group].
      dtype: of the result.
      transposed: the order of the axes of ``rhs``.
      scales: f32 [rows] and [group, n]; their outer product multiplies the f32 sums.

    Returns:
      [rows, n].
    """
    rows = lhs.shape[0]
    left, right = to_bits(_at_least_a_block(lhs)), to_bits(rhs)
    if scales is not None:
        row_scales, column_scales = _at_least_a_block(scales[0]), scales[1]
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes

    def group(g, out):
        matrix = _floats(_pick(right, g), rhs.dtype)
        matrix = matrix.T if transposed else matrix

        def block(i, out):
            first, mine = _window(starts[g] + i * ROWS, ends[g], len(out))
            product = _dot(_floats(_rows(left, first), lhs.dtype), matrix)
            if scales is not None:
                product = product * _rows(row_scales, first)[:, None] * column_scales[g]
            merged = jnp.where(mine, to_bits(product.astype(dtype)), _rows(out, first))
            return jax.lax.dynamic_update_slice_in_dim(out, merged, first, 0)

        return jax.lax.fori_loop(0, -(-group_sizes[g] // ROWS), block, out)

    empty = to_bits(jnp.zeros((len(left), rhs.shape[1 if transposed else 2]), dtype))
    out = jax.lax.fori_loop(0, len(right), group, empty)
    return from_bits(out, dtype)[:rows]


def weight_gradient(
    lhs: jax.Array, d_out: jax.Array, group_sizes: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Per group, the sum over its rows of ``outer(lhs[r], d_out[r])``; zeros for empty groups.

    Args:
      lhs: [rows, k].
      d_out: [rows, n].
      group_sizes: int32 [group].
      dtype: of the result.

    Returns:
      [group, k, n].
    """
    left, right = (to_bits(_at_least_a_block(x)) for x in (lhs, d_out))
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes

    def group(g):
        def block(i, total):
            first, mine = _window(starts[g] + i * ROWS, ends[g], len(left))
            # both sides: zero times a neighbour's NaN would be NaN
            x = jnp.where(mine, _floats(_rows(left, first), lhs.dtype), 0)
            dy = jnp.where(mine, _floats(_rows(right, first), d_out.dtype), 0)
            # transposed in memory: XLA:CPU has no fast matmul for a transposed left side
            return total + _dot(jax.lax.optimization_barrier(x.T), dy)

        empty = jnp.zeros((lhs.shape[1], d_out.shape[1]), jnp.float32)
        total = jax.lax.fori_loop(0, -(-group_sizes[g] // ROWS), block, empty)
        return to_bits(total.astype(dtype))

    return from_bits(jax.lax.map(group, jnp.arange(len(group_sizes))), dtype)


def _window(start: jax.Array, end: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """First row of the block for rows from ``start``, and which of its rows are in [start, end).

    The block lies within the array, so it may begin before ``start``.
    """
    first = jnp.minimum(start, rows - ROWS)
    row = first + jnp.arange(ROWS)
    return first, ((row >= start) & (row < end))[:, None]


def _at_least_a_block(x: jax.Array) -> jax.Array:
    missing = max(0, ROWS - len(x))
    return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) if missing else x


def _floats(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """F32 numbers from `to_bits` of an array of this dtype."""
    return from_bits(bits, dtype).astype(jnp.float32)


def _pick(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _rows(x: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, ROWS)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
