"""What a pretraining run says about its multi-token-prediction module, from its metrics."""

from typing import Any

import numpy as np

from c2.models.speculative import tokens_per_step
from experiments import plotting
from experiments.study import Claim, Figure, Run, new_figure

ACCEPTANCE = "held_out/acceptance"  # metric: how often a draft of held-out text is accepted

Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # see c2.training.metrics.read_columns


def first_step(config: Any) -> int | None:
    """Steps before the module is first trained; None if it never is."""
    steps = 0
    for phase in config.phases:
        if phase.mtp is not None:
            return steps
        steps += phase.steps
    return None


def by_stage(config: Any, columns: Columns) -> list[dict[str, Any]]:
    """One row for the untrained module and one after every phase from then on."""
    steps, rates = columns[ACCEPTANCE]
    at = dict(zip(steps.tolist(), rates.tolist(), strict=True))
    ends = np.cumsum([phase.steps for phase in config.phases]).tolist()
    stages = [("untrained", first_step(config))]
    stages += [(phase.name, end) for phase, end in zip(config.phases, ends, strict=True)]
    return [
        {
            "after": name,
            "acceptance": at[step],
            "tokens per step with one draft": float(tokens_per_step(at[step])),
        }
        for name, step in stages
        if step in at and (name == "untrained" or step > stages[0][1])
    ]


def judge(config: Any, stages: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> list[Claim]:
    """The claims about the module.

    Args:
      config: of the run.
      stages: from `by_stage`.
      held_out: values of the main model, one row for the start and one after every phase.
    """
    untrained, trained, last = (stages[i]["acceptance"] for i in (0, 1, -1))
    claims = [
        Claim(
            statement="The module learns to draft held-out text in its first phase: gain",
            measured=trained - untrained,
            bound=0.2,
            relation=">=",
            seeds=1,
            note=f"share of accepted drafts {untrained:.3f} to {trained:.3f}, that is "
            f"{tokens_per_step(trained):.2f} tokens per step with one draft",
        )
    ]
    number = next(n for n, phase in enumerate(config.phases) if phase.mtp is not None)
    if not config.phases[number].trains_main:
        before, after = held_out[number : number + 2]
        claims.append(
            Claim(
                statement="Meanwhile the frozen main model does not change: bits per byte",
                measured=max(abs(after[key] - before[key]) for key in before if key != "after"),
                bound=0.0,
                relation="<=",
                seeds=1,
            )
        )
    if len(stages) > 2:
        claims.append(
            Claim(
                statement="In the phases after it, trained jointly, it drafts better still: gain",
                measured=last - trained,
                bound=0.0,
                relation=">",
                seeds=1,
                note=f"share of accepted drafts {trained:.3f} to {last:.3f}",
            )
        )
    return claims


def draw(config: Any, run: Run, columns: Columns) -> Figure:
    """Acceptance over the steps that train the module."""
    figure, axes = new_figure(width=7.6, height=3.6)
    start = first_step(config)
    steps, rates = columns[ACCEPTANCE]
    axes.plot(steps, rates, "o-", color=plotting.BLUE, markersize=5)
    text = f"untrained\n{rates[0]:.2f}"
    plotting.label(axes, steps[0], rates[0], text, color=plotting.BLUE, offset=(8, -6))
    end, names = 0, []
    for phase in config.phases:
        end += phase.steps
        if end > start:
            axes.axvline(end, color=plotting.GREY, linewidth=0.8, linestyle=":")
            names.append((end - phase.steps / 2, phase.name))
            at_end = rates[steps == end][0]
            plotting.label(axes, end, at_end, f"{at_end:.2f}", color=plotting.BLUE, offset=(0, 6))
    axes.set_ylim(0, 1)
    for middle, name in names:
        plotting.label(axes, middle, 1, name, color=plotting.GREY, offset=(0, -4))
    axes.set_xlabel("step")
    axes.set_ylabel("accepted drafts")
    axes.set_title("Drafts of the prediction module that the model accepts")
    right = axes.secondary_yaxis("right", functions=(lambda a: 1 + a, lambda t: t - 1))
    right.set_ylabel("tokens per step, one draft")
    return run.save_figure(
        figure,
        "acceptance",
        caption=f"Probability that a draft of the multi-token-prediction module is accepted in "
        f"speculative sampling at temperature 1, mean over the held-out package "
        f"`{config.data.held_out}`; right, the tokens that one step of the model then gives.",
    )
