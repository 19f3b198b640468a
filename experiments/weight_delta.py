"""How much of the bf16 weights does a training step change, and what does sending that cost?

The report ships weights as deltas: a few GB for a trillion parameters (section 6). With an f32
master the place of a weight between two bf16 numbers is as good as random, so a move by d changes
the stored number with probability min(1, d / ulp), and the changed fraction of weights N(0, s) is
a sum over powers of two. Here every weight moves by the learning rate, as in a step of Adam whose
moments agree, which is the most that such a step can change.

    python -m launch.main --config=experiments/weight_delta.py --workdir=runs/weight_delta

Expect .6 % of the weights changed at a rate of 1e-7, 4.2 % at 1e-6 and 25 % at 1e-5, all on the
closed form; .009, .046 and .20 bytes per parameter by the gap code, half of the XOR's at 1e-6; and
a chain of 25 published steps that every reader rebuilds bit for bit.
About 20 seconds on 2 cores; `weight_delta.py:smoke` uses fewer weights.
"""

import dataclasses
import functools
import math
import tempfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import zstandard

from c2.config import ConfigError
from c2.weights import codec
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.shards import wants, whole
from c2.weights.store import open_store
from c2.weights.subscriber import Subscriber
from experiments import plotting
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("full", "smoke")

RATE = 1e-6  # of the chain and of the comparisons at one rate
BYTES = 0.055  # per parameter at RATE, at most
SPARSE = 0.1  # changed fraction below which the gap code should be the smaller one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      numbers: weights per seed.
      scale: their standard deviation.
      seeds: independent repetitions.
      rates: learning rates, ascending; among them 1e-6.
      every: numbers of steps between two versions, ascending from 1.
      chain_numbers: weights of the published chain.
      chain_steps: its length.
    """

    numbers: int = 1 << 22
    scale: float = 0.02
    seeds: int = 3
    rates: tuple[float, ...] = (1e-8, 3e-8, 1e-7, 3e-7, RATE, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    every: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    chain_numbers: int = 1 << 18
    chain_steps: int = 25

    def __post_init__(self) -> None:
        """Checks ranges."""
        least = {"numbers": 1000, "seeds": 1, "chain_numbers": 1, "chain_steps": 1}
        for key, bound in least.items():
            if getattr(self, key) < bound:
                raise ConfigError(f"{key}: {getattr(self, key)}; legal: at least {bound}")
        if not self.scale > 0:
            raise ConfigError(f"scale: {self.scale}; legal: above 0")
        if list(self.rates) != sorted(set(self.rates)) or RATE not in self.rates:
            raise ConfigError(f"rates: {self.rates}; legal: ascending, among them {RATE:g}")
        if list(self.every) != sorted(set(self.every)) or self.every[:1] != (1,):
            raise ConfigError(f"every: {self.every}; legal: ascending from 1")


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's sizes."""
    match variant:
        case "full":
            return Config()
        case "smoke":
            return Config(numbers=1 << 18, rates=(RATE, 1e-5, 1e-3), every=(1, 8), chain_steps=5)
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


def expected_fraction(distance: float, scale: float) -> float:
    """E[min(1, distance / ulp(w))] of bf16 for w ~ N(0, scale): the sum over binades of |w|."""
    total = 0.0
    for exponent in range(-126, 8):
        below, above = (math.erf(2.0**e / scale / math.sqrt(2)) for e in (exponent, exponent + 1))
        total += (above - below) * min(1.0, distance / 2.0 ** (exponent - 7))
    return total


def expected_after(steps: int, rate: float, scale: float) -> float:
    """The changed fraction after a walk of so many steps with random signs."""
    return sum(
        math.comb(steps, ups) / 2**steps * expected_fraction(abs(2 * ups - steps) * rate, scale)
        for ups in range(steps + 1)
    )


def entropy_bound(fraction: float) -> float:
    """Bytes per number that places and signs of independent changes carry."""
    if fraction in (0, 1):
        return fraction / 8
    rest = 1 - fraction
    return (fraction - fraction * math.log2(fraction) - rest * math.log2(rest)) / 8


class Size(NamedTuple):
    """What a delta of some weights takes, per number."""

    fraction: float  # changed
    stored: float  # bytes, by `c2.weights.codec`
    xor: float  # bytes, by zstd on the exclusive or in byte planes


def compare(new: np.ndarray, old: np.ndarray) -> Size:
    """Encodes f32 masters' bf16 numbers, in pieces as `Publisher` does."""
    new, old = (codec.bits(x.astype(ml_dtypes.bfloat16)) for x in (new, old))
    chunk, compressor = PublisherConfig().chunk, zstandard.ZstdCompressor(level=codec.LEVEL)
    stored = xor = 0
    for start in range(0, new.size, chunk):
        piece, base = new[start : start + chunk], old[start : start + chunk]
        stored += len(codec.encode(piece, base).data)
        planes = (piece ^ base).view(np.uint8).reshape(-1, 2).T
        xor += len(compressor.compress(np.ascontiguousarray(planes)))
    return Size(np.count_nonzero(new != old) / new.size, stored / new.size, xor / new.size)


