"""Does reinforcement learning raise the best of k attempts, or only their mean?

The report says that mean and best-of-K reward both rise (section 3, Fig. 5), others that rewards
only concentrate a policy on what it could do before (arXiv:2504.13837). Every seed has
demonstrations, fine-tuning and reinforcement learning of its own on one pretrained base, and a
control that goes on with demonstrations for as much compute. All are scored on the same held-out
tasks; the best of k of n attempts is the mean over all choices of k.

    python -m launch.main --config=experiments/best_of_k.py --workdir=runs/best_of_k

Four claims: mean and best of 8 rise from the start, and end above the control. Each has to be clear
by its standard error over tasks, and all seeds have to agree. A control of clean demonstrations
would be harder to beat than that of a careless expert's, and is not what is asked here. `mini` (3
seeds, 108 held-out tasks) takes about an hour on 2 cores, by an estimate from its parts, and
has not run to its end yet. `smoke` runs every stage once in a few minutes and learns nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from c2.config import ConfigError
from c2.training.metrics import read_columns
from experiments import agents, evidence, plotting
from experiments.agents import AgentConfig
from experiments.post_training import START, TRAINED, post_train
from experiments.post_training_report import COLORS, WORDS, Mean, smooth, worth
from experiments.reinforcement import Scores
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("mini", "smoke")

CONTROL = "fine_tuning"
STAGES = (START, CONTROL, TRAINED)
ALL = "all"  # held-out tasks together

SeedScores = Sequence[Mapping[str, Scores]]
"""By seed, stage, split and task."""


def get_config(variant: str = VARIANTS[0]) -> AgentConfig:
    """The study's sizes."""
    match variant:
        case "mini":
            return compared(agents.mini(), times=3)
        case "smoke":
            return compared(agents.smoke(), times=1)
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


def compared(config: AgentConfig, *, times: int) -> AgentConfig:
    """With the control of equal compute alone, and so many times the held-out tasks."""
    after = config.post_training
    rl = after.reinforcement
    tasks = agents.more_held_out(rl.tasks, times)
    after = replace(after, controls=(CONTROL,), reinforcement=replace(rl, tasks=tasks))
    return replace(config, post_training=after)


def run(config: AgentConfig, run: Run) -> Result:
    """Trains every seed or what is left of it, then draws and judges."""
    if CONTROL not in config.post_training.controls:
        raise ConfigError(
            f"config.post_training.controls: {config.post_training.controls}; legal: with "
            f"{CONTROL!r}, which everything is compared with"
        )
    agents.try_sandboxes(config)
    base = agents.pretrain(config.pretraining, run.workdir / "pretraining", run)
    scores, curves = [], []
    for seed in range(config.seeds):
        run.console.rule(f"Seed {seed}")
        after, folder = agents.seeded(config.post_training, seed), run.workdir / f"seed{seed}"
        scores.append(post_train(after, base.model, base.params, base.tokenizer, folder, run))
        curves.append(training_curve(folder / TRAINED))
    return summarise(scores, curves, config.post_training.reinforcement.samples, run)


def training_curve(folder: Path) -> np.ndarray:
    """Mean and best of the groups of every step, [2, step]."""
    columns = read_columns(folder / "metrics.jsonl")
    return np.array([columns[name][1] for name in ("correct", "best_of_group")])


def summarise(scores: SeedScores, curves: Sequence[np.ndarray], samples: int, run: Run) -> Result:
    """Draws and judges.

    Args:
      scores: held-out ones.
      curves: of training by seed, see `training_curve`.
      samples: attempts at every held-out task.
      run: where figures go.
    """
    with plotting.style():
        figures = [draw_attempts(scores, samples, run), draw_training(curves, run)]
    return Result(
        summary=summary(scores, samples),
        claims=judge(scores, samples),
        figures=figures,
        tables={
            f"Held-out tasks, mean / best of {samples}, mean and range over seeds": table(
                scores, samples
            )
        },
        metrics={
            f"{stage}/best_of_{k}": float(np.mean(levels(scores, stage, ALL, k)))
            for stage in STAGES
            for k in (1, samples)
        },
    )


def parts(scores: SeedScores) -> list[str]:
    """The splits, and all of them together."""
    return [*scores[0][START], ALL]


