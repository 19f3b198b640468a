"""The decoder: parameter table, forward pass and parameter counts."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from c2.models import mla, moe, params, rope
from c2.models.config import ModelConfig
from c2.models.layers import MLP, mlp, mlp_spec, norm_spec, project, rms_norm
from c2.models.params import ParamSpec


@struct.dataclass
class DenseLayer:
    """Attention and a dense feed-forward block; stacked over "layer" in `Params`."""

    attention_norm: jax.Array
    attention: mla.Attention
    mlp_norm: jax.Array
    mlp: MLP


@struct.dataclass
class MoELayer:
    """Attention and a mixture-of-experts block; stacked over "layer" in `Params`."""

    attention_norm: jax.Array
    attention: mla.Attention
    moe_norm: jax.Array
    moe: moe.MoE


@struct.dataclass
class Params:
    """All parameters. The same class holds weights, `ParamSpec`s, shapes and gradients."""

    embed: jax.Array  # [vocab, embed]
    dense: DenseLayer | None
    moe: MoELayer | None
    norm: jax.Array  # [embed]
    head: jax.Array  # [embed, vocab]


class Trunk(NamedTuple):
    """Everything below the language-model head.

    Attributes:
      hidden: [batch, seq, embed] after the final norm.
      routes: int16 [batch, seq, moe_layer, top_k], -2 on padding.
      expert_load: f32 [moe_layer, expert], assignments per expert.
    """

    hidden: jax.Array
    routes: jax.Array
    expert_load: jax.Array


class Output(NamedTuple):
    """Result of `forward`: `Trunk`, plus logits f32 [batch, seq, vocab]."""

    logits: jax.Array
    hidden: jax.Array
    routes: jax.Array
    metrics: dict[str, jax.Array]


class ParamCount(NamedTuple):
    """Parameter counts: all of the model, used per token, and of one multi-token-prediction module.

    Routing biases are not counted: they are state of the balancing rule. ``mtp`` counts what a
    module as in DeepSeek-V3 section 2.2 would add (embedding and head are shared with the model).
    """

    total: int
    active: int
    mtp: int


def spec(cfg: ModelConfig) -> Params:
    """The parameter table. Residual branches start smaller the deeper the model is."""
    embed, gain_out = cfg.hidden, (2 * cfg.layers) ** -0.5
    dense = DenseLayer(
        attention_norm=norm_spec(embed),
        attention=mla.spec(cfg, gain_out),
        mlp_norm=norm_spec(embed),
        mlp=mlp_spec(embed, cfg.dense_intermediate, gain_out),
    )
    return Params(
        embed=ParamSpec((cfg.vocab, embed), ("vocab", "embed"), gain=0.5),
        dense=params.stack(dense, cfg.dense_layers) if cfg.dense_layers else None,
        moe=params.stack(moe_layer_spec(cfg), cfg.moe_layers) if cfg.moe_layers else None,
        norm=norm_spec(embed),
        head=ParamSpec((embed, cfg.vocab), ("embed", "vocab"), fan_in=embed),
    )


def moe_layer_spec(cfg: ModelConfig) -> MoELayer:
    """Parameter table of one mixture-of-experts layer."""
    gain_out = (2 * cfg.layers) ** -0.5
    return MoELayer(
        attention_norm=norm_spec(cfg.hidden),
        attention=mla.spec(cfg, gain_out),
        moe_norm=norm_spec(cfg.hidden),
        moe=moe.spec(cfg, gain_out),
    )


def init(key: jax.Array, cfg: ModelConfig) -> Params:
    """Random parameters; the values of one tensor depend on ``key`` and its name only."""
    return params.init(key, spec(cfg))


def abstract(cfg: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without allocating them."""
    return params.abstract(spec(cfg))


