"""Multi-head latent attention (DeepSeek-V2 section 2.1; report section 5)."""

import jax
import jax.numpy as jnp
from flax import struct

from c2.models import rope
from c2.models.config import ModelConfig
from c2.models.layers import norm_spec, project, rms_norm
from c2.models.params import ParamSpec
from pallas_kernels.flash_attention import flash_attention


@struct.dataclass
class Attention:
    """Parameters of one attention block."""

    q_down: jax.Array  # [embed, q_latent]
    q_norm: jax.Array  # [q_latent]
    q_up: jax.Array  # [q_latent, heads, nope + rope]
    kv_down: jax.Array  # [embed, kv_latent + rope]
    kv_norm: jax.Array  # [kv_latent]
    kv_up: jax.Array  # [kv_latent, heads, nope + v]
    out: jax.Array  # [heads, v, embed]


def spec(cfg: ModelConfig, gain_out: float) -> Attention:
    """Parameter table of one attention block."""
    a, embed = cfg.attention, cfg.hidden
    qk, kv = a.nope + a.rope, a.nope + a.v
    return Attention(
        q_down=ParamSpec((embed, a.q_lora), ("embed", "q_latent"), fan_in=embed),
        q_norm=norm_spec(a.q_lora, "q_latent"),
        q_up=ParamSpec((a.q_lora, a.heads, qk), ("q_latent", "heads", "qk"), fan_in=a.q_lora),
        kv_down=ParamSpec((embed, a.kv_lora + a.rope), ("embed", "kv_latent"), fan_in=embed),
        kv_norm=norm_spec(a.kv_lora, "kv_latent"),
        kv_up=ParamSpec((a.kv_lora, a.heads, kv), ("kv_latent", "heads", "kv"), fan_in=a.kv_lora),
        out=ParamSpec(
            (a.heads, a.v, embed), ("heads", "v", "embed"), fan_in=a.heads * a.v, gain=gain_out
        ),
    )


@struct.dataclass
class Tokens:
    """What attention must know of the tokens besides their activations, once per forward."""

    cos: jax.Array  # [batch, seq, rope // 2]
    sin: jax.Array  # [batch, seq, rope // 2]
    segment_ids: jax.Array  # [batch, seq]


def attention(x: jax.Array, p: Attention, tokens: Tokens, cfg: ModelConfig) -> jax.Array:
    """Attends within segments; x and result [batch, seq, embed].

    Keys and values are projected from one normed latent per token. The rotary key is shared by
    all heads and is not normed.
    """
    a = cfg.attention
    with jax.named_scope("mla_queries"):
        q_latent = rms_norm(project(x, p.q_down), p.q_norm, a.latent_norm_eps)
        q_nope, q_rope = jnp.split(project(q_latent, p.q_up), [a.nope], axis=-1)
        q_rope = rope.rotate(q_rope, tokens.cos, tokens.sin)
        q = jnp.concatenate([q_nope, q_rope], axis=-1)  # [batch, seq, heads, nope + rope]
    with jax.named_scope("mla_keys_values"):
        kv_latent, k_rope = jnp.split(project(x, p.kv_down), [a.kv_lora], axis=-1)
        kv_latent = rms_norm(kv_latent, p.kv_norm, a.latent_norm_eps)
        k_nope, v = jnp.split(project(kv_latent, p.kv_up), [a.nope], axis=-1)
        k_rope = rope.rotate(k_rope[:, :, None], tokens.cos, tokens.sin)
        k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:3], a.rope))
        k = jnp.concatenate([k_nope, k_rope], axis=-1)
    with jax.named_scope("mla_attend"):
        scale = rope.attention_scale(cfg.rope.yarn, a.nope + a.rope)
        mixed = flash_attention(q, k, v, tokens.segment_ids, scale=scale)
    return project(mixed, p.out, contract=2)
