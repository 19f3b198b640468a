"""The device's side: pure functions that read prompts, decode, and keep prefixes.

State goes in and comes out; jit donates it. What decides about a slot - which tokens come next,
how long it may live - comes from the host with every dispatch, so that the device holds nothing
that the host does not know but the cache itself. Rows are slots; a slot that does not live is
padding, routed to no expert, and leaves no trace.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from c2 import models
from c2.models import ModelConfig, Params
from c2.rollout import layers, sampling
from c2.rollout.config import EngineConfig
from c2.rollout.layers import Layers


@struct.dataclass
class State:
    """What stays on the device between dispatches."""

    layers: Layers
    kept: Layers  # of sequences that have ended, see `c2.rollout.prefixes`
    draft: jax.Array | None = None  # int32 [slot]
    draft_probs: jax.Array | None = None  # [slot, vocab], what the draft was drawn from


@struct.dataclass
class Slots:
    """What the host says of every slot before decoding; leaves [slot, ...]."""

    last: jax.Array  # int32, the newest token; the cache holds those before it
    length: jax.Array  # int32, tokens in the cache
    count: jax.Array  # int32, completion tokens so far
    budget: jax.Array  # int32, completion tokens at most
    live: jax.Array  # bool
    stop: jax.Array  # int32 [slot, max_stop], -1 for none
    forced: jax.Array  # int32 [slot, ahead], tokens dictated from ``count`` on, -1 for none
    temperature: jax.Array  # f32
    seed: jax.Array  # uint32
    request: jax.Array  # uint32
    top_k: jax.Array | None = None  # int32; None in training
    top_p: jax.Array | None = None  # f32
    has_draft: jax.Array | None = None  # bool, the state's draft is for this sequence
    drafts: jax.Array | None = None  # bool, the module's cache is complete


@struct.dataclass
class Chunk:
    """Tokens to be read into the cache; leaves [row, ...]."""

    slot: jax.Array  # int32, ``slots`` for a row of padding
    length: jax.Array  # int32, tokens in the slot's cache
    tokens: jax.Array  # int32 [row, chunk]
    following: jax.Array  # int32 [row, chunk], the token after each
    count: jax.Array  # int32, how many tokens are real; the rest is padding


@struct.dataclass
class Emitted:
    """Result of one step [slot, n] or of one dispatch [step, slot, n], n tokens a step at most.

    Where there is a token, the token before it was computed, with ``routes``.
    """

    tokens: jax.Array  # int32, -1 for none
    log_probs: jax.Array  # f32
    routes: jax.Array  # int16 [..., moe_layer, top_k]
    drafted: jax.Array  # bool [...] without n
    accepted: jax.Array  # bool


def empty_state(cfg: ModelConfig, engine: EngineConfig) -> State:
    """The state of an engine without sequences."""
    space = partial(layers.empty, cfg, capacity=engine.capacity, mtp=engine.speculate)
    state = State(layers=space(engine.slots), kept=space(engine.prefix_entries))
    if not engine.speculate:
        return state
    return state.replace(
        draft=jnp.zeros(engine.slots, jnp.int32),
        draft_probs=jnp.zeros((engine.slots, cfg.vocab), jnp.float32),
    )


def log_probs(hidden: jax.Array, params: Params, slots: Slots) -> jax.Array:
    """What is sampled from after hidden states [slot, ..., embed]: f32 [slot, ..., vocab]."""
    full = sampling.distribution(models.logits(hidden, params), slots.temperature)
    return full if slots.top_k is None else sampling.truncate(full, slots.top_k, slots.top_p)


def choose(sampled: jax.Array, slots: Slots, start: jax.Array) -> jax.Array:
    """The tokens that follow, int32 [slot]: dictated ones, else sampled ones."""
    place = jnp.clip(slots.count - start, 0, slots.forced.shape[1] - 1)[:, None]
    forced = jnp.take_along_axis(slots.forced, place, axis=1)[:, 0]
    return jnp.where(forced >= 0, forced, sampled)


def advance(slots: Slots, token: jax.Array) -> Slots:
    """The slots after one more token each, int32 [slot], -1 where there is none."""
    there = token >= 0
    count = slots.count + there
    ended = (token[:, None] == slots.stop).any(-1) | (count >= slots.budget)
    return slots.replace(
        last=jnp.where(there, token, slots.last),
        length=slots.length + there,
        count=count,
        live=slots.live & ~(there & ended),
    )


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """``values[slot, index[slot]]``, [slot]."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def plain_step(
    params: Params, state: State, slots: Slots, keys: jax.Array, start: jax.Array, cfg: ModelConfig
) -> tuple[State, Slots, Emitted]:
    """One token for every living slot; arguments as in `decode`."""
    live = slots.live
    below = layers.trunk(
        params, slots.last[:, None], live[:, None], state.layers, slots.length, cfg
    )
    with jax.named_scope("sample"):
        logp = log_probs(below.hidden[:, 0], params, slots)
        number = sampling.uniform(sampling.token_keys(keys, slots.count))
        token = choose(sampling.draw(number, jnp.exp(logp)), slots, start)
    emitted = Emitted(
        tokens=jnp.where(live, token, -1)[:, None],
        log_probs=at(logp, token)[:, None],
        routes=below.routes,
        drafted=jnp.zeros_like(live),
        accepted=jnp.zeros_like(live),
    )
    return state.replace(layers=below.layers), advance(slots, emitted.tokens[:, 0]), emitted


