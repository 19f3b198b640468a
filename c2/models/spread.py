"""Attention of some tokens of a sequence over all of them (context parallelism, report section 5).

Ranks hold tokens in an order of their own, so who sees whom is said by positions and segments.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from c2.models.cache import Tokens
from pallas_kernels.flash_attention.vjp import RESIDUALS

# Keys and values of all heads and tokens that may exist at a time; at 262,144 tokens Kimi K2.5 has
# 10.7 GB of them.
MAX_BYTES = 2 << 30


def visibility(tokens: Tokens, gather: Callable | None) -> dict[str, jax.Array]:
    """Arguments of `flash_attention` that say who sees whom, besides the queries' segments.

    Args:
      tokens: this rank's.
      gather: from [batch, seq, ...] of this rank's tokens to those of all ranks; None if these are
        all, in order.
    """
    if gather is None:
        return {}
    segment_ids, positions = tokens.segment_ids, tokens.positions.astype(jnp.int32)
    everyone = gather(jnp.stack([segment_ids.astype(jnp.int32), positions], axis=-1))
    return {
        "positions": positions,
        "kv_segment_ids": everyone[..., 0],
        "kv_positions": everyone[..., 1],
    }


def by_heads(
    attend: Callable[[jax.Array, jax.Array], jax.Array],
    q: jax.Array,
    kv_up: jax.Array,
    bytes_of_keys_values: int,
) -> jax.Array:
    """Attends with some heads after others, as many at a time as `MAX_BYTES` allows.

    The backward pass expands the keys and values of these heads again, and keeps what attention
    itself keeps of its outputs.

    Args:
      attend: (queries [batch, seq, some heads, qk], projection [latent, some heads, nope + v])
        -> [batch, seq, some heads, v].
      q: [batch, seq, heads, qk].
      kv_up: [latent, heads, nope + v].
      bytes_of_keys_values: of all heads.
    """
    heads = q.shape[2]
    least = math.ceil(bytes_of_keys_values / MAX_BYTES)
    groups = next(n for n in range(1, heads + 1) if heads % n == 0 and n >= min(least, heads))
    if groups == 1:
        return attend(q, kv_up)

    def split(x, axis):
        cut = (*x.shape[:axis], groups, heads // groups, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(cut), axis, 0)

    policy = jax.checkpoint_policies.save_only_these_names(*RESIDUALS)
    some = jax.checkpoint(lambda args: attend(*args), policy=policy, prevent_cse=False)
    out = jax.lax.map(some, (split(q, 2), split(kv_up, 1)))
    return jnp.moveaxis(out, 0, 2).reshape(*q.shape[:3], -1)