def levels(scores: SeedScores, stage: str, part: str, k: int) -> list[float]:
    """The expected best of k attempts, the mean over tasks of a split, by seed."""
    chosen = (found[stage] if part == ALL else {part: found[stage][part]} for found in scores)
    return [Mean.of(list(worth(tasks, k).values())).value for tasks in chosen]


def judge(scores: SeedScores, samples: int) -> list[Claim]:
    """The claims, over all held-out splits."""

    def compare(statement: str, other: str, k: int) -> Claim:
        found = evidence.paired(
            [worth(seed[TRAINED], k) for seed in scores], [worth(seed[other], k) for seed in scores]
        )
        before, after = (np.mean(levels(scores, stage, ALL, k)) for stage in (other, TRAINED))
        return evidence.claim(statement, found, f"{before:.3f} to {after:.3f}, ")

    best = f"best of {samples} attempts"
    return [
        compare("Reinforcement learning raises the mean over attempts", START, 1),
        compare(f"It raises the {best}", START, samples),
        compare("Its mean is above that of as much compute spent on demonstrations", CONTROL, 1),
        compare(f"So is its {best}", CONTROL, samples),
    ]


def table(scores: SeedScores, samples: int) -> list[dict[str, Any]]:
    """One row per split and one for all, a column per stage."""
    rows = []
    for part in parts(scores):
        split = scores[0][START]
        tasks = sum(map(len, split.values())) if part == ALL else len(split[part])
        cells = {
            WORDS[stage]: " / ".join(
                evidence.spread(levels(scores, stage, part, k)) for k in (1, samples)
            )
            for stage in STAGES
        }
        rows.append({"split": part, "tasks": tasks, **cells})
    return rows


def draw_attempts(scores: SeedScores, samples: int, run: Run) -> Figure:
    """The best of k against k, by split and stage."""
    names, ks = parts(scores), np.arange(1, samples + 1)
    figure, axes = new_figure(1, len(names), width=3.1, height=3.4)
    for part, panel in zip(names, axes, strict=True):
        for stage in STAGES:
            values = np.array([levels(scores, stage, part, k) for k in ks]).T  # [seed, k]
            evidence.draw_seeds(panel, ks, values, COLORS[stage], marker="o", label=WORDS[stage])
        panel.set(title=f"{part} tasks", xlabel="attempts k", xticks=ks, ylim=(0, 1))
    axes[0].set_ylabel("expected best of k attempts")
    axes[-1].legend(loc="upper left", fontsize=8)
    return run.save_figure(
        figure,
        "best_of_k",
        caption="Held-out tasks by split, and all together: the expected best of k attempts, from "
        f"{samples} at each task. Lines are means over seeds, bands their range.",
    )


def draw_training(curves: Sequence[np.ndarray], run: Run) -> Figure:
    """Mean and best of training groups over steps."""
    figure, axes = new_figure(width=5.6, height=3.6)
    rows = (("best of a group", plotting.GREEN), ("mean", plotting.BLUE))
    for row, (name, color) in zip((1, 0), rows, strict=True):
        values = np.array([smooth(curve[row]) for curve in curves])  # [seed, step]
        steps = np.arange(1, values.shape[1] + 1)
        evidence.draw_seeds(axes, steps, values, color)
        plotting.label(
            axes, steps[-1], values.mean(0)[-1], name, color=color, offset=(-2, 7), ha="right"
        )
    axes.set(title="Training groups", xlabel="step", ylabel="correct", ylim=(0, 1))
    return run.save_figure(
        figure,
        "training",
        caption="Rollouts that a step was trained on, running means: of all, and of the best of "
        "each group. Lines are means over seeds, bands their range.",
    )


def summary(scores: SeedScores, samples: int) -> str:
    """The findings in words, and what they cannot say."""

    def words(stage: str) -> str:
        once, best = (np.mean(levels(scores, stage, ALL, k)) for k in (1, samples))
        return f"{once:.2f} and {best:.2f}"

    return f"""\
On held-out tasks the mean and the best of {samples} attempts are {words(START)} at the start,
{words(TRAINED)} after reinforcement learning, and {words(CONTROL)} if as much compute goes into
more of the same demonstrations. The first figure has all k between.

**Limits.** One pretrained base; seeds differ in demonstrations, their order, training tasks and
rollouts. The demonstrations are of a careless expert, so a policy can know more than it shows, and
better demonstrations would move the control. A policy that tests and tries again also writes more
for each attempt: this compares attempts, not tokens. Where the best of {samples} is near 1 at the
start, it cannot rise.
"""
