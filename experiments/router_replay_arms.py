"""What `router_replay` compares: a sampler in bf16, and trainers that replay its routes.

Contexts come from a text, and what is sampled is the token that follows. So all tokens that can be
are summed over, and the only noise in a gradient is that of rounding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from c2 import models
from c2.config import ConfigError
from c2.data import readers
from c2.data.config import Source
from c2.losses.config import PolicyGradientConfig
from c2.losses.policy_gradient import policy_gradient
from c2.models import MLAConfig, ModelConfig, MoEConfig, Params, moe
from c2.rl.replay import ReplayConfig
from c2.training.step import balance_routers
from experiments.nvfp4_model import Prediction, predict
from experiments.study import Run

TRAINER = ModelConfig(
    vocab=256,  # bytes
    hidden=64,
    layers=5,
    dense_layers=1,
    dense_intermediate=128,
    attention=MLAConfig(heads=4, q_lora=32, kv_lora=16, nope=16, rope=8, v=16),
    moe=MoEConfig(experts=16, top_k=4, intermediate=32),
)
SAMPLER = replace(TRAINER, dtype="bfloat16")
TEXT = "stdlib:email"
RATES = {"weights": 2e-3, "biases": 1e-3}  # of pretraining
DEFAULT = ReplayConfig().slack
FILTER = f"filter {DEFAULT:g}"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      seeds: models.
      rows: of a batch.
      context: tokens of a row that predict one.
      pretraining: steps.
      batches: that are sampled and learned from.
      wrong: share of the captured experts that are replaced by others at random.
      missing: share of the captured rows that are lost.
      rates: learning rates of the steps that make routes stale. The weights here are of about .1;
        1e-5 is to them what 2e-6 is to weights of .02.
      age: number of those steps.
      slacks: of the filter, among them the default of `c2.rl.replay`.
    """

    seeds: int = 3
    rows: int = 8
    context: int = 64
    pretraining: int = 200
    batches: int = 6
    wrong: float = 0.01
    missing: float = 0.1
    rates: tuple[float, ...] = (1e-5, 1e-4, 1e-3)
    age: int = 8
    slacks: tuple[float, ...] = (0.005, DEFAULT, 0.1)

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key in ("seeds", "rows", "context", "batches", "age"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least 1")
        if self.pretraining < 0:
            raise ConfigError(f"pretraining: {self.pretraining}; legal: at least 0")
        for key in ("wrong", "missing"):
            if not 0 < getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: above 0, below 1")
        if not self.rates or min(self.rates) <= 0:
            raise ConfigError(f"rates: {self.rates}; legal: at least one, above 0")
        if DEFAULT not in self.slacks or not all(0 < s < math.inf for s in self.slacks):
            raise ConfigError(f"slacks: {self.slacks}; legal: above 0, among them {DEFAULT}")

    @property
    def arms(self) -> dict[str, float]:
        """Slack by name: with 0 the filter leaves the router's own experts, with infinity all."""
        return {"none": 0.0, "strict": math.inf} | {f"filter {s:g}": s for s in self.slacks}


# --- The model learns ---


@partial(jax.jit, static_argnames="cfg")
def learn(
    params: Params,
    tokens: jax.Array,
    routes: jax.Array,
    slack: float,
    chances: jax.Array,
    advantages: jax.Array,
    cfg: ModelConfig,
) -> tuple[Params, Prediction]:
    """The gradient of what `policy_gradient` minimises, exact in every token that can be sampled.

    Args:
      params: of the policy that learns.
      tokens: int [row, token]; every one but the last is a context with those before it.
      routes: to replay, [row, context, moe_layer, top_k].
      slack: see `Config.arms`.
      chances: of all tokens under the policy that sampled, [row, context, vocab].
      advantages: of all tokens, [row, context, vocab].
      cfg: the model.

    Returns:
      The gradient of the mean over contexts, and what the policy says about them.
    """

    def loss(params: Params) -> tuple[jax.Array, Prediction]:
        experts = partial(moe.moe, slack=slack)
        out = predict(params, tokens[:, :-1], cfg, routes=routes, experts=experts)
        batch = {"weights": chances, "advantages": advantages, "sampled": jnp.log(chances)}
        batch["segment_ids"] = jnp.ones(chances.shape, jnp.int32)
        batch = {name: x.reshape(-1, cfg.vocab) for name, x in batch.items()}
        log_probs = out.log_p.reshape(-1, cfg.vocab)
        total, _ = policy_gradient(log_probs, batch, PolicyGradientConfig())
        return total / len(log_probs), out

    return jax.grad(loss, has_aux=True)(params)


def rewarded(chances: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Advantages of all tokens, if the one that the text goes on with has a reward of 1."""
    reward = np.eye(chances.shape[-1], dtype=np.float32)[tokens[:, 1:]]
    return reward - (chances * reward).sum(-1, keepdims=True)


def unknown(tokens: np.ndarray) -> np.ndarray:
    """Routes of tokens that none were captured of."""
    rows, length = tokens.shape
    shape = rows, length - 1, TRAINER.moe_layers, TRAINER.moe.top_k
    return np.full(shape, moe.OWN_ROUTE, np.int16)


def on_policy(params: Params, tokens: np.ndarray, cfg: ModelConfig) -> tuple[Params, Prediction]:
    """The exact gradient for samples of the policy itself, with its own experts."""
    nothing = np.zeros((*np.shape(tokens[:, 1:]), cfg.vocab), np.float32)
    of = partial(learn, params, tokens, unknown(tokens), 0.0, cfg=cfg)
    chances = np.exp(of(nothing, nothing)[1].log_p)
    return of(chances, rewarded(chances, tokens))


_ADAM = optax.scale_by_adam()


@jax.jit
def step(params: Params, state: Any, gradient: Params, rate: float) -> tuple[Params, Any]:
    """One of Adam."""
    updates, state = _ADAM.update(gradient, state)
    return jax.tree.map(lambda p, u: p - rate * u, params, updates), state


@jax.jit
def balanced(params: Params, routes: jax.Array) -> Params:
    """Selection biases towards equal load."""
    load = jax.vmap(lambda r: moe.expert_load(r, TRAINER.moe.experts), in_axes=2)(routes)
    return balance_routers(params, load, RATES["biases"])


def pretrained(seed: int, text: Iterator[np.ndarray], steps: int) -> Params:
    """A model that has learned to go on with the text."""
    params = jax.jit(models.init, static_argnums=1)(jax.random.key(seed, impl="rbg"), TRAINER)
    state = _ADAM.init(params)
    for _, tokens in zip(range(steps), text, strict=False):
        sampled = np.eye(TRAINER.vocab, dtype=np.float32)[tokens[:, 1:]]  # what is in the text
        gradient, out = learn(params, tokens, unknown(tokens), 0.0, sampled, sampled, TRAINER)
        params, state = step(params, state, gradient, RATES["weights"])
        params = balanced(params, out.routes)
    return params


def later(params: Params, text: Iterator[np.ndarray], steps: int, rate: float) -> Params:
    """The policy after some steps of reinforcement learning."""
    state = _ADAM.init(params)
    for _, tokens in zip(range(steps), text, strict=False):
        params, state = step(params, state, on_policy(params, tokens, TRAINER)[0], rate)
    return params


def excerpts(config: Config, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endlessly many batches from random places of the text, int32 [row, context + 1]."""
    limits = readers.Limits(suffixes=(".py",), max_bytes=500_000)
    documents, _ = readers.read(Source(path=TEXT), limits)
    text = np.frombuffer("\n".join(d.text for d in documents).encode(), np.uint8).astype(np.int32)
    while True:
        starts = rng.integers(len(text) - config.context, size=(config.rows, 1))
        yield text[starts + np.arange(config.context + 1)]


# --- What becomes of the routes ---


def with_wrong(
    routes: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Puts others in place of experts, and says where; no row names one twice."""
    noise = rng.random((*routes.shape[:-1], TRAINER.moe.experts))
    np.put_along_axis(noise, routes.astype(int), -1, axis=-1)
    others = np.argsort(-noise, axis=-1)[..., : routes.shape[-1]].astype(routes.dtype)
    wrong = rng.random(routes.shape) < share
    return np.where(wrong, others, routes), wrong


def with_missing(routes: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Leaves out whole rows."""
    lost = rng.random(routes.shape[:-1]) < share
    return np.where(lost[..., None], np.int16(moe.OWN_ROUTE), routes)


class Sample(NamedTuple):
    """What the sampler records of a batch."""

    tokens: np.ndarray  # [row, context + 1]
    log_p: np.ndarray  # of all tokens, [row, context, vocab]
    chosen: np.ndarray  # the sampled token, [row, context, 1]
    routes: np.ndarray  # [row, context, moe_layer, top_k]
    gradient: Params  # exact, see `on_policy`


def sampled(params: Params, tokens: np.ndarray, rng: np.random.Generator) -> Sample:
    """Samples a token in every context."""
    gradient, out = on_policy(params, tokens, SAMPLER)
    log_p = np.asarray(out.log_p)
    chosen = (log_p + rng.gumbel(size=log_p.shape)).argmax(-1)[..., None]
    return Sample(tokens, log_p, chosen, np.asarray(out.routes), gradient)


class Condition(NamedTuple):
    """What a trainer has.

    Attributes:
      params: its weights.
      routes: what it was sent, by batch.
      wrong: which experts are not those that were chosen, by batch.
      exact: the gradient that the sampler would have with these weights, on its own samples.
    """

    params: Params
    routes: list[np.ndarray]
    wrong: list[np.ndarray]
    exact: Params


def names(config: Config) -> list[str]:
    """Of the conditions."""
    rates = [np.format_float_scientific(r, trim="-", exp_digits=1) for r in config.rates]
    stale = [f"{config.age} steps of {rate} old" for rate in rates]
    return ["clean", f"{config.wrong:.0%} wrong", f"{config.missing:.0%} missing", *stale]


def conditions(
    config: Config, params: Params, samples: list[Sample], seed: int
) -> dict[str, Condition]:
    """All of them, by name; the same samples in each."""
    rng = np.random.default_rng([seed, 1])
    clean = [s.routes for s in samples]
    sound = [np.zeros(r.shape, bool) for r in clean]
    changed, wrong = zip(*(with_wrong(r, config.wrong, rng) for r in clean), strict=True)
    fewer = [with_missing(r, config.missing, rng) for r in clean]
    exact = summed([s.gradient for s in samples])
    found = [
        Condition(params, clean, sound, exact),
        Condition(params, list(changed), list(wrong), exact),
        Condition(params, fewer, sound, exact),
    ]
    for rate in config.rates:
        text = excerpts(config, np.random.default_rng([seed, 2]))
        state = later(params, text, config.age, rate)
        exact = summed([on_policy(state, s.tokens, SAMPLER)[0] for s in samples])
        found.append(Condition(state, clean, sound, exact))
    return dict(zip(names(config), found, strict=True))


def summed(trees: list[Any]) -> Any:
    """Leaf by leaf."""
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


# --- Measuring ---


class Outcome(NamedTuple):
    """What an arm makes of a condition.

    Attributes:
      gaps: |log-probability in the trainer - recorded one| of the sampled tokens, nats [token].
      error: distance to the exact on-policy gradient of the sampler with the trainer's weights,
        relative to its length.
      cosine: between the two.
      missing: share of the rows of routes that were not captured.
      replaced: share of the experts in the others that the trainer did not use.
      found: the same of wrong experts; NaN without any.
      lost: the same of sound ones.
    """

    gaps: np.ndarray
    error: float
    cosine: float
    missing: float
    replaced: float
    found: float
    lost: float

    @property
    def p99(self) -> float:
        """Of the gaps."""
        return np.quantile(self.gaps, 0.99)


def train(condition: Condition, samples: list[Sample], slack: float) -> Outcome:
    """Compares the trainer with the sampler's records, and its gradient with the exact one."""
    gradients, gaps, counts, other = [], [], [], []
    for sample, given in zip(samples, condition.routes, strict=True):
        chances = np.exp(sample.log_p)
        gradient, out = learn(
            condition.params, sample.tokens, given, slack, chances,
            rewarded(chances, sample.tokens), TRAINER,
        )  # fmt: skip
        used = np.asarray(out.routes)
        gap = np.take_along_axis(np.asarray(out.log_p) - sample.log_p, sample.chosen, axis=-1)
        gradients.append(gradient)
        gaps.append(np.abs(gap).ravel())
        counts.append(moe.replay_counts(given, used, TRAINER.moe.experts))
        other.append((given != used) & (given >= 0))
    total, count = summed(gradients), {k: float(v) for k, v in summed(counts).items()}
    lengths = optax.tree.norm(total), optax.tree.norm(condition.exact)
    other, wrong = np.array(other), np.array(condition.wrong)
    known = np.array(condition.routes) >= 0
    return Outcome(
        gaps=np.concatenate(gaps),
        error=float(optax.tree.norm(optax.tree.sub(total, condition.exact)) / lengths[1]),
        cosine=float(optax.tree.vdot(total, condition.exact) / (lengths[0] * lengths[1])),
        missing=count["missing"] / count["routes"],
        replaced=count["replaced"] / ((count["routes"] - count["missing"]) * TRAINER.moe.top_k),
        found=other[wrong].mean() if wrong.any() else math.nan,
        lost=other[known & ~wrong].mean(),
    )


Found = dict[str, dict[str, list[Outcome]]]  # by condition and arm, of every seed


def measure(config: Config, run: Run) -> Found:
    """All arms in all conditions with every seed."""
    found: Found = {name: {arm: [] for arm in config.arms} for name in names(config)}
    for seed in range(config.seeds):
        rng = np.random.default_rng(seed)
        text = excerpts(config, rng)
        params = pretrained(seed, text, config.pretraining)
        samples = [sampled(params, next(text), rng) for _ in range(config.batches)]
        for name, condition in conditions(config, params, samples, seed).items():
            for arm, slack in config.arms.items():
                found[name][arm].append(train(condition, samples, slack))
        run.console.print(f"model {seed + 1} of {config.seeds} trained", highlight=False)
    return found
