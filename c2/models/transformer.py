"""The decoder: parameter table, forward pass and parameter counts."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from c2.models import blocks, moe, mtp, params, rope
from c2.models.blocks import Blocks, DenseLayer, MoELayer
from c2.models.cache import Cache, Tokens, append, next_positions
from c2.models.config import ModelConfig
from c2.models.layers import norm_spec, rms_norm
from c2.models.mtp import MTP
from c2.models.params import ParamSpec


@struct.dataclass
class Params:
    """All parameters. The same class holds weights, `ParamSpec`s, shapes and gradients."""

    embed: jax.Array  # [vocab, embed]
    dense: DenseLayer | None
    moe: MoELayer | None
    norm: jax.Array  # [embed]
    head: jax.Array | None  # [embed, vocab]; None if tied, see `head`
    mtp: tuple[MTP, ...] = ()


class Trunk(NamedTuple):
    """Everything below the language-model head.

    Attributes:
      hidden: [batch, seq, embed] after the final norm.
      routes: int16 [batch, seq, moe_layer, top_k], -2 on padding.
      cache: the given cache with the new tokens added, or None.
      expert_load: f32 [moe_layer, expert], assignments per expert.
    """

    hidden: jax.Array
    routes: jax.Array
    cache: Cache | None
    expert_load: jax.Array


class Output(NamedTuple):
    """Result of `forward`: `Trunk`, plus logits f32 [batch, seq, vocab]."""

    logits: jax.Array
    hidden: jax.Array
    routes: jax.Array
    cache: Cache | None
    metrics: dict[str, jax.Array]


class ParamCount(NamedTuple):
    """Parameter counts: all of the model, used per token, and of one multi-token-prediction module.

    Routing biases are not counted: they are state of the balancing rule. ``total`` and ``active``
    are those of the model without modules; ``mtp`` is what one module adds or would add (embedding
    and head are shared with the model).
    """

    total: int
    active: int
    mtp: int


def spec(cfg: ModelConfig) -> Params:
    """The parameter table."""
    embed, vocab = cfg.hidden, cfg.vocab
    return Params(
        # tied, it must be fit to be a head: unit logits from unit hidden states
        embed=ParamSpec((vocab, embed), ("vocab", "embed"), gain=embed**-0.5 if cfg.tied else 0.5),
        dense=params.stack(blocks.dense_spec(cfg), cfg.dense_layers) if cfg.dense_layers else None,
        moe=params.stack(blocks.moe_spec(cfg), cfg.moe_layers) if cfg.moe_layers else None,
        norm=norm_spec(embed),
        head=None if cfg.tied else ParamSpec((embed, vocab), ("embed", "vocab"), fan_in=embed),
        mtp=tuple(mtp.spec(cfg) for _ in range(cfg.mtp)),
    )


def init(key: jax.Array, cfg: ModelConfig) -> Params:
    """Random parameters; the values of one tensor depend on ``key`` and its name only."""
    return params.init(key, spec(cfg))


def abstract(cfg: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without allocating them."""
    return params.abstract(spec(cfg))


def count(cfg: ModelConfig) -> ParamCount:
    """Counts parameters from the table alone."""
    total = params.size(spec(replace(cfg, mtp=0)))
    idle = 0
    if cfg.moe_layers:
        idle_experts = cfg.moe_layers * (cfg.moe.experts - cfg.moe.top_k)
        idle = idle_experts * 3 * cfg.hidden * cfg.moe.intermediate
    return ParamCount(total, total - idle, params.size(mtp.spec(cfg)))


def head(p: Params) -> jax.Array:
    """The language-model head [embed, vocab]."""
    return p.embed.T if p.head is None else p.head


def logits(hidden: jax.Array, p: Params) -> jax.Array:
    """Logits of hidden states [..., embed] for the head, f32 [..., vocab].

    Factors have the dtype of ``hidden``; sums are not rounded to it, as in the losses.
    """
    rows, matrix = hidden.reshape(-1, hidden.shape[-1]), head(p).astype(hidden.dtype)
    out = jnp.dot(rows, matrix, preferred_element_type=jnp.float32)
    return out.reshape(*hidden.shape[:-1], -1)


def init_cache(cfg: ModelConfig, batch: int, capacity: int) -> Cache:
    """An empty cache for ``capacity`` tokens in each of ``batch`` rows."""
    entry = blocks.kind_of_attention(cfg).cache_entry(cfg)

    def empty(layers: int):
        shape = (layers, batch, capacity)
        return jax.tree.map(lambda s: jnp.zeros(shape + s.shape, s.dtype), entry)

    return Cache(
        dense=empty(cfg.dense_layers) if cfg.dense_layers else None,
        moe=empty(cfg.moe_layers) if cfg.moe_layers else None,
        length=jnp.zeros(batch, jnp.int32),
    )


