"""Speculative decoding with the model's prediction module (report section 3.1).

The module drafts the token after the next one. A step feeds the newest token and its draft
together, `c2.models.speculative.verify` decides about the draft from the model's distribution, and
an accepted draft's own logits give a second token. Tokens are distributed as without drafts, their
log-probabilities are the model's, and a rejected draft's cache entry is overwritten by the next.
"""

import jax
import jax.numpy as jnp

from c2.models import ModelConfig, Params, speculative
from c2.rollout import layers, sampling
from c2.rollout.programs import Emitted, Slots, State, advance, at, choose, log_probs

DRAFTS = 1  # folded into a token's key for the draft of the token after it


def step(
    params: Params, state: State, slots: Slots, keys: jax.Array, start: jax.Array, cfg: ModelConfig
) -> tuple[State, Slots, Emitted]:
    """One or two tokens for every living slot; arguments as in `c2.rollout.programs.decode`."""
    length, drafted = slots.length, slots.live & slots.has_draft
    tokens = jnp.stack([slots.last, state.draft], axis=1)
    real = jnp.stack([slots.live, drafted], axis=1)
    below = layers.trunk(params, tokens, real, state.layers, length, cfg)
    with jax.named_scope("verify"):
        logp = log_probs(below.hidden, params, slots)
        probs = jnp.exp(logp)
        key = sampling.token_keys(keys, slots.count)
        verified = jax.vmap(speculative.verify)(key, state.draft, probs[:, 0], state.draft_probs)
        undrafted = sampling.draw(sampling.uniform(key), probs[:, 0])
        first = choose(jnp.where(drafted, verified.token, undrafted), slots, start)
        first = jnp.where(slots.live, first, -1)
        slots = advance(slots, first)
        accepted = drafted & (first == state.draft)
        key = sampling.token_keys(keys, slots.count)
        second = choose(sampling.draw(sampling.uniform(key), probs[:, 1]), slots, start)
        second = jnp.where(accepted & slots.live, second, -1)
        slots = advance(slots, second)
    with jax.named_scope("draft"):
        emitted = jnp.stack([first, second], axis=1)
        following, real = jnp.maximum(emitted, 0), emitted >= 0
        hidden, longer = layers.module(params, below, following, real, length, cfg)
        newest = jnp.where((second >= 0)[:, None], hidden[:, 1], hidden[:, 0])
        draft_probs = jnp.exp(log_probs(newest, params, slots))
        key = sampling.token_keys(sampling.token_keys(keys, slots.count), DRAFTS)
        draft = sampling.draw(sampling.uniform(key), draft_probs)
    emitted = Emitted(
        tokens=emitted,
        log_probs=jnp.stack([at(logp[:, i], following[:, i]) for i in range(2)], axis=1),
        routes=below.routes,
        drafted=drafted,
        accepted=accepted,
    )
    state = state.replace(layers=longer, draft=draft, draft_probs=draft_probs)
    return state, slots.replace(has_draft=slots.drafts), emitted
