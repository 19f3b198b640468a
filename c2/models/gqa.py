"""Grouped-query attention (Ainslie et al. 2023) as in Llama and Qwen3."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from c2.models import rope
from c2.models.cache import Tokens, attend
from c2.models.config import ModelConfig
from c2.models.layers import norm_spec, project, rms_norm
from c2.models.params import ParamSpec
from c2.models.spread import visibility
from pallas_kernels.flash_attention import flash_attention


@struct.dataclass
class Attention:
    """Parameters of one attention block."""

    q: jax.Array  # [embed, heads, qk]
    k: jax.Array  # [embed, kv_heads, qk]
    v: jax.Array  # [embed, kv_heads, v]
    q_norm: jax.Array | None  # [qk]
    k_norm: jax.Array | None  # [qk]
    out: jax.Array  # [heads, v, embed]


@struct.dataclass
class KeysValues:
    """Entry of the cache, per token and layer."""

    k: jax.Array  # [..., kv_heads, qk], normed and rotated
    v: jax.Array  # [..., kv_heads, v]


def spec(cfg: ModelConfig, gain_out: float) -> Attention:
    """Parameter table of one attention block."""
    a, embed, dim = cfg.attention, cfg.hidden, cfg.attention.head_dim
    kv_shape = (embed, a.kv_heads, dim)
    return Attention(
        q=ParamSpec((embed, a.heads, dim), ("embed", "heads", "qk"), fan_in=embed),
        k=ParamSpec(kv_shape, ("embed", "kv_heads", "qk"), fan_in=embed),
        v=ParamSpec(kv_shape, ("embed", "kv_heads", "v"), fan_in=embed),
        q_norm=norm_spec(dim, "qk") if a.qk_norm else None,
        k_norm=norm_spec(dim, "qk") if a.qk_norm else None,
        out=ParamSpec(
            (a.heads, dim, embed), ("heads", "v", "embed"), fan_in=a.heads * dim, gain=gain_out
        ),
    )


def cache_entry(cfg: ModelConfig) -> KeysValues:
    """Shapes that the cache holds per token and layer."""
    shape = (cfg.attention.kv_heads, cfg.attention.head_dim)
    return KeysValues(
        k=jax.ShapeDtypeStruct(shape, cfg.dtype), v=jax.ShapeDtypeStruct(shape, cfg.dtype)
    )


def attention(
    x: jax.Array,
    p: Attention,
    tokens: Tokens,
    cfg: ModelConfig,
    past: KeysValues | None,
    *,
    gather: Callable | None = None,
) -> tuple[jax.Array, KeysValues | None]:
    """Attends within segments, or over a cache; arguments as in `c2.models.mla.attention`.

    Keys and values are all there is to gather.
    """
    a = cfg.attention
    with jax.named_scope("gqa_projections"):
        q, k, v = project(x, p.q), project(x, p.k), project(x, p.v)
        if a.qk_norm:
            q, k = rms_norm(q, p.q_norm, cfg.norm_eps), rms_norm(k, p.k_norm, cfg.norm_eps)
        q = rope.rotate(q, tokens.cos, tokens.sin, cfg.rope)
        k = rope.rotate(k, tokens.cos, tokens.sin, cfg.rope)
    scale = rope.attention_scale(cfg.rope.yarn, a.qk)
    entry = None if past is None else KeysValues(k=k, v=v)
    with jax.named_scope("gqa_attend"):
        if past is None or tokens.cached is None:
            # every query head gets a copy of its keys: the kernel knows no groups
            k, v = (k, v) if gather is None else (gather(k), gather(v))
            repeated = (jnp.repeat(heads, a.heads // a.kv_heads, axis=2) for heads in (k, v))
            visible = visibility(tokens, gather)
            mixed = flash_attention(
                q, *repeated, tokens.segment_ids, scale=scale, impl=cfg.kernels, **visible
            )
        else:
            mixed = attend(q, (past.k, past.v), (k, v), tokens, scale)
    return project(mixed, p.out, contract=2), entry