def count(cfg: ModelConfig) -> ParamCount:
    """Counts parameters from the table alone."""
    total = params.size(spec(cfg))
    one_expert = 3 * cfg.hidden * cfg.moe.intermediate
    idle = cfg.moe_layers * (cfg.moe.experts - cfg.moe.top_k) * one_expert
    glue = 2 * cfg.hidden * cfg.hidden + 3 * cfg.hidden  # projection of two inputs, three norms
    return ParamCount(total, total - idle, params.size(moe_layer_spec(cfg)) + glue)


def _remat(step: Callable, mode: str) -> Callable:
    if mode == "none":
        return step
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_saveable}
    return jax.checkpoint(step, policy=policies[mode], prevent_cse=False)


def trunk(
    p: Params,
    tokens: jax.Array,
    cfg: ModelConfig,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    routes: jax.Array | None = None,
    attention: Callable = mla.attention,
    experts: Callable = moe.moe,
) -> Trunk:
    """Runs the model up to the final norm; arguments as in `forward`."""
    batch, seq = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    if segment_ids is None:
        segment_ids = jnp.ones((batch, seq), jnp.int32)
    real = segment_ids > 0
    info = mla.Tokens(*rope.tables(positions, cfg.rope, cfg.attention.rope), segment_ids)

    def attend(x, layer):
        normed = rms_norm(x, layer.attention_norm, cfg.norm_eps)
        return x + attention(normed, layer.attention, info, cfg)

    def dense_layer(x, layer: DenseLayer):
        x = attend(x, layer)
        return x + mlp(rms_norm(x, layer.mlp_norm, cfg.norm_eps), layer.mlp), None

    def moe_layer(x, layer_and_routes):
        layer, given = layer_and_routes
        x = attend(x, layer)
        normed = rms_norm(x, layer.moe_norm, cfg.norm_eps)
        mixed, used = experts(normed, layer.moe, real, given, cfg)
        return x + mixed, (used.astype(jnp.int16), moe.expert_load(used, cfg.moe.experts))

    x = p.embed[tokens].astype(cfg.dtype)
    if p.dense is not None:
        x, _ = jax.lax.scan(_remat(dense_layer, cfg.remat), x, p.dense)
    used = jnp.zeros((0, batch, seq, cfg.moe.top_k), jnp.int16)
    load = jnp.zeros((0, cfg.moe.experts), jnp.float32)
    if p.moe is not None:
        given = None if routes is None else jnp.moveaxis(routes, 2, 0)
        x, (used, load) = jax.lax.scan(_remat(moe_layer, cfg.remat), x, (p.moe, given))
    return Trunk(rms_norm(x, p.norm, cfg.norm_eps), jnp.moveaxis(used, 0, 2), load)


def forward(
    p: Params,
    tokens: jax.Array,
    cfg: ModelConfig,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    routes: jax.Array | None = None,
    attention: Callable = mla.attention,
    experts: Callable = moe.moe,
) -> Output:
    """Computes next-token logits.

    Args:
      p: parameters.
      tokens: int [batch, seq].
      cfg: model configuration.
      positions: int [batch, seq] for rotary embedding; by default 0, 1, 2, ...
      segment_ids: int [batch, seq]; tokens attend within their segment, and 0 marks padding,
        which is routed to no expert. By default everything is one segment.
      routes: int [batch, seq, moe_layer, top_k] to replay instead of routing: -1 = real token
        without a captured route (takes its own), -2 = padding. See `c2.models.moe.moe`.
      attention: the attention function of every layer, with the signature of
        `c2.models.mla.attention`; pass your own to try a variant.
      experts: the mixture function, with the signature of `c2.models.moe.moe`.

    Returns:
      `Output`; ``metrics["expert_load"]`` is f32 [moe_layer, expert].
    """
    below = partial(trunk, attention=attention, experts=experts)(
        p, tokens, cfg, positions=positions, segment_ids=segment_ids, routes=routes
    )
    logits = project(below.hidden, p.head).astype(jnp.float32)
    return Output(logits, below.hidden, below.routes, {"expert_load": below.expert_load})
