"""Does a base with fewer bits per byte become a better agent by the same reinforcement learning?

The report trains one model to three levels of compute, log-spaced, gives all the same fine-tuning
and reinforcement learning, and finds that lower cross-entropy predicts higher reward (section 2,
Fig. 2). Here every level and every seed has a pretraining of its own, so that points are
independent of each other. Across: bits per byte of a package that was never trained on, before
post-training. Up: the pass rate on held-out tasks after it.

    python -m launch.main --config=experiments/perplexity_vs_rl.py --workdir=runs/perplexity_vs_rl

Claims: longer pretraining needs fewer bits; the pass rate falls with the bits (rank correlation,
an exact test that permutes levels within seeds), by levels as well; and so does what reinforcement
learning alone adds. `mini` (3 levels, 3 seeds, so p can be 1/216 at least) takes about two
hours on 2 cores, by an estimate from its parts, and has not run to its end yet. `smoke` runs two
levels of one seed in a few minutes and can show nothing.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from c2.config import ConfigError
from experiments import agents, evidence, plotting, recipe
from experiments.agents import AgentConfig
from experiments.evidence import Correlation
from experiments.post_training import START, TRAINED, post_train
from experiments.post_training_report import Mean, worth
from experiments.reinforcement import Scores
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("mini", "smoke")

CHANCE = 0.05  # that a correlation without any relation is called one
COLORS = (plotting.VERMILION, plotting.GREEN, plotting.BLUE, plotting.PURPLE)  # of levels
MOST_ORDERS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Config(AgentConfig):
    """The levels.

    Attributes:
      lengths: of pretraining, in lengths of `pretraining`, rising.
    """

    lengths: tuple[float, ...] = (0.125, 0.5, 2.0)

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        if len(self.lengths) < 2 or self.lengths[0] <= 0 or not _rises(self.lengths):
            raise ConfigError(f"lengths: {self.lengths}; legal: two or more, above 0 and rising")
        if math.factorial(len(self.lengths)) ** self.seeds > MOST_ORDERS:
            raise ConfigError(
                f"seeds: {self.seeds} of {len(self.lengths)} lengths have too many orders for an "
                f"exact test; legal: up to {MOST_ORDERS:,}"
            )


class Points(NamedTuple):
    """What was measured, each [seed, level]."""

    bits: np.ndarray  # per byte of the held-out package, before post-training
    start: np.ndarray  # pass rate before reinforcement learning
    trained: np.ndarray  # after it


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's sizes."""
    match variant:
        case "mini":
            return _config(agents.mini())
        case "smoke":
            return _config(agents.smoke(), lengths=(0.25, 1.0))
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


def _config(shared: AgentConfig, **changes: Any) -> Config:
    after = replace(shared.post_training, controls=())
    return Config(**{**vars(shared), "post_training": after, **changes})