class Values(NamedTuple):
    """What was measured."""

    rates: Size  # of arrays [seed, rate]
    every: Size  # of arrays [seed, every], at RATE
    wrong: np.ndarray  # [seed], bytes that readers of the chain had wrong, of all steps
    chain: np.ndarray  # [seed], bytes per parameter of its deltas


def measure(config: Config, run: Run) -> Values:
    """All arms with every seed."""
    rates, every, chains = [], [], []
    for seed in range(config.seeds):
        run.console.print(f"seed {seed}: {config.numbers:,} weights")
        rng = np.random.default_rng(seed)
        weights = rng.normal(0, config.scale, config.numbers).astype(np.float32)
        rates.append([compare(weights + _signs(rng, weights) * r, weights) for r in config.rates])
        walk, sizes = weights.copy(), []
        for step in range(1, config.every[-1] + 1):
            walk += _signs(rng, walk) * np.float32(RATE)
            if step in config.every:
                sizes.append(compare(walk, weights))
        every.append(sizes)
        chains.append(_chain(config, rng))
    sizes = (Size(*np.moveaxis(np.array(arm), -1, 0)) for arm in (rates, every))
    return Values(*sizes, *np.array(chains).T)


def _signs(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    return rng.integers(0, 2, like.size, np.int8).astype(np.float32) * 2 - 1


def _chain(config: Config, rng: np.random.Generator) -> tuple[int, float]:
    """Publishes a walk and reads it from the start, and again from its anchors at the end."""
    weights = rng.normal(0, config.scale, config.chain_numbers).astype(np.float32)
    wrong, stored = 0, []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        with Publisher(store, PublisherConfig(anchor_every=10), owner="weight_delta") as publisher:
            for step in range(config.chain_steps + 1):
                state = {"weights": weights.astype(ml_dtypes.bfloat16)}
                publisher.publish(step, whole(state))
                stored.append(publisher.wait().stored / weights.size)
                if step == 0:
                    early = Subscriber(store, wants(state))
                late = Subscriber(store, wants(state))
                for reader in (early, late):
                    reader.poll()
                    held = codec.bits(reader.current.tensors["weights"])
                    wrong += np.count_nonzero(held != codec.bits(state["weights"]))
                weights += _signs(rng, weights) * np.float32(RATE)
    return wrong, np.mean(stored[1:])


def judge(config: Config, values: Values) -> list[Claim]:
    """The claims."""
    claim = functools.partial(Claim, seeds=config.seeds)
    closed = [expected_fraction(rate, config.scale) for rate in config.rates]
    walked = [expected_after(steps, RATE, config.scale) for steps in config.every]
    sparse = values.rates.fraction.mean(0) < SPARSE
    at = config.rates.index(RATE)
    per_step = values.every.stored.mean(0) / config.every
    most = config.every[-1]
    return [
        claim(
            statement="The changed fraction is E[min(1, rate / ulp)] at every learning rate"
            " (largest relative difference of the mean over seeds)",
            measured=np.abs(values.rates.fraction.mean(0) / closed - 1).max(),
            relation="<=",
            bound=0.02,
        ),
        claim(
            statement="After several steps with random signs it is that of the distance walked"
            " (largest relative difference of the mean over seeds)",
            measured=np.abs(values.every.fraction.mean(0) / walked - 1).max(),
            relation="<=",
            bound=0.02,
        ),
        claim(
            statement=f"At a rate of {RATE:g} a delta takes at most {BYTES} bytes per parameter"
            " (largest of all seeds)",
            measured=values.rates.stored[:, at].max(),
            relation="<=",
            bound=BYTES,
            note=f"Places and signs alone carry {entropy_bound(closed[at]):.4f}.",
        ),
        claim(
            statement=f"Below {SPARSE:.0%} changed weights the codec is never larger than zstd on"
            " the XOR in byte planes (largest ratio)",
            measured=(values.rates.stored / values.rates.xor)[:, sparse].max(initial=0),
            relation="<=",
            bound=1,
        ),
        claim(
            statement=f"One version every {most} steps costs at most a quarter per step of one"
            " every step (ratio of mean bytes)",
            measured=per_step[-1] / per_step[0],
            relation="<=",
            bound=0.25,
            note="Random signs: most of a walk takes itself back. A steady drift would not.",
        ),
        claim(
            statement=f"Readers of a chain of {config.chain_steps} deltas have every bit, from its"
            " start and from its anchors (wrong numbers, all seeds and steps)",
            measured=values.wrong.sum(),
            relation="<=",
            bound=0,
        ),
    ]


def rate_table(config: Config, values: Values) -> list[dict[str, Any]]:
    """One row per learning rate, means over seeds."""
    rows = []
    for i, rate in enumerate(config.rates):
        fraction, stored, xor = (array[:, i].mean() for array in values.rates)
        rows.append(
            {
                "learning rate": f"{rate:g}",
                "changed": fraction,
                "closed form": expected_fraction(rate, config.scale),
                "bytes per parameter": stored,
                "XOR and zstd": xor,
                "entropy of places and signs": entropy_bound(fraction),
                "a 1.026T model, GB": stored * 1026,
            }
        )
    return rows


def draw(config: Config, run: Run, values: Values) -> Figure:
    """Changed fraction and bytes per parameter against the learning rate."""
    figure, (left, right) = new_figure(1, 2, width=4.8, height=3.8)
    rates = np.geomspace(config.rates[0], config.rates[-1], 200)
    fraction = [expected_fraction(rate, config.scale) for rate in rates]
    left.plot(rates, fraction, color=plotting.BLUE)
    for seed in values.rates.fraction:
        left.plot(config.rates, seed, "o", color=plotting.INK, alpha=0.6, markeredgewidth=0)
    plotting.corner(left, "line: closed form\ndots: measured", "lower right")
    left.set(ylabel="changed fraction of the bf16 weights")
    left.set_title("A step changes few of the weights that are sent")
    right.axhline(2, color=plotting.GREY, linewidth=1)
    plotting.label(
        right, rates[0], 2, "all of bf16", color=plotting.GREY, offset=(0, -4), ha="left"
    )
    for name, sizes, color, offset in (
        ("XOR, zstd", values.rates.xor, plotting.VERMILION, (-6, 6)),
        ("codec", values.rates.stored, plotting.GREEN, (8, -8)),
    ):
        right.plot(config.rates, sizes.mean(0), "o-", color=color)
        at = config.rates.index(RATE)
        plotting.label(right, RATE, sizes.mean(0)[at], name, color=color, offset=offset)
    bound = [entropy_bound(p) for p in fraction]
    right.plot(rates, bound, color=plotting.GREY, linestyle=(0, (4, 2)), linewidth=1)
    plotting.corner(right, "dashed: entropy of\nplaces and signs", "lower right")
    right.set(ylabel="bytes per parameter")
    right.set_title("What a delta takes")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="learning rate = distance moved")
    return run.save_figure(
        figure,
        "weight_delta",
        caption=f"Left: the share of weights N(0, {config.scale:g}) whose bf16 number changes when"
        f" all f32 masters move by the learning rate, {config.seeds} seeds on the closed form."
        " Right: bytes per parameter of the delta by the codec and by zstd on the XOR, and the"
        " entropy of independent places and signs, which moves beyond a neighbour exceed.",
    )


