"""What post-training found: curves over steps, held-out scores of every stage, and claims."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from c2.evals.sampling import best_of_k
from c2.training.metrics import read_columns
from experiments import plotting
from experiments.post_training import START, TRAINED, PostTrainingConfig
from experiments.reinforcement import Scores
from experiments.study import Claim, Figure, Result, Run, new_figure

COLORS = {
    START: plotting.GREY,
    "fine_tuning": plotting.ORANGE,
    "sound": plotting.GREEN,
    "shuffled": plotting.VERMILION,
    TRAINED: plotting.BLUE,
}  # in the order of bars
WORDS = {
    START: "start",
    "fine_tuning": "more demonstrations",
    "sound": "more sound demonstrations",
    "shuffled": "shuffled rewards",
    TRAINED: "reinforcement",
}
CLEAR = 3.0  # standard errors
SMOOTH = 5  # steps
MISMATCH = 1e-4  # |log-probability of sampler - trainer|, f32


class Mean(NamedTuple):
    """A mean over tasks and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Of independent values; the error of fewer than two is NaN."""
        x = np.asarray(values, float)
        if not len(x):
            return cls(np.nan, np.nan)
        return cls(float(x.mean()), float(x.std(ddof=1) / len(x) ** 0.5) if len(x) > 1 else np.nan)

    @property
    def errors(self) -> float:
        """How many standard errors the mean is above 0; none for a mean of 0."""
        if not self.value:
            return 0.0
        return self.value / self.error if self.error else math.copysign(math.inf, self.value)


def worth(scores: Scores, k: int) -> dict[str, float]:
    """The expected best of k attempts at every task; tasks with fewer attempts are left out."""
    tried = {
        task: [x for x in attempts if x == x]
        for tasks in scores.values()
        for task, attempts in tasks.items()
    }
    return {task: float(best_of_k(np.array(x), k)) for task, x in tried.items() if len(x) >= k}


def gain(after: Scores, before: Scores, k: int) -> Mean:
    """How much better a policy is, task by task, as the best of k attempts."""
    a, b = worth(after, k), worth(before, k)
    return Mean.of([a[task] - b[task] for task in a if task in b])


def summarise(
    config: PostTrainingConfig, scores: Mapping[str, Scores], folder: Path, run: Run
) -> Result:
    """Draws and judges what `experiments.post_training.post_train` gives."""
    k = config.reinforcement.samples
    runs = {TRAINED: read_columns(folder / TRAINED / "metrics.jsonl")}
    if "shuffled" in scores:
        runs["shuffled"] = read_columns(folder / "shuffled" / "metrics.jsonl")
    with plotting.style():
        figures = [draw_learning(runs, run), draw_scores(scores, k, run), draw_health(runs, run)]
    return Result(
        summary=_summary(scores, k, folder.relative_to(run.workdir)),
        claims=judge(config, scores, runs[TRAINED], k),
        figures=figures,
        tables={f"Held-out tasks, pass rate / best of {k}": table(scores, k)},
        metrics={
            f"{stage}/{name}": Mean.of(list(worth(found, n).values())).value
            for stage, found in scores.items()
            for name, n in (("pass", 1), (f"best_of_{k}", k))
        },
    )


def judge(
    config: PostTrainingConfig, scores: Mapping[str, Scores], columns: Mapping[str, Any], k: int
) -> list[Claim]:
    """The claims; gains are paired by task, over all held-out splits."""

    def compare(statement: str, stage: str, other: str, n: int, relation: Any = ">=") -> Claim:
        found = gain(scores[stage], scores[other], n)
        before, after = (Mean.of(list(worth(scores[x], n).values())) for x in (other, stage))
        return Claim(
            statement=statement,
            measured=found.errors,
            bound=CLEAR,
            relation=relation,
            seeds=1,
            note=f"{before.value:.3f} to {after.value:.3f}, {found.value:+.3f} with a standard "
            f"error of {found.error:.3f} over tasks",
        )

    name = "gain in standard errors"
    claims = [
        compare(f"Reinforcement learning raises the pass rate: {name}", TRAINED, START, 1),
        compare(f"It raises the best of {k} attempts, too: {name}", TRAINED, START, k),
    ]
    if "shuffled" in scores:
        claims += [
            compare(f"Shuffled rewards do not raise the {what}: {name}", "shuffled", START, n, "<")
            for what, n in (("pass rate", 1), (f"best of {k}", k))
        ]
    claims += [
        compare(
            f"It beats as much compute spent on {WORDS[stage]}, {what}: {name}", TRAINED, stage, n
        )
        for stage in ("fine_tuning", "sound")
        if stage in scores
        for what, n in (("pass rate", 1), (f"best of {k}", k))
    ]
    bound = config.reinforcement.controller.schedule.staleness
    return [
        *claims,
        Claim(
            statement="No token is trained on that is staler than the bound: versions",
            measured=float(np.max(columns["staleness"][1])),
            bound=bound,
            relation="<=",
            seeds=1,
        ),
    ]


def table(scores: Mapping[str, Scores], k: int) -> list[dict[str, Any]]:
    """One row per split and one for all, a column per stage."""
    splits = list(scores[START])

    def cell(found: Scores) -> str:
        return " / ".join(f"{Mean.of(list(worth(found, n).values())).value:.3f}" for n in (1, k))

    rows = []
    for name, chosen in [*((split, [split]) for split in splits), ("all", splits)]:
        parts = {stage: {s: found[s] for s in chosen} for stage, found in scores.items()}
        tasks = sum(len(tasks) for tasks in parts[START].values())
        cells = {WORDS[stage]: cell(parts[stage]) for stage in COLORS if stage in parts}
        rows.append({"split": name, "tasks": tasks, **cells})
    return rows


def smooth(values: np.ndarray) -> np.ndarray:
    """The mean of the last few values at every place."""
    firsts = np.maximum(0, np.arange(len(values)) - SMOOTH + 1)
    return np.array([np.nanmean(values[first : i + 1]) for i, first in enumerate(firsts)])


def draw_learning(runs: Mapping[str, Mapping[str, Any]], run: Run) -> Figure:
    """Pass rate, best of a group, and what changes in behaviour, over steps."""
    figure, axes = new_figure(1, 3, width=3.7, height=3.4)
    panels = (
        ("correct", "pass rate"),
        ("best_of_group", "best of a group"),
        ("effort/turns", "turns of a rollout"),
    )
    for (name, title), panel in zip(panels, axes, strict=True):
        for stage, columns in runs.items():
            steps, values = columns[name]
            color = COLORS[stage]
            panel.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
            panel.plot(steps, smooth(values), color=color)
            plotting.label(panel, steps[-1], smooth(values)[-1], WORDS[stage], color=color,
                           offset=(-2, 7))  # fmt: skip
        panel.set_title(title)
        panel.set_xlabel("step")
        if name != "effort/turns":
            panel.set_ylim(0, 1)
    return run.save_figure(
        figure,
        "reinforcement",
        caption=f"Of the rollouts that a step was trained on; thick, the mean of {SMOOTH} steps.",
    )


def draw_scores(scores: Mapping[str, Scores], k: int, run: Run) -> Figure:
    """Pass rate and best of k by split and stage."""
    figure, axes = new_figure(1, 2, width=5.4, height=3.6)
    splits = list(scores[START])
    stages = [stage for stage in COLORS if stage in scores]
    width = 0.84 / len(stages)
    for panel, n, title in zip(axes, (1, k), ("pass rate", f"best of {k}"), strict=True):
        for number, stage in enumerate(stages):
            found = [Mean.of(list(worth({s: scores[stage][s]}, n).values())) for s in splits]
            x = np.arange(len(splits)) + (number - (len(stages) - 1) / 2) * width
            bars = panel.bar(
                x, [m.value for m in found], width * 0.92, yerr=[m.error for m in found],
                color=COLORS[stage], label=WORDS[stage],
                error_kw={"ecolor": plotting.INK, "elinewidth": 0.8},
            )  # fmt: skip
            panel.bar_label(bars, fmt="%.2f", padding=2, fontsize=7.5)
        panel.set_xticks(range(len(splits)), splits)
        panel.grid(axis="x", visible=False)
        panel.set_title(title)
        panel.set_ylim(0, 1)
    axes[0].legend(loc="upper right", fontsize=8)
    return run.save_figure(
        figure,
        "held_out_tasks",
        caption=f"Held-out tasks by split, {k} attempts at each; whiskers are standard errors over "
        "tasks.",
    )


def draw_health(runs: Mapping[str, Mapping[str, Any]], run: Run) -> Figure:
    """What shows early whether a run is sound."""
    panels = {
        "entropy": "entropy, nats",
        "mismatch": "mismatch, k3 in nats",
        "staleness": "staleness, versions",
        "routes_replaced": "replaced routes, share",
        "flat_groups": "groups of equal rewards",
        "sampled_tokens": "tokens of a rollout",
        "tokens_per_second": "sampled tokens/s",
        "rollouts_per_second": "rollouts/s",
    }
    figure, axes = new_figure(2, 4, width=2.7, height=2.2)
    for (name, title), panel in zip(panels.items(), axes.flat, strict=True):
        for stage, columns in runs.items():
            if name in columns:
                panel.plot(*columns[name], color=COLORS[stage], linewidth=1.2, label=WORDS[stage])
        panel.set_title(title, fontsize=9)
        panel.set_ylim(bottom=0)
    axes[0, 2].legend(fontsize=7)  # staleness is always there
    for panel in axes[1]:
        panel.set_xlabel("step")
    return run.save_figure(
        figure,
        "health",
        caption="By step: entropy of the policy where it chose, divergence of sampler and trainer "
        "on sampled tokens, age of the oldest token, share of replayed experts that the trainer "
        "would not have chosen in a plausible way, groups that teach nothing, length, throughput.",
    )


def _summary(scores: Mapping[str, Scores], k: int, folder: Path) -> str:
    def words(stage: str) -> str:
        once, best = (Mean.of(list(worth(scores[stage], n).values())).value for n in (1, k))
        return f"{once:.2f} of attempts ({best:.2f} of tasks in {k})"

    others = [stage for stage in ("shuffled", "fine_tuning", "sound") if stage in scores]
    controls = "; ".join(f"{WORDS[stage]}: {words(stage)}" for stage in others)
    return f"""\
On held-out repair tasks the policy went from {words(START)} to {words(TRAINED)} by reinforcement
learning. {controls[:1].upper() + controls[1:]}{"." if controls else ""} Rollouts can be
looked at token by token in
[`trajectories.html`]({(folder / TRAINED / "trajectories.html").as_posix()}).

**Limits.** One seed. The last demonstrations are of an expert that makes mistakes and often does
not notice, and sound ones may have come before, so this says that rewards bring out again what a
policy has learned and is not used to do, not that they teach edits which nobody has shown. A policy
that tests and tries again also writes more for each task.
"""
