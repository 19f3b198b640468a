"""What `inflight_updates` compares: policies that train on, and engines that take them in.

A clock of forward passes decides when a version is there, so that nothing depends on the machine.
A pass is one decoding step of all slots, or one chunk of a few prompts: both read all weights once,
which is what they cost on an accelerator as long as few tokens share them.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from c2 import models
from c2.config import ConfigError
from c2.models import MLAConfig, ModelConfig, MoEConfig, Params, RopeConfig, moe
from c2.records import Completion
from c2.rollout.config import EngineConfig, Request
from c2.rollout.device import Device
from c2.rollout.scheduler import Scheduler, run

ARMS = ("keep", "recompute", "waiting")
RATE = 3e-3  # of pretraining
ROWS, LENGTH = 16, 64  # of a training step, in tokens
BATCH = 16  # sequences of one forward pass of the trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      seeds: independent repetitions.
      pretraining: steps before the first version.
      rates: learning rates of the versions, ascending.
      versions: updates that come.
      interval: forward passes between two of them.
      horizon: forward passes of the comparison; what runs then, goes on to its end.
      slots: sequences at a time.
      prompt: tokens of a prompt.
      median: of the lengths of completions, which are log-normal.
      spread: standard deviation of the logarithm of the length.
      longest: completion, in tokens.
    """

    seeds: int = 3
    pretraining: int = 200
    rates: tuple[float, ...] = (1e-5, 1e-4, 1e-3)
    versions: int = 12
    interval: int = 60
    horizon: int = 480
    slots: int = 8
    prompt: int = 16
    median: int = 40
    spread: float = 0.8
    longest: int = 176

    def __post_init__(self) -> None:
        """Checks ranges."""
        for key in ("seeds", "versions", "interval", "horizon", "slots", "median", "longest"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least 1")
        if self.pretraining < 0:
            raise ConfigError(f"pretraining: {self.pretraining}; legal: at least 0")
        if not 1 <= self.prompt < LENGTH:
            raise ConfigError(f"prompt: {self.prompt}; legal: 1 to {LENGTH - 1}")
        if not self.spread > 0:
            raise ConfigError(f"spread: {self.spread}; legal: above 0")
        if not self.rates or list(self.rates) != sorted(set(self.rates)) or self.rates[0] <= 0:
            raise ConfigError(f"rates: {self.rates}; legal: at least one, above 0, ascending")


MODEL = ModelConfig(
    vocab=64,
    hidden=64,
    layers=3,
    dense_layers=1,
    dense_intermediate=128,
    attention=MLAConfig(heads=4, q_lora=32, kv_lora=16, nope=16, rope=8, v=16),
    moe=MoEConfig(experts=8, top_k=2, intermediate=32, scale=1.0),
    rope=RopeConfig(theta=10_000.0),
)


@jax.jit
def initial(seed: int) -> Params:
    """Random parameters, by a generator that compiles in a moment."""
    return models.init(jax.random.key(seed, impl="rbg"), MODEL)


def build_device(config: Config) -> Device:
    """The engine's programs, compiled once; every run swaps weights into it."""
    engine = EngineConfig(
        slots=config.slots,
        capacity=max(config.prompt + config.longest, LENGTH),
        prefill_rows=max(config.slots // 2, 1),
        prefill_chunk=32,
        steps=4,
    )
    return Device(initial(0), MODEL, engine)


class Learner:
    """Adam on weighted log-likelihood: of a corpus, or of own samples by their advantage."""

    def __init__(self) -> None:
        self._adam = optax.scale_by_adam()

        def loss(params: Params, tokens: jax.Array, weights: jax.Array) -> jax.Array:
            logits = models.forward(params, tokens[:, :-1], MODEL).logits
            log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
            chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
            return -(weights[:, 1:] * chosen).mean()

        @jax.jit
        def step(params, state, tokens, weights, rate):
            update, state = self._adam.update(jax.grad(loss)(params, tokens, weights), state)
            return jax.tree.map(lambda p, u: p - rate * u, params, update), state

        self._step = step

    def pretrained(self, config: Config, rng: np.random.Generator) -> Params:
        """A policy that has learned a random Markov chain."""
        chain = rng.dirichlet(np.full(MODEL.vocab, 0.1), MODEL.vocab).cumsum(-1)
        params = initial(int(rng.integers(2**31)))
        state, weights = self._adam.init(params), np.ones((ROWS, LENGTH), np.float32)
        for _ in range(config.pretraining):
            tokens = rng.integers(MODEL.vocab, size=(ROWS, LENGTH))
            for place in range(1, LENGTH):
                draws = rng.random((ROWS, 1))
                tokens[:, place] = (chain[tokens[:, place - 1]] < draws).sum(-1)
            tokens = np.minimum(tokens, MODEL.vocab - 1)  # sums may end just below 1
            params, state = self._step(params, state, tokens, weights, RATE)
        return params

    def versions(self, base: Params, samples: np.ndarray, prompt: int, rate: float) -> list[Params]:
        """The policy before and after each step on a batch of own samples [step, row, token].

        The reward is the share of tokens in the lower half of the vocabulary, and the advantage
        what it is above the batch's mean.
        """
        policies, state = [base], self._adam.init(base)
        for tokens in samples:
            reward = (tokens[:, prompt:] < MODEL.vocab // 2).mean(-1)
            weights = np.zeros(tokens.shape, np.float32)
            weights[:, prompt:] = (reward - reward.mean())[:, None]
            params, state = self._step(policies[-1], state, tokens, weights, rate)
            policies.append(params)
        return policies


def sample(device: Device, base: Params, config: Config, seed: int) -> np.ndarray:
    """A batch of samples for every version, int32 [version, row, token]."""
    device.swap(device.place(base))
    rng = np.random.default_rng(seed)
    prompts = rng.integers(MODEL.vocab, size=(config.versions * ROWS, config.prompt))
    done = run(
        Scheduler(device, device.engine, MODEL.vocab),
        [
            Request(prompt=prompt.tolist(), max_tokens=LENGTH - config.prompt, seed=seed, id=i)
            for i, prompt in enumerate(prompts)
        ],
    )
    rows = [np.concatenate([c.prompt, c.tokens]) for c in done]
    return np.reshape(rows, (config.versions, ROWS, LENGTH))


class Counting:
    """A device that counts passes; `Scheduler` and `Engine` see no difference."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def prefill(self, chunk: Any) -> np.ndarray:
        """See `Device`."""
        self.passes += 1
        return self._device.prefill(chunk)

    def decode(self, slots: Any, *, speculate: bool = False) -> Any:
        """See `Device`."""
        emitted = self._device.decode(slots, speculate=speculate)
        self.passes += int((emitted.tokens >= 0).any((1, 2)).sum())
        return emitted


class Trace(NamedTuple):
    """What an arm did.

    Attributes:
      completions: of all sequences, with the newest version that was there when each had ended.
      tokens: emitted up to the horizon.
      passes: that were made until then.
      slots: passes and sequences that had a slot, of every round [round, 2].
      seconds: of the wall.
      pauses: seconds for which each update held sequences up.
    """

    completions: list[tuple[Completion, int]]
    tokens: int
    passes: int
    slots: np.ndarray
    seconds: float
    pauses: list[float]


def requests(config: Config, seed: int) -> Iterator[Request]:
    """Endlessly many; no token ends them, so that all arms have the same lengths."""
    rng, count = np.random.default_rng([seed, 1]), 0
    while True:
        length = int(rng.lognormal(np.log(config.median), config.spread))
        prompt = rng.integers(MODEL.vocab, size=config.prompt).tolist()
        length = min(max(length, 1), config.longest)
        yield Request(prompt=prompt, max_tokens=length, seed=seed, id=count)
        count += 1


def drive(device: Device, placed: list[Params], arm: str, config: Config, seed: int) -> Trace:
    """Keeps all slots busy while versions come.

    Args:
      device: from `build_device`.
      placed: the policies by version, from `Device.place`.
      arm: ``waiting`` begins no sequence while a version waits for those that run, and changes to
        the newest when all have ended; the others change at once.
      config: sizes.
      seed: of the requests.
    """
    after_update = "recompute" if arm == "recompute" else "keep"
    engine = dataclasses.replace(device.engine, after_update=after_update)
    device.swap(placed[0])
    counting = Counting(device)
    scheduler = Scheduler(counting, engine, MODEL.vocab)
    ended: list[tuple[Completion, int]] = []
    queue, begun, slots, pauses = requests(config, seed), 0, [], []
    tokens, passes = 0, 0
    began = time.perf_counter()

    def emit(event: Any) -> None:
        if isinstance(event, Completion):
            ended.append((event, min(counting.passes // config.interval, config.versions)))

    while counting.passes < config.horizon or not scheduler.idle:
        newest = min(counting.passes // config.interval, config.versions)
        outdated = newest > scheduler.version
        if outdated and (arm != "waiting" or scheduler.idle):
            pauses.append(scheduler.pause_s)  # of the update before, caches included
            scheduler.update(placed[newest], newest)
            outdated = False
        if counting.passes < config.horizon and not (outdated and arm == "waiting"):
            while begun - len(ended) < config.slots:
                scheduler.submit(next(queue), emit)
                begun += 1
        slots.append((counting.passes, begun - len(ended)))
        scheduler.round()
        if slots[-1][0] < config.horizon:
            tokens, passes = scheduler.metrics()["tokens"], counting.passes
    seconds = time.perf_counter() - began
    pauses = [*pauses[1:], scheduler.pause_s]
    return Trace(ended, tokens, passes, np.array(slots), seconds, pauses)


class Tokens(NamedTuple):
    """All completion tokens of a run, arrays [token]; gaps are absolute, in nats.

    Attributes:
      age: versions that had come since, when the token's sequence ended.
      since: tokens of the sequence since the weights last changed in it; -1 before that.
      own: recorded log-probability against a forward pass of the recorded version.
      replayed: the same with the recorded routes replayed, as a trainer does.
      newest: replayed, of the version that was the newest when the sequence ended.
    """

    age: np.ndarray
    since: np.ndarray
    own: np.ndarray
    replayed: np.ndarray
    newest: np.ndarray


@jax.jit
def _log_probs(
    params: Params, tokens: jax.Array, real: jax.Array, routes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities [row, token - 1] of tokens after the first, with own and given routes."""

    def of(routes):
        out = models.forward(params, tokens, MODEL, segment_ids=real, routes=routes)
        log_probs = jax.nn.log_softmax(out.logits.astype(jnp.float32))[:, :-1]
        return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]

    return jax.lax.map(of, jnp.stack([jnp.full_like(routes, moe.OWN_ROUTE), routes]))


def gaps(policies: list[Params], trace: Trace, capacity: int) -> Tokens:
    """Compares what was recorded with what a trainer computes.

    Args:
      policies: by version.
      trace: of an arm.
      capacity: tokens of the longest sequence.
    """
    wanted: dict[int, list[int]] = {}
    for i, (c, newest) in enumerate(trace.completions):
        for version in {*c.versions.tolist(), newest}:
            wanted.setdefault(version, []).append(i)
    computed: dict[tuple[int, int], np.ndarray] = {}
    for version, sequences in wanted.items():
        for at in range(0, len(sequences), BATCH):
            some = sequences[at : at + BATCH]
            batch = _batch([trace.completions[i][0] for i in some], capacity)
            rows = np.swapaxes(_log_probs(policies[version], *batch), 0, 1)
            computed |= {(i, version): row for i, row in zip(some, rows, strict=False)}
    parts = [_compared(c, newest, i, computed) for i, (c, newest) in enumerate(trace.completions)]
    return Tokens(*map(np.concatenate, zip(*parts, strict=True)))


def _compared(
    c: Completion, newest: int, i: int, computed: dict[tuple[int, int], np.ndarray]
) -> Tokens:
    places = np.arange(len(c.tokens))
    at = len(c.prompt) - 1 + places
    own, replayed = np.array(
        [computed[i, version][:, place] for version, place in zip(c.versions, at, strict=True)]
    ).T
    changed = np.where(np.diff(c.versions, prepend=c.versions[0]) > 0, places, -1)
    last = np.maximum.accumulate(changed)
    return Tokens(
        age=newest - c.versions,
        since=np.where(last < 0, -1, places - last),
        own=np.abs(c.log_probs - own),
        replayed=np.abs(c.log_probs - replayed),
        newest=np.abs(c.log_probs - computed[i, newest][1, at]),
    )


def _batch(completions: list[Completion], capacity: int) -> tuple[np.ndarray, ...]:
    tokens = np.zeros((BATCH, capacity), np.int32)
    real = np.zeros((BATCH, capacity), np.int32)
    shape = (BATCH, capacity, MODEL.moe_layers, MODEL.moe.top_k)
    routes = np.full(shape, moe.NO_TOKEN, np.int32)
    for row, c in enumerate(completions):
        ids = np.concatenate([c.prompt, c.tokens])
        tokens[row, : len(ids)], real[row, : len(ids)] = ids, 1
        routes[row, : len(ids)] = c.routes
    return tokens, real, routes