def run(config: Config, run: Run) -> Result:
    """Measures, judges and draws."""
    values = measure(config, run)
    with plotting.style():
        figure = draw(config, run, values)
    every = [
        {
            "steps": steps,
            "changed": fraction,
            "bytes per parameter": stored,
            "per step": stored / steps,
        }
        for steps, fraction, stored in zip(
            config.every, values.every.fraction.mean(0), values.every.stored.mean(0), strict=True
        )
    ]
    return Result(
        summary=summary(config, values),
        claims=judge(config, values),
        figures=[figure],
        tables={
            "One step, means over seeds": rate_table(config, values),
            f"Several steps at {RATE:g} between two versions": every,
        },
        metrics={"bytes_per_parameter": values.chain.mean()},
    )


def summary(config: Config, values: Values) -> str:
    """The findings in words, and what they cannot say."""
    at = config.rates.index(RATE)
    fraction, stored, xor = (array[:, at].mean() for array in values.rates)
    rarely = values.every.stored[:, -1].mean()
    return f"""\
At a learning rate of {RATE:g} a step changes {fraction:.1%} of the bf16 weights, as the closed form
says, and the delta takes {stored:.4f} bytes per parameter ({xor:.4f} by XOR and zstd). That is
{stored * 1026:.0f} GB for a model of 1.026T parameters, against 2,052 GB in full. A walk with
random signs takes itself back: a version every {config.every[-1]} steps takes {rarely:.3f} bytes.

**Limits.** Every weight moves by the whole learning rate here. Real steps of Adam are shorter, and
most weights of a trained model are not N(0, {config.scale:g}). The 1 to 2 % of changed weights that
others report would be moves of 2e-7 to 4e-7 here, and the report's "few GB" shorter ones still.
"""
