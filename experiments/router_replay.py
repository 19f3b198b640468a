"""Does replaying the sampler's experts bring sampler and trainer together, also if some are wrong?

The report replays the experts that the sampler chose and replaces those that the router would
never have chosen; the p99 of the mismatch falls (section 3). Here a small mixture of experts that
has learned Python code samples in bf16 and is trained in f32. Its routes come as they were chosen,
with experts replaced at random, with rows missing, or from weights that are some steps old.

    python -m launch.main --config=experiments/router_replay.py --workdir=runs/router_replay

Expect the p99 of |dlogp| to fall from .101 to .020 nats with replay of clean routes, strict or
filtered; with 1 % of the experts wrong .155 with strict replay and .025 with the filter, which
replaces 96 % of them; gradients .8 % from the exact one without replay and .4 % with it; and stale
routes to matter little beside what the weights have moved. Four claims are not shown: the p99 falls
to .211 and not to a fifth in the worst seed, the gradient's error to .51 and not to a half, the p99
on routes 8 small steps old to .58 and not to a half, and after 8 huge steps the filter's gradient
is .4 % worse than without replay. 2 to 3 minutes on 2 cores; `router_replay.py:smoke` trains
hardly anything.
"""

from functools import partial
from typing import Any

import numpy as np

from c2.config import ConfigError
from experiments import plotting
from experiments.router_replay_arms import FILTER, TRAINER, Config, Found, Outcome, measure, names
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("full", "smoke")

COLORS = {"none": plotting.INK, "strict": plotting.VERMILION, FILTER: plotting.BLUE}


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's sizes."""
    match variant:
        case "full":
            return Config()
        case "smoke":
            return Config(
                seeds=1, rows=4, context=16, pretraining=3, batches=2, rates=(1e-4,), age=2
            )
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


def of(found: Found, condition: str, arm: str, what: str) -> np.ndarray:
    """One quantity of `Outcome`, [seed]."""
    return np.array([getattr(outcome, what) for outcome in found[condition][arm]])


def ratio(found: Found, condition: str, arm: str, other: str, *quantities: str) -> float:
    """Of an arm's to another's, the largest of all seeds and quantities."""
    return max(
        (of(found, condition, arm, what) / of(found, condition, other, what)).max()
        for what in quantities
    )


def judge(config: Config, found: Found) -> list[Claim]:
    """The claims; all bounds were chosen before these models had run."""
    clean, wrong, missing, *stale = names(config)
    tokens = config.batches * config.rows * config.context
    claim = partial(Claim, seeds=config.seeds, note=f"{tokens} sampled tokens a seed.")
    at_most = partial(claim, relation="<=")
    return [
        at_most(
            statement="On clean routes strict replay has at most a fifth of the p99 mismatch"
            " without (largest ratio)",
            measured=ratio(found, clean, "strict", "none", "p99"),
            bound=0.2,
        ),
        at_most(
            statement="... at which the filter leaves it (largest ratio to strict)",
            measured=ratio(found, clean, FILTER, "strict", "p99"),
            bound=1.05,
        ),
        at_most(
            statement="... and with it the gradient's error is at most half of that without"
            " (largest ratio)",
            measured=ratio(found, clean, FILTER, "none", "error"),
            bound=0.5,
        ),
        at_most(
            statement=f"With {config.wrong:.0%} of the experts wrong the filter has at most half"
            " the p99 mismatch of strict replay (largest ratio)",
            measured=ratio(found, wrong, FILTER, "strict", "p99"),
            bound=0.5,
        ),
        at_most(
            statement="... and is never worse than no replay, in p99 and gradient error (largest"
            " ratio)",
            measured=ratio(found, wrong, FILTER, "none", "p99", "error"),
            bound=1,
        ),
        claim(
            statement="... as it replaces nearly all wrong experts (smallest share)",
            measured=of(found, wrong, FILTER, "found").min(),
            bound=0.8,
            relation=">=",
        ),
        at_most(
            statement="... and of clean ones next to none (largest share)",
            measured=of(found, clean, FILTER, "lost").max(),
            bound=0.001,
        ),
        at_most(
            statement=f"With {config.missing:.0%} of the rows missing it is never worse than no"
            " replay, in p99 and gradient error (largest ratio)",
            measured=ratio(found, missing, FILTER, "none", "p99", "error"),
            bound=1,
        ),
        at_most(
            statement=f"On routes {stale[0]} it has at most half the p99 mismatch without replay"
            " (largest ratio)",
            measured=ratio(found, stale[0], FILTER, "none", "p99"),
            bound=0.5,
        ),
        at_most(
            statement="However large these steps are, its gradient is no worse than without replay"
            " (largest ratio of errors)",
            measured=max(ratio(found, name, FILTER, "none", "error") for name in stale),
            bound=1,
        ),
    ]