def trunk(
    p: Params,
    tokens: jax.Array,
    cfg: ModelConfig,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: Cache | None = None,
    routes: jax.Array | None = None,
    attention: Callable = blocks.attention,
    experts: Callable = moe.moe,
    unshard: Callable = blocks.whole,
) -> Trunk:
    """Runs the model up to the final norm; arguments as in `forward`.

    ``unshard`` makes the parameters of a layer whole where they are used, see
    `c2.models.blocks.whole`; those outside the layers must be whole already.
    """
    batch, seq = tokens.shape
    if segment_ids is None:
        segment_ids = jnp.ones((batch, seq), jnp.int32)
    real = segment_ids > 0
    if positions is None and cache is None:
        positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    elif positions is None:
        positions = next_positions(cache.length, real)
    angles = rope.tables(positions, cfg.rope, cfg.attention.rotary)
    info = Tokens(*angles, positions, segment_ids, None if cache is None else cache.length)
    layers = Blocks(cfg, info, attention, experts, unshard)

    def dense_layer(x, layer_and_past):
        return layers.dense(x, *layer_and_past)

    def moe_layer(x, layer_past_and_routes):
        x, entry, used = layers.moe(x, *layer_past_and_routes)
        return x, (entry, used.astype(jnp.int16), moe.expert_load(used, cfg.moe.experts))

    x = p.embed[tokens].astype(cfg.dtype)
    old = Cache(None, None, None) if cache is None else cache
    dense_entries = moe_entries = None
    if p.dense is not None:
        layer = blocks.remat(dense_layer, cfg.remat, scanned=True)
        x, dense_entries = jax.lax.scan(layer, x, (p.dense, old.dense))
    if p.moe is not None:
        given = None if routes is None else jnp.moveaxis(routes, 2, 0)
        layer = blocks.remat(moe_layer, cfg.remat, scanned=True)
        x, (moe_entries, used, load) = jax.lax.scan(layer, x, (p.moe, old.moe, given))
    else:
        top_k, num_experts = (cfg.moe.top_k, cfg.moe.experts) if cfg.moe else (0, 0)
        used = jnp.zeros((0, batch, seq, top_k), jnp.int16)
        load = jnp.zeros((0, num_experts), jnp.float32)
    return Trunk(
        hidden=rms_norm(x, p.norm, cfg.norm_eps),
        routes=jnp.moveaxis(used, 0, 2),
        cache=None if cache is None else append(cache, dense_entries, moe_entries, real),
        expert_load=load,
    )


def forward(
    p: Params,
    tokens: jax.Array,
    cfg: ModelConfig,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: Cache | None = None,
    routes: jax.Array | None = None,
    attention: Callable = blocks.attention,
    experts: Callable = moe.moe,
) -> Output:
    """Computes next-token logits.

    Args:
      p: parameters.
      tokens: int [batch, seq].
      cfg: model configuration.
      positions: int [batch, seq] for rotary embedding; by default 0, 1, 2, ..., or those that
        follow the cached tokens.
      segment_ids: int [batch, seq]; tokens attend within their segment, and 0 marks padding,
        which is routed to no expert. By default everything is one segment.
      cache: from `init_cache` or an earlier call; ``tokens`` then go on where it ends, any number
        at a time. Rows are one sequence each: of ``segment_ids`` only 0 or not matters, so
        padding makes batches ragged. The result holds the longer cache. Donate it when jitting.
      routes: int [batch, seq, moe_layer, top_k] to replay instead of routing: -1 = real token
        without a captured route (takes its own), -2 = padding. See `c2.models.moe.replay`.
      attention: the attention function of every layer, with the signature of
        `c2.models.mla.attention`; pass your own to try a variant.
      experts: the mixture function, with the signature of `c2.models.moe.moe`.

    Returns:
      `Output`; ``metrics["expert_load"]`` is f32 [moe_layer, expert].
    """
    below = trunk(
        p,
        tokens,
        cfg,
        positions=positions,
        segment_ids=segment_ids,
        cache=cache,
        routes=routes,
        attention=attention,
        experts=experts,
    )
    metrics = {"expert_load": below.expert_load}
    return Output(logits(below.hidden, p), below.hidden, below.routes, below.cache, metrics)
