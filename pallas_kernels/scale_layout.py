"""The order in which Blackwell's tensor cores read block scales."""

import jax
import jax.numpy as jnp

ROWS, COLUMNS = 128, 4  # of a tile: 512 consecutive bytes, 16 of them per 32 rows


def swizzle(scales: jax.Array) -> jax.Array:
    """Reorders scales [..., rows, blocks] into tiles of 128 rows by 4 blocks.

    Within a tile, byte ``(r % 32) * 16 + (r // 32) * 4 + c`` belongs to row r and block c: the
    layout of scale operands in cuBLAS and of ``tcgen05.mma``'s block scales. Scales that a
    collective has to move are swizzled after it, those of ragged groups group by group.

    Args:
      scales: uint8 [..., rows, blocks].

    Returns:
      uint8 [..., row tiles, block tiles, 32, 16]; rows and blocks that fill up the last tiles are
      zero.
    """
    *leading, rows, blocks = scales.shape
    fill = (0, -rows % ROWS), (0, -blocks % COLUMNS)
    padded = jnp.pad(scales, (*((0, 0),) * len(leading), *fill))
    row_tiles, block_tiles = -(-rows // ROWS), -(-blocks // COLUMNS)
    tiles = padded.reshape(*leading, row_tiles, 4, 32, block_tiles, COLUMNS)
    order = jnp.moveaxis(tiles, (-4, -2), (-2, -4))
    return order.reshape(*leading, row_tiles, block_tiles, 32, 16)


def unswizzle(swizzled: jax.Array, rows: int, blocks: int) -> jax.Array:
    """Inverse of `swizzle`: uint8 [row tiles, block tiles, 32, 16] -> [rows, blocks].

    Raises:
      ValueError: if that many rows and blocks have another number of tiles.
    """
    tiles = (-(-rows // ROWS), -(-blocks // COLUMNS))
    if swizzled.shape != (*tiles, 32, 16):
        raise ValueError(
            f"swizzled scales {swizzled.shape} are not the {(*tiles, 32, 16)} of "
            f"{rows} rows and {blocks} blocks"
        )
    split = swizzled.reshape(*tiles, 32, 4, COLUMNS).transpose(0, 3, 2, 1, 4)
    return split.reshape(tiles[0] * ROWS, tiles[1] * COLUMNS)[:rows, :blocks]