def table(found: Found) -> list[dict[str, Any]]:
    """One row per condition and arm, means over seeds."""
    return [
        {
            "routes": condition,
            "replay": arm,
            "mean mismatch, nats": np.mean([o.gaps.mean() for o in outcomes]),
            "p99": np.mean([o.p99 for o in outcomes]),
            "p99, range": "{:.3f} to {:.3f}".format(*np.sort([o.p99 for o in outcomes])[[0, -1]]),
            "largest": max(o.gaps.max() for o in outcomes),
            "gradient error": np.mean([o.error for o in outcomes]),
            "1 - cosine": np.mean([1 - o.cosine for o in outcomes]),
            "rows missing": np.mean([o.missing for o in outcomes]),
            "experts replaced": np.mean([o.replaced for o in outcomes]),
            "of wrong ones": np.mean([o.found for o in outcomes]),
            "of sound ones": np.mean([o.lost for o in outcomes]),
        }
        for condition, arms in found.items()
        for arm, outcomes in arms.items()
    ]


def draw(config: Config, run: Run, found: Found) -> Figure:
    """The mismatch with some experts wrong, and what the arms do in every condition."""
    figure, (left, middle, right) = new_figure(1, 3, width=4.4, height=3.9)
    clean, wrong, *_ = names(config)
    left.axhline(0.01, color=plotting.GREY, linewidth=1)
    plotting.label(left, 2e-4, 0.01, "p99", color=plotting.GREY, offset=(2, 4))
    left.plot(*tail(found[clean]["strict"]), color=plotting.GREY, linestyle=(0, (2, 1.5)))
    for arm, color in COLORS.items():
        left.plot(*tail(found[wrong][arm]), color=color)
    plotting.corner(left, "dashed: strict replay\nof clean routes", "lower left")
    left.set(xscale="log", yscale="log", xlim=(2e-4, None), ylim=(2e-4, 1.2))
    left.set(xlabel="|log-prob of trainer - sampler|, nats", ylabel="share of tokens above")
    left.set_title(f"{config.wrong:.0%} of the experts are wrong")
    for axes, what in ((middle, "p99"), (right, "error")):
        for row, condition in enumerate(found):
            if row % 2:
                axes.axhspan(row - 0.5, row + 0.5, color=plotting.SHADE, zorder=0)
            for lane, (arm, color) in enumerate(COLORS.items()):
                x, y = np.sort(of(found, condition, arm, what)), row + (lane - 1) * 0.24
                axes.plot(x, np.full(len(x), y), "o-", color=color, linewidth=1, mew=0)
                if condition == wrong and what == "p99":
                    at, across = (x[0], -7) if arm == "none" else (x[-1], 7)
                    plotting.label(axes, at, y, arm, color=color, offset=(across, 0))
        axes.set(xscale="log", ylim=(len(found) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)
    middle.set(xlabel="p99 of the mismatch, nats", yticks=range(len(found)))
    middle.set_yticklabels(list(found))
    middle.set_title("What replay wins, the filter keeps")
    right.set(xlabel="relative error of the gradient", yticks=[])
    right.set_title("Old weights cost more than old routes")
    return run.save_figure(
        figure,
        "router_replay",
        caption=f"Left: of all sampled tokens the share whose mismatch is larger, where"
        f" {config.wrong:.0%} of the captured experts were replaced at random. Middle and right:"
        f" each of {config.seeds} seeds is a dot, by what became of the routes; the error is the"
        " distance to the exact on-policy gradient, relative to its length.",
    )


def tail(outcomes: list[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Gaps of all seeds and the share of them that are at least as large."""
    gaps = np.sort(np.concatenate([o.gaps for o in outcomes]))[::-1]
    return gaps, np.arange(1, len(gaps) + 1) / len(gaps)


def run(config: Config, run: Run) -> Result:
    """Measures, judges and draws."""
    found = measure(config, run)
    with plotting.style():
        figure = draw(config, run, found)
    clean, *_ = names(config)
    return Result(
        summary=summary(config, found),
        claims=judge(config, found),
        figures=[figure],
        tables={"Means over seeds": table(found)},
        metrics={f"p99/{arm}": of(found, clean, arm, "p99").mean() for arm in config.arms},
    )


def summary(config: Config, found: Found) -> str:
    """The findings in words, and what they cannot say."""
    clean, wrong, _, *stale = names(config)

    def mean(condition: str, arm: str, what: str = "p99") -> float:
        return of(found, condition, arm, what).mean()

    return f"""\
Same weights, other rounding: without replay {mean(clean, "none", "replaced"):.2%} of the sampler's
experts are not the trainer's, and the p99 of the mismatch is {mean(clean, "none"):.3f} nats. Strict
replay brings it to {mean(clean, "strict"):.3f}, and so does the filter. With {config.wrong:.0%} of
the experts wrong strict replay is at {mean(wrong, "strict"):.3f}, and the filter, which replaces
{mean(wrong, FILTER, "found"):.0%} of the wrong ones, at {mean(wrong, FILTER):.3f}. After
{stale[0].removesuffix(" old")} replay still takes the p99 from {mean(stale[0], "none"):.3f} to
{mean(stale[0], FILTER):.3f}; after larger steps the policy has moved so far that its routes hardly
matter, neither for the mismatch nor for the gradient.

**Limits.** The report's claim is that p99 falls; it gives no number, no threshold and no error of a
gradient. The mismatch with stale routes contains what the policy itself has moved. A model with
{TRAINER.moe_layers} mixture layers of {TRAINER.moe.experts} experts changes fewer routes than a
large one; expect the signs to carry over, not the ratios. Sampling is a forward pass in bf16, not a
decoding engine, and the gradient is that of the next token's reward, not of a rollout's.
"""