def decode(
    params: Params, state: State, slots: Slots, *, step: Callable, cfg: ModelConfig, steps: int
) -> tuple[State, Emitted]:
    """Up to ``steps`` steps, fewer if no slot lives on.

    Args:
      params: parameters.
      state: donate it.
      slots: as the host sees them.
      step: `plain_step` or `c2.rollout.speculation.step`.
      cfg: model configuration.
      steps: of one dispatch.

    Returns:
      The state, and what was emitted, [step, slot, n].
    """
    keys = sampling.request_keys(slots.seed, slots.request)
    start = slots.count

    def one(state, slots):
        return step(params, state, slots, keys, start, cfg)

    _, _, shapes = jax.eval_shape(one, state, slots)
    nothing = jax.tree.map(lambda s: jnp.zeros((steps, *s.shape), s.dtype), shapes)
    nothing = nothing.replace(tokens=nothing.tokens - 1)

    def body(carry):
        i, state, slots, out = carry
        state, slots, emitted = one(state, slots)
        return i + 1, state, slots, jax.tree.map(lambda o, e: o.at[i].set(e), out, emitted)

    def more(carry):
        i, _, slots, _ = carry
        return (i < steps) & slots.live.any()

    _, state, _, out = jax.lax.while_loop(more, body, (jnp.int32(0), state, slots, nothing))
    return state, out


def prefill(
    params: Params, state: State, chunk: Chunk, *, cfg: ModelConfig, first: bool
) -> tuple[State, jax.Array]:
    """Reads tokens of a few sequences into their slots.

    Args:
      params: parameters.
      state: donate it.
      chunk: the tokens.
      cfg: model configuration.
      first: the slots' caches are empty, which saves work; the chunk's lengths are 0 then.

    Returns:
      The state, and the tokens' routes int16 [row, chunk, moe_layer, top_k].
    """
    length = None if first else chunk.length
    real = jnp.arange(chunk.tokens.shape[1]) < chunk.count[:, None]
    below = layers.trunk(params, chunk.tokens, real, state.layers, length, cfg, chunk.slot)
    longer = below.layers
    if longer.mtp is not None:
        _, longer = layers.module(params, below, chunk.following, real, length, cfg, chunk.slot)
    return state.replace(layers=longer), below.routes


def keep(state: State, slot: jax.Array, entry: jax.Array) -> State:
    """Copies the cache of a slot to a place among those that are kept."""
    return state.replace(kept=_copied(state.layers, slot, state.kept, entry))


def take(state: State, entry: jax.Array, slot: jax.Array) -> State:
    """Copies a kept cache to a slot."""
    return state.replace(layers=_copied(state.kept, entry, state.layers, slot))


def _copied(source: Layers, row: jax.Array, target: Layers, to: jax.Array) -> Layers:
    return jax.tree.map(lambda s, t: t.at[to].set(s[row]), source, target)
