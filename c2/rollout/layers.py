"""The model over slots: layers one by one, each with weights and a cache of its own.

`c2.models.trunk` scans over stacked layers, which keeps programs small. A scan copies every layer's
weights and cache out of the stack. That is nothing beside the products of thousands of tokens, and
more than all else beside those of a few. What a layer computes is the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from c2 import models
from c2.models import ModelConfig, Params, blocks, rope
from c2.models.blocks import Blocks, MoELayer
from c2.models.cache import Tokens, next_positions
from c2.models.layers import project, rms_norm
from c2.rollout.experts import mixture
from c2.weights.serving import experts_for, rounded
from pallas_kernels.nvfp4 import NVFP4


@struct.dataclass
class Layers:
    """Cached entries of every layer, leaves [row, capacity, ...]."""

    dense: tuple[Any, ...]
    moe: tuple[Any, ...]
    mtp: Any = None  # of the prediction module, if it drafts


@struct.dataclass
class Below:
    """Everything below the head; hidden [row, seq, embed], routes as in `c2.models.Trunk`."""

    hidden: jax.Array
    routes: jax.Array
    layers: Layers


def empty(cfg: ModelConfig, rows: int, capacity: int, *, mtp: bool) -> Layers:
    """Space for ``rows`` sequences."""
    cache = models.init_cache(cfg, rows, capacity)
    dense, moe = unstack(cache.dense), unstack(cache.moe)
    module = jax.tree.map(jnp.zeros_like, (*dense, *moe)[-1]) if mtp else None
    return Layers(dense, moe, module)


def unstack(tree: Any) -> tuple[Any, ...]:
    """A tree per layer out of one with a leading layer axis; () for None."""
    if tree is None:
        return ()
    count = len(jax.tree.leaves(tree)[0])
    return tuple(jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count))


def published(params: Params, cfg: ModelConfig) -> Params:
    """Parameters in the form that is multiplied with, which is the one they are published in.

    Args:
      params: masters as of `c2.models.spec`, or from `c2.weights.serving.restore`.
      cfg: model configuration. Where it has experts in NVFP4, they are or become codes.
    """
    experts = experts_for(cfg.moe.precision if cfg.moe else "native")

    def form(spec, leaf):
        codes = isinstance(leaf, NVFP4)
        return leaf if codes else rounded(spec, leaf, cfg.dtype, experts)

    return jax.tree.map(form, models.spec(cfg), params)


def serving(params: Params, cfg: ModelConfig) -> Params:
    """Parameters as this module takes them: as `published`, layers apart."""
    params = published(params, cfg)
    return params.replace(dense=unstack(params.dense), moe=unstack(params.moe))


def trunk(
    params: Params,
    tokens: jax.Array,
    real: jax.Array,
    layers: Layers,
    length: jax.Array | None,
    cfg: ModelConfig,
    slots: jax.Array | None = None,
) -> Below:
    """`c2.models.trunk` with a cache.

    Args:
      params: from `serving`.
      tokens: int32 [row, seq].
      real: bool [row, seq]; other tokens are padding.
      layers: the cache.
      length: int32 [row], tokens in the cache; None if it has none of any row, which is faster.
      cfg: model configuration.
      slots: int32 [row], the rows of the cache; all of them, in order, by default.
    """
    run, positions = _blocks(real, length, cfg)
    held = _held(layers, length, slots)
    x = params.embed[tokens].astype(cfg.dtype)
    dense, moe, routes = [], [], []
    for layer, past in zip(params.dense, held.dense, strict=True):
        x, entry = run.dense(x, layer, past)
        dense.append(entry)
    for layer, past in zip(params.moe, held.moe, strict=True):
        x, entry, used = run.moe(x, layer, past, None)
        moe.append(entry)
        routes.append(used.astype(jnp.int16))
    hidden = rms_norm(x, params.norm, cfg.norm_eps)
    new = layers.replace(dense=tuple(dense), moe=tuple(moe), mtp=None)
    old = layers.replace(mtp=None)
    return Below(
        hidden=hidden,
        routes=jnp.stack(routes, 2) if routes else jnp.zeros((*tokens.shape, 0, 0), jnp.int16),
        layers=_append(old, new, slots, positions, real, hidden).replace(mtp=layers.mtp),
    )


def module(
    params: Params,
    below: Below,
    following: jax.Array,
    real: jax.Array,
    length: jax.Array | None,
    cfg: ModelConfig,
    slots: jax.Array | None = None,
) -> tuple[jax.Array, Layers]:
    """`c2.models.mtp.trunk` of the first prediction module, with a cache.

    Args:
      params: from `serving`.
      below: of new tokens, with what is cached.
      following: int32 [row, seq], the token after each.
      real: bool [row, seq].
      length: as in `trunk`.
      cfg: model configuration.
      slots: as in `trunk`.

    Returns:
      Hidden states for the head, [row, seq, embed], which predict the token after the following
      one; and the longer cache.
    """
    p, past = params.mtp[0], _held(below.layers.mtp, length, slots)
    run, positions = _blocks(real, length, cfg)
    with jax.named_scope("mtp_merge"):
        token = rms_norm(params.embed[following].astype(cfg.dtype), p.token_norm, cfg.norm_eps)
        state = rms_norm(below.hidden, p.hidden_norm, cfg.norm_eps)
        x = project(jnp.concatenate([token, state], axis=-1), p.merge)
    if isinstance(p.layer, MoELayer):
        x, entry, _ = run.moe(x, p.layer, past, None)
    else:
        x, entry = run.dense(x, p.layer, past)
    hidden = rms_norm(x, p.norm, cfg.norm_eps)
    longer = _append(below.layers.mtp, entry, slots, positions, real, hidden)
    return hidden, below.layers.replace(mtp=longer)


def _blocks(real, length, cfg):
    positions = next_positions(jnp.int32(0)[None] if length is None else length, real)
    angles = rope.tables(positions, cfg.rope, cfg.attention.rotary)
    info = Tokens(*angles, positions, real.astype(jnp.int32), length)
    return Blocks(cfg, info, blocks.attention, mixture, blocks.whole), positions


def _held(layers, length, slots):
    """What attention reads; nothing does without a length."""
    if slots is None or length is None:
        return layers
    return jax.tree.map(lambda x: x[slots], layers)


def _append(past, entries, slots, positions, real, hidden):
    """Adds the entries of new tokens; those of padding go nowhere."""
    # Where hidden states come into it, XLA:CPU sees that the cache is read before it is written
    # to. Else it copies all of it first, in every step. No real state is NaN.
    there = real & ~jnp.isnan(hidden[..., 0])
    rows = (jnp.arange(len(real)) if slots is None else slots)[:, None]

    def add(old, new):
        places = jnp.where(there, positions, old.shape[1])
        return old.at[rows, places].set(new.astype(old.dtype), mode="drop")

    return jax.tree.map(add, past, entries)
