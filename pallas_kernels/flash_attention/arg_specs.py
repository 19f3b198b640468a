"""Arguments that attention is tested, timed and compiled ahead of time on."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ArgSpec(NamedTuple):
    """Sizes of queries, keys and values, and their dtype."""

    batch: int
    q_seq: int
    kv_seq: int
    heads: int
    qk: int
    v: int
    dtype: type

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Array arguments of `flash_attention` by name, with positions."""
        heads = {
            "q": (self.q_seq, self.heads, self.qk),
            "k": (self.kv_seq, self.heads, self.qk),
            "v": (self.kv_seq, self.heads, self.v),
        }
        marks = {
            "segment_ids": self.q_seq,
            "positions": self.q_seq,
            "kv_segment_ids": self.kv_seq,
            "kv_positions": self.kv_seq,
        }
        return {
            name: jax.ShapeDtypeStruct((self.batch, *shape), self.dtype)
            for name, shape in heads.items()
        } | {
            name: jax.ShapeDtypeStruct((self.batch, seq), jnp.int32) for name, seq in marks.items()
        }


# Kimi K2.5's heads, 16 of its 64 as under fourfold tensor parallelism: a whole row, and what one of
# eight context-parallel ranks holds of a long one.
AOT = (
    ArgSpec(1, 4096, 4096, 16, 192, 128, jnp.bfloat16),
    ArgSpec(1, 4096, 32768, 16, 192, 128, jnp.bfloat16),
)
