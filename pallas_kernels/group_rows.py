"""Groups of rows one after another, such as the tokens of every expert."""

import jax
import jax.numpy as jnp


def pad(x: jax.Array, group_sizes: jax.Array, multiple: int) -> tuple[jax.Array, jax.Array]:
    """Fills every group up with zero rows, to a multiple of ``multiple`` rows.

    Args:
      x: [rows, features], the groups one after another. Rows behind the last group are ignored,
        whatever they hold.
      group_sizes: int32 [group], not negative, at most ``rows`` in total.
      multiple: of rows.

    Returns:
      The padded groups, [multiple * (rows // multiple + group), features], zeros behind the last;
      and their sizes, int32 [group], multiples of ``multiple``.
    """
    rows, groups = x.shape[0], group_sizes.shape[0]
    padded = -(-group_sizes // multiple) * multiple
    end, padded_end = jnp.cumsum(group_sizes), jnp.cumsum(padded)
    row = jnp.arange((rows // multiple + groups) * multiple)
    group = jnp.searchsorted(padded_end, row, side="right")
    source = row + jnp.take(end - group_sizes - padded_end + padded, group, mode="clip")
    filled = (group < groups) & (source < jnp.take(end, group, mode="clip"))
    source = jnp.where(filled, source, rows)
    return x.at[source].get(mode="fill", fill_value=0), padded