def _rises(values: tuple[float, ...]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def stretched(config: recipe.Config, length: float, seed: int) -> recipe.Config:
    """A pretraining so many times as long, with its own seed; schedules end with their phases."""
    phases = []
    for phase in config.phases:
        steps, rate = max(2, round(length * phase.steps)), phase.learning_rate
        rate = replace(rate, warmup_steps=min(rate.warmup_steps, steps // 4))
        phases.append(replace(phase, steps=steps, learning_rate=rate))
    return replace(config, phases=tuple(phases), seed=seed)


def run(config: Config, run: Run) -> Result:
    """Trains all levels of every seed or what is left of them, then draws and judges."""
    agents.try_sandboxes(config)
    points = Points(*np.full((3, config.seeds, len(config.lengths)), np.nan))
    for seed in range(config.seeds):
        after = agents.seeded(config.post_training, seed)
        for level, length in enumerate(config.lengths):
            run.console.rule(f"Seed {seed}, {length:g} lengths of pretraining")
            folder = run.workdir / f"seed{seed}" / f"level{level}"
            longer = stretched(config.pretraining, length, seed)
            base = agents.pretrain(longer, folder / "pretraining", run)
            scores = post_train(after, base.model, base.params, base.tokenizer, folder, run)
            points.bits[seed, level] = base.bits_per_byte
            points.start[seed, level] = pass_rate(scores[START])
            points.trained[seed, level] = pass_rate(scores[TRAINED])
    return summarise(config, points, run)


def pass_rate(scores: Scores) -> float:
    """The mean over all held-out tasks."""
    return Mean.of(list(worth(scores, 1).values())).value


def summarise(config: Config, points: Points, run: Run) -> Result:
    """Draws and judges."""
    with plotting.style():
        figure = draw(config, points, run)
    found = evidence.falls_with(points.bits, points.trained)
    return Result(
        summary=summary(points, found),
        claims=judge(points),
        figures=[figure],
        tables={"Levels, mean and range over seeds": table(config, points)},
        metrics={"rank_correlation": found.rho, "p": found.p},
    )


def judge(points: Points) -> list[Claim]:
    """The claims."""
    seeds = len(points.bits)

    def falls(statement: str, values: np.ndarray) -> Claim:
        found = evidence.falls_with(points.bits, values)
        return Claim(
            statement=f"{statement}: chance of such ranks without any relation", measured=found.p,
            bound=CHANCE, relation="<=", seeds=seeds,
            note=f"rank correlation {found.rho:+.2f} over {values.size} points; levels permuted "
            "within seeds",
        )  # fmt: skip

    return [
        Claim(
            statement="Longer pretraining needs fewer bits per byte in every seed: largest change"
            " from a level to the next",
            measured=np.diff(points.bits).max(),
            bound=0,
            relation="<",
            seeds=seeds,
        ),
        falls(
            "The more bits per byte, the lower the pass rate after reinforcement", points.trained
        ),
        Claim(
            statement="It rises from level to level of pretraining in the mean over seeds: smallest"
            " change",
            measured=np.diff(points.trained.mean(0)).min(),
            bound=0,
            relation=">",
            seeds=seeds,
        ),
        falls(
            "The more bits per byte, the less reinforcement learning adds to the pass rate",
            points.trained - points.start,
        ),
    ]


def table(config: Config, points: Points) -> list[dict[str, Any]]:
    """One row per level."""
    columns: Mapping[str, np.ndarray] = {
        "bits per byte": points.bits,
        "pass rate at the start": points.start,
        "after reinforcement": points.trained,
    }
    return [
        {"lengths of pretraining": f"{length:g}"}
        | {name: evidence.spread(values[:, level]) for name, values in columns.items()}
        for level, length in enumerate(config.lengths)
    ]


def draw(config: Config, points: Points, run: Run) -> Figure:
    """Fig. 2: the pass rate against bits per byte, with a line."""
    figure, axes = new_figure(width=6.4, height=4.2)
    if np.isfinite(points).all():
        slope, intercept = np.polyfit(points.bits.ravel(), points.trained.ravel(), 1)
        span = np.array([points.bits.min(), points.bits.max()])
        axes.plot(span, intercept + slope * span, color=plotting.GREY, linewidth=1.2)
    for level, length in enumerate(config.lengths):
        color, x = COLORS[level % len(COLORS)], points.bits[:, level]
        name = f"{length:g} lengths of pretraining"
        axes.plot(x, points.start[:, level], "o", mfc="none", mec=color, markersize=6)
        axes.plot(x, points.trained[:, level], "o", color=color, markersize=7, label=name)
    axes.set(xlabel="held-out bits per byte before post-training", ylabel="held-out pass rate")
    axes.set_ylim(0, 1)
    axes.set_title("Agents against their base")
    axes.legend(loc="upper right", fontsize=8.5)
    rho, p = evidence.falls_with(points.bits, points.trained)
    plotting.corner(
        axes, f"rank correlation {rho:+.2f}, p = {p:.3f}\nhollow: before reinforcement",
        "lower left",
    )  # fmt: skip
    return run.save_figure(
        figure,
        "perplexity_vs_rl",
        caption="Each pair of dots is a pretraining of its own with the same post-training: pass "
        "rate on held-out tasks before (hollow) and after (filled) reinforcement learning, against "
        "bits per byte of the held-out package before both. The line is a least-squares fit to the "
        "filled dots.",
    )


def summary(points: Points, found: Correlation) -> str:
    """The findings in words, and what they cannot say."""
    return f"""\
Over {points.bits.size} pretrainings, bits per byte and the pass rate after the same post-training
have a rank correlation of {found.rho:+.2f}; levels permuted within seeds give one as low with
probability {found.p:.3f}.

**Limits.** Levels differ in compute and in nothing else, so whatever compute brings stands behind
the bits: this predicts, it explains nothing. Bits are of general code, tasks are of generated
packages, of which the corpus has some. A few points in a narrow range are a direction and no law.
"""
