"""Speculative sampling tried out: a module's drafts of real text, sampled and verified."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from c2.models import ModelConfig, Params, speculative
from c2.training.pretrain import model_and_draft


class Check(NamedTuple):
    """Drafts of one module, sampled and verified on held-out text.

    Attributes:
      analytic: mean of ``sum_x min(p, q)``.
      sampled: share of accepted drafts.
      output: how far the emitted tokens are from the model's distribution, see `excess`.
      drafts: the same of the drafts as they were before verification.
    """

    analytic: float
    sampled: float
    output: float
    drafts: float


def verify_drafts(
    params: Params,
    cfg: ModelConfig,
    tokens: np.ndarray,
    *,
    repeats: int,
    contexts: int,
    samples: int,
    batch: int = 8,
) -> Check:
    """Drafts and verifies tokens of a text, all of them and a few many times.

    Args:
      params: of a model with a prediction module.
      cfg: its configuration.
      tokens: int [window, context], at least ``batch`` windows; those that fill no batch are left
        out.
      repeats: how often every token is drafted.
      contexts: windows whose last token shows the distribution of the output.
      samples: how often each of those is drafted.
      batch: windows at a time.
    """
    count = len(tokens) // batch
    windows = tokens[: count * batch]
    keys = jax.random.split(jax.random.key(0), count)
    rates = [
        _verify_all(params, part, key, cfg, repeats)
        for part, key in zip(np.split(windows, count), keys, strict=True)
    ]
    chosen = windows[np.linspace(0, len(windows) - 1, contexts).astype(int)]
    probs, output, drafts = np.array(_verify_last(params, chosen, keys[0], cfg, samples))
    analytic, sampled = np.mean(rates, axis=0)
    return Check(analytic, sampled, excess(output, probs), excess(drafts, probs))


@partial(jax.jit, static_argnames=("cfg", "repeats"))
def _verify_all(params, tokens, key, cfg, repeats):
    """Expected and sampled acceptance of a batch, f32 [2]."""
    p, q = model_and_draft(params, tokens, cfg)

    def once(key):
        draw, check = jax.random.split(key)
        draft = jax.random.categorical(draw, jnp.log(q))
        return speculative.verify(check, draft, p, q).accepted.mean()

    sampled = jax.lax.map(once, jax.random.split(key, repeats)).mean()
    return jnp.stack([speculative.acceptance(p, q).mean(), sampled])


@partial(jax.jit, static_argnames=("cfg", "samples"))
def _verify_last(params, tokens, key, cfg, samples):
    """Model's probabilities of the last token, counts of output and of drafts, [3, row, vocab]."""
    p, q = (probs[:, -1] for probs in model_and_draft(params, tokens, cfg))

    def one(row):
        key, p, q = row
        draw, check = jax.random.split(key)
        draft = jax.random.categorical(draw, jnp.log(q), shape=(samples,))
        wide = (jnp.broadcast_to(probs, (samples, len(probs))) for probs in (p, q))
        emitted = speculative.verify(check, draft, *wide).token
        return jnp.stack([p, *(jnp.bincount(ids, length=len(p)) for ids in (emitted, draft))])

    keys = jax.random.split(key, len(tokens))
    return jnp.moveaxis(jax.lax.map(one, (keys, p, q)), 1, 0)


def excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square of counts against probabilities, in standard deviations above its mean.

    Args:
      counts: [context, token].
      probs: [context, token]; rare tokens are counted together with the rarest that is expected
        five times.
    """
    statistic = freedom = 0.0
    for count, prob in zip(counts, np.float64(probs), strict=True):
        expected = count.sum() * prob / prob.sum()
        order = np.argsort(-expected)
        cells = max(int((expected >= 5).sum()), 1)
        cell = np.minimum(np.arange(len(order)), cells - 1)
        seen, mean = (np.bincount(cell, weights=x[order]) for x in (count, expected))
        statistic += ((seen - mean) ** 2 / mean).sum()
        freedom += cells - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)
