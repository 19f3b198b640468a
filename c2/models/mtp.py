"""Multi-token prediction (DeepSeek-V3 section 2.2; report section 3.1).

A module is one more decoder layer that predicts one token further than the model: at token i it
merges the model's final hidden state with the embedding of token i + 1 and, through the model's
own head, predicts token i + 2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from c2.models import blocks, moe, rope
from c2.models.blocks import Blocks, DenseLayer, MoELayer, dense_spec, moe_spec
from c2.models.cache import Tokens
from c2.models.config import ModelConfig
from c2.models.layers import norm_spec, project, rms_norm
from c2.models.params import ParamSpec


@struct.dataclass
class MTP:
    """Parameters of one module; embedding and head are the model's."""

    token_norm: jax.Array  # [embed]
    hidden_norm: jax.Array  # [embed]
    merge: jax.Array  # [2 * embed, embed], the token's embedding first
    layer: DenseLayer | MoELayer  # of the kind of the model's last layer
    norm: jax.Array  # [embed]


def spec(cfg: ModelConfig) -> MTP:
    """Parameter table of one module."""
    embed = cfg.hidden
    return MTP(
        token_norm=norm_spec(embed),
        hidden_norm=norm_spec(embed),
        merge=ParamSpec((2 * embed, embed), ("embed_pair", "embed"), fan_in=2 * embed),
        layer=moe_spec(cfg) if cfg.moe_layers else dense_spec(cfg),
        norm=norm_spec(embed),
    )


def following(x: jax.Array) -> jax.Array:
    """The values of the token that comes next in the row, 0 at its end: [batch, seq, ...]."""
    return jnp.pad(x[:, 1:], [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2))


def has_next(segment_ids: jax.Array, following: Callable = following) -> jax.Array:
    """Whether a token of the same segment follows, bool [batch, seq]."""
    return (segment_ids > 0) & (segment_ids == following(segment_ids))


def trunk(
    p: MTP,
    embed: jax.Array,
    hidden: jax.Array,
    tokens: jax.Array,
    cfg: ModelConfig,
    *,
    positions: jax.Array,
    segment_ids: jax.Array,
    routes: jax.Array | None = None,
    attention: Callable = blocks.attention,
    experts: Callable = moe.moe,
    unshard: Callable = blocks.whole,
    following: Callable = following,
) -> tuple[jax.Array, jax.Array]:
    """Runs one module up to its final norm.

    The last token of a segment has no next one: like padding it is seen by no other token, and its
    result means nothing. Where results count is `has_next`.

    Args:
      p: the module.
      embed: the model's embedding [vocab, embed].
      hidden: [batch, seq, embed], the model's hidden states after its final norm, or those of the
        module before.
      tokens: int [batch, seq], the tokens that follow are read from here.
      cfg: model configuration.
      positions: int [batch, seq].
      segment_ids: int [batch, seq].
      routes: int [batch, seq, top_k] to replay, as in `c2.models.moe.moe`.
      attention: as in `c2.models.trunk`.
      experts: likewise.
      unshard: likewise, for the layer.
      following: see `following`, for tokens that are not in order.

    Returns:
      Hidden states [batch, seq, embed] for the model's head: at token i they predict token i + 2;
      and the routes used, int16 [batch, seq, top_k] (top_k is 0 without a mixture).
    """
    real = has_next(segment_ids, following)
    inner = jnp.where(real, segment_ids, 0)
    info = Tokens(*rope.tables(positions, cfg.rope, cfg.attention.rotary), positions, inner)
    layers = Blocks(cfg, info, attention, experts, unshard)
    next_tokens = jnp.where(real, following(tokens), 0)
    with jax.named_scope("mtp_merge"):
        token = rms_norm(embed[next_tokens].astype(cfg.dtype), p.token_norm, cfg.norm_eps)
        state = rms_norm(hidden, p.hidden_norm, cfg.norm_eps)
        x = project(jnp.concatenate([token, state], axis=-1), p.merge)
    if isinstance(p.layer, MoELayer):
        x, _, used = blocks.remat(layers.moe, cfg.remat, scanned=False)(x, p.layer, None, routes)
    else:
        x, _ = blocks.remat(layers.dense, cfg.remat, scanned=False)(x, p.layer, None)
        used = jnp.zeros((*tokens.shape, 0), jnp.int32)
    return rms_norm(x, p.norm, cfg.norm_eps), used.astype(jnp.int16)
