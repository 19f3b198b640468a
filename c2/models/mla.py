"""Multi-head latent attention (DeepSeek-V2 section 2.1; report section 5)."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from c2.models import rope
from c2.models.cache import Tokens, attend
from c2.models.config import MLAConfig, ModelConfig
from c2.models.layers import norm_spec, project, rms_norm
from c2.models.params import ParamSpec
from c2.models.spread import by_heads, visibility
from pallas_kernels.flash_attention import flash_attention


@struct.dataclass
class Attention:
    """Parameters of one attention block. Without a query latent, ``q_up`` starts from embed."""

    q_down: jax.Array | None  # [embed, q_latent]
    q_norm: jax.Array | None  # [q_latent]
    q_up: jax.Array  # [q_latent, heads, nope + rope]
    kv_down: jax.Array  # [embed, kv_latent + rope]
    kv_norm: jax.Array  # [kv_latent]
    kv_up: jax.Array  # [kv_latent, heads, nope + v]
    out: jax.Array  # [heads, v, embed]


def spec(cfg: ModelConfig, gain_out: float) -> Attention:
    """Parameter table of one attention block."""
    a, embed = cfg.attention, cfg.hidden
    kv = a.nope + a.v
    compressed = a.q_lora is not None
    q_in, q_axis = (a.q_lora, "q_latent") if compressed else (embed, "embed")
    return Attention(
        q_down=ParamSpec((embed, q_in), ("embed", q_axis), fan_in=embed) if compressed else None,
        q_norm=norm_spec(q_in, q_axis) if compressed else None,
        q_up=ParamSpec((q_in, a.heads, a.qk), (q_axis, "heads", "qk"), fan_in=q_in),
        kv_down=ParamSpec((embed, a.kv_lora + a.rope), ("embed", "kv_latent"), fan_in=embed),
        kv_norm=norm_spec(a.kv_lora, "kv_latent"),
        kv_up=ParamSpec((a.kv_lora, a.heads, kv), ("kv_latent", "heads", "kv"), fan_in=a.kv_lora),
        out=ParamSpec(
            (a.heads, a.v, embed), ("heads", "v", "embed"), fan_in=a.heads * a.v, gain=gain_out
        ),
    )


def cache_entry(cfg: ModelConfig) -> jax.ShapeDtypeStruct:
    """Shape that the cache holds per token and layer: normed latent, then rotated key."""
    return jax.ShapeDtypeStruct((cfg.attention.kv_lora + cfg.attention.rope,), cfg.dtype)


def attention(
    x: jax.Array,
    p: Attention,
    tokens: Tokens,
    cfg: ModelConfig,
    past: jax.Array | None,
    *,
    gather: Callable | None = None,
    exchange: Literal["latents", "keys_values"] = "latents",
) -> tuple[jax.Array, jax.Array | None]:
    """Attends within segments, or over a cache.

    Keys and values are projected from one normed latent per token. The rotary key is shared by
    all heads and is not normed.

    Args:
      x: [batch, seq, embed].
      p: parameters.
      tokens: positions' angles and segments.
      cfg: model configuration.
      past: this layer's cached entries [batch, capacity, kv_latent + rope], or None. With tokens
        in the cache keys and values are not expanded, unless `MLAConfig.absorb` is false: their
        projections act on queries and outputs instead.
      gather: of context parallelism: from [batch, seq, ...] of this rank's tokens to
        [batch, all, ...] of those of all ranks, in any order.
      exchange: what is gathered. With "latents", ranks tell each other ``kv_latent + rope`` numbers
        a token and each projects the keys and values of all (report section 5); with "keys_values"
        they project their own and tell ``heads * (nope + v) + rope``, for comparison.

    Returns:
      [batch, seq, embed], and the entries of the new tokens if ``past`` is given.
    """
    a = cfg.attention
    with jax.named_scope("mla_latents"):  # first: what is gathered travels while queries are made
        latent, k_rope = jnp.split(project(x, p.kv_down), [a.kv_lora], axis=-1)
        latent = rms_norm(latent, p.kv_norm, a.latent_norm_eps)
        k_rope = rope.rotate(k_rope[:, :, None], tokens.cos, tokens.sin, cfg.rope)[:, :, 0]
        entry = jnp.concatenate([latent, k_rope], axis=-1)
    if gather is not None and exchange == "latents":
        with jax.named_scope("mla_gather"):
            latent, k_rope = jnp.split(gather(entry), [a.kv_lora], axis=-1)
    with jax.named_scope("mla_queries"):
        q_latent = x
        if p.q_down is not None:
            q_latent = rms_norm(project(x, p.q_down), p.q_norm, a.latent_norm_eps)
        q_nope, q_rope = jnp.split(project(q_latent, p.q_up), [a.nope], axis=-1)
        q_rope = rope.rotate(q_rope, tokens.cos, tokens.sin, cfg.rope)
    scale = rope.attention_scale(cfg.rope.yarn, a.qk)
    if past is not None and tokens.cached is not None:
        over = _absorbed if a.absorb else _expanded
        mixed = over(q_nope, q_rope, entry, past, p, tokens, cfg, scale)
        return project(mixed, p.out, contract=2), entry
    q = jnp.concatenate([q_nope, q_rope], axis=-1)  # [batch, seq, heads, nope + rope]
    visible = visibility(tokens, gather)

    def attend_heads(q, kv_up):
        k, v = _keys_values(latent, k_rope, kv_up, a)
        if gather is not None and exchange == "keys_values":
            k, v = gather(k), gather(v)
        with jax.named_scope("mla_attend"):
            return flash_attention(
                q, k, v, tokens.segment_ids, scale=scale, impl=cfg.kernels, **visible
            )

    numbers = math.prod(latent.shape[:2]) * a.heads * (a.qk + a.v)
    mixed = by_heads(attend_heads, q, p.kv_up, numbers * latent.dtype.itemsize)
    return project(mixed, p.out, contract=2), None if past is None else entry


def _keys_values(latent, k_rope, kv_up, a: MLAConfig):
    """Expands latents to keys and values of heads: cheapest where all tokens are queries."""
    with jax.named_scope("mla_keys_values"):
        k_nope, v = jnp.split(project(latent, kv_up), [a.nope], axis=-1)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], a.rope))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v


def _absorbed(q_nope, q_rope, entry, past, p, tokens, cfg, scale):
    """Compares queries with latents themselves: one key-value head of kv_latent + rope features.

    ``(q W_k) . c = q . (W_k c)``, and values are projected after mixing.
    """
    a = cfg.attention
    w_k, w_v = jnp.split(p.kv_up.astype(q_nope.dtype), [a.nope], axis=-1)
    with jax.named_scope("mla_absorb"):
        q_latent = jnp.einsum("bshn,chn->bshc", q_nope, w_k)
        q = jnp.concatenate([q_latent, q_rope], axis=-1)
    with jax.named_scope("mla_attend"):
        # values are the latents: the rotary features are mixed along and dropped, not copied out
        past, entry = past[:, :, None], entry[:, :, None]
        mixed = attend(q, (past, past), (entry, entry), tokens, scale)[..., : a.kv_lora]
        return jnp.einsum("bshc,chv->bshv", mixed, w_v)


def _expanded(q_nope, q_rope, entry, past, p, tokens, cfg, scale):
    """The same with the keys and values that training computes, rounded as they are there."""
    a = cfg.attention
    held, new = (
        _keys_values(entries[..., : a.kv_lora], entries[..., a.kv_lora :], p.kv_up, a)
        for entries in (past, entry)
    )
    with jax.named_scope("mla_attend"):
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        return attend(q, held, new, tokens, scale)
