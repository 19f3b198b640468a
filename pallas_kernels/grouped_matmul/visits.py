"""Which groups have rows in which tiles of rows: the order in which kernels work."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS = 128  # of a tile


class Visits(NamedTuple):
    """Int32 [visit] each; surplus visits at the end cover no rows.

    Attributes:
      group: the group; the number of groups for rows behind the last.
      tile: the tile of rows.
      begin: the first of the group's rows, in whichever tile.
      end: the row behind its last.
    """

    group: jax.Array
    tile: jax.Array
    begin: jax.Array
    end: jax.Array


def visits(group_sizes: jax.Array, rows: int) -> Visits:
    """Lists which groups have rows in which tiles, each group at least once, every tile too."""
    groups, tiles = len(group_sizes), pl.cdiv(rows, ROWS)
    ends = jnp.append(jnp.cumsum(group_sizes), rows)  # rows behind the last group are one more
    begins = jnp.append(0, ends[:-1])
    first = jnp.minimum(begins // ROWS, tiles - 1)
    last = jnp.maximum((ends - 1) // ROWS, first)
    behind = jnp.cumsum(last - first + 1)  # visits up to and including those of the group

    visit = jnp.arange(tiles + groups + 1)
    group = jnp.minimum(jnp.searchsorted(behind, visit, side="right"), groups)
    tile = jnp.minimum(visit - behind[group] + last[group] + 1, tiles - 1)
    end = jnp.where(visit < behind[groups], ends[group], begins[group])
    found = group, tile, begins[group], end
    return Visits(*(x.astype(jnp.int32) for x in found))
