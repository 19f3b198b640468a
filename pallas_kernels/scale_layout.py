"""The order in which Blackwell's tensor cores read block scales."""

import jax
import jax.numpy as jnp

_ROWS, _COLUMNS = 128, 4  # of a tile: 512 consecutive bytes, 16 of them per 32 rows


def swizzle(scales: jax.Array) -> jax.Array:
    """Reorders scales [rows, blocks] into tiles of 128 rows by 4 blocks.

    Within a tile, byte ``(r % 32) * 16 + (r // 32) * 4 + c`` belongs to row r and block c: the
    layout of scale operands in cuBLAS and of ``tcgen05.mma``'s block scales. Scales that a
    collective has to move are swizzled after it, those of ragged groups group by group.

    Args:
      scales: uint8 [rows, blocks].

    Returns:
      uint8 [row tiles, block tiles, 32, 16]; rows and blocks that fill up the last tiles are zero.
    """
    rows, blocks = scales.shape
    padded = jnp.pad(scales, ((0, -rows % _ROWS), (0, -blocks % _COLUMNS)))
    tiles = padded.reshape(-(-rows // _ROWS), 4, 32, -(-blocks // _COLUMNS), _COLUMNS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0], tiles.shape[3], 32, 16)


def unswizzle(swizzled: jax.Array, rows: int, blocks: int) -> jax.Array:
    """Inverse of `swizzle`: uint8 [row tiles, block tiles, 32, 16] -> [rows, blocks].

    Raises:
      ValueError: if that many rows and blocks have another number of tiles.
    """
    tiles = (-(-rows // _ROWS), -(-blocks // _COLUMNS))
    if swizzled.shape != (*tiles, 32, 16):
        raise ValueError(
            f"swizzled scales {swizzled.shape} are not the {(*tiles, 32, 16)} of "
            f"{rows} rows and {blocks} blocks"
        )
    split = swizzled.reshape(*tiles, 32, 4, _COLUMNS).transpose(0, 3, 2, 1, 4)
    return split.reshape(tiles[0] * _ROWS, tiles[1] * _COLUMNS)[:rows, :blocks]
