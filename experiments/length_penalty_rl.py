"""Does the nonlinear length penalty teach an agent to call tools in parallel and to write less?

The report subtracts C_{k,q}(effort) from the reward and says that it teaches parallel calls, among
other things (section 3, Fig. 6). Here an expert has shown two habits, a call for each turn and
calls made together, such as an edit with the tests behind it. From the same fine-tuned start, on
the same tasks, reinforcement learning runs with the penalty and without it. What the policies do
is read from the rollouts of the last steps, whose tasks come only once; the pass rate also from
held-out tasks. `length_penalty` has the penalty itself, without training.

    python -m launch.main --config=experiments/length_penalty_rl.py --workdir=runs/length_penalty_rl

Claims, against the same run without the penalty: fewer tokens, fewer turns, more turns with several
calls; more of these than at the start; and nine tenths of the pass rate. The expert makes fewer
mistakes than that of other studies: where success is rare, the cheapest is not to try.
`mini` (3 seeds, two runs each) takes about an hour on 2 cores, by an estimate from its parts,
and has not run to its end yet. `smoke` runs every stage once in a few minutes and learns nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from c2.config import ConfigError
from c2.rl.rewards import LengthPenaltyConfig
from c2.rl.sampling_weights import OversamplingConfig
from experiments import agents, conduct, evidence, plotting, reinforcement
from experiments.agents import AgentConfig, Base
from experiments.conduct import MEASURES, Steps
from experiments.evidence import Values
from experiments.post_training import START, demonstrate, say
from experiments.post_training_report import smooth, worth
from experiments.reinforcement import RLConfig, Scores
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("mini", "smoke")

WITHOUT, WITH = "without", "with"  # the penalty
COLORS = {START: plotting.GREY, WITHOUT: plotting.ORANGE, WITH: plotting.BLUE}
KEPT = 0.9  # of the pass rate

StepsBySeed = Mapping[str, Sequence[Steps]]
"""By run and seed."""

ScoresBySeed = Mapping[str, Sequence[Scores]]
"""By stage and seed."""


@dataclass(frozen=True, kw_only=True)
class Config(AgentConfig):
    """The two runs.

    Attributes:
      penalty: of one of them.
      last: steps at the end whose rollouts are compared.
    """

    penalty: LengthPenaltyConfig = field(default_factory=lambda: LengthPenaltyConfig(price=0.5))
    last: int = 8

    def __post_init__(self) -> None:
        """Checks ranges."""
        super().__post_init__()
        steps = self.post_training.reinforcement.controller.schedule.steps
        if not 1 <= self.last < steps:
            raise ConfigError(f"last: {self.last}; legal: 1 to below the {steps} steps")
        if self.penalty.price == 0:
            raise ConfigError("penalty.price: 0, which is no penalty; legal: above 0")


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The study's sizes."""
    match variant:
        case "mini":
            return _config(agents.mini(), times=3)
        case "smoke":
            return _config(agents.smoke(), times=1, last=1)
    raise ConfigError(f"variant: {variant!r}; legal: {', '.join(VARIANTS)}")


def _config(shared: AgentConfig, *, times: int, **changes: Any) -> Config:
    after = shared.post_training
    rl = after.reinforcement
    shown = replace(after.demonstrations, slips=0.2, test_after=0.8, repairs=0.8, together=0.4)
    # oversampling follows what rollouts take, and would give the two runs different tasks
    tasks = agents.more_held_out(rl.tasks, times)
    tasks = replace(tasks, oversampling=OversamplingConfig(start=1.0))
    harness = rl.environments.harness  # an edit and another call have to fit into a turn
    harness = replace(harness, turn_tokens=harness.turn_tokens + 16)
    rl = replace(rl, tasks=tasks, environments=replace(rl.environments, harness=harness))
    after = replace(after, demonstrations=shown, reinforcement=rl, controls=())
    return Config(**{**vars(shared), "post_training": after, **changes})


def run(config: Config, run: Run) -> Result:
    """Trains both runs of every seed or what is left of them, then draws and judges."""
    agents.try_sandboxes(config)
    base = agents.pretrain(config.pretraining, run.workdir / "pretraining", run)
    steps: dict[str, list[Steps]] = {WITHOUT: [], WITH: []}
    scores: dict[str, list[Scores]] = {START: [], WITHOUT: [], WITH: []}
    for seed in range(config.seeds):
        run.console.rule(f"Seed {seed}")
        folder = run.workdir / f"seed{seed}"
        for arm, found in train(config, base, seed, folder, run).items():
            scores[arm].append(found)
        for arm, of_seeds in steps.items():
            of_seeds.append(conduct.by_step(folder / arm / "journal"))
    return summarise(config, steps, scores, run)


def train(config: Config, base: Base, seed: int, folder: Path, run: Run) -> dict[str, Scores]:
    """Fine-tuning of a seed and both runs from there; held-out scores of all three."""
    after = agents.seeded(config.post_training, seed)
    controller = replace(after.reinforcement.controller, eval_every=0)
    rl = replace(after.reinforcement, controller=controller)
    start = demonstrate(after, base.model, base.params, base.tokenizer, folder, run)

    def score(tensors: Mapping[str, np.ndarray], name: str) -> Scores:
        at = folder / name
        return reinforcement.evaluate(rl, base.model, tensors, base.tokenizer, at, run)

    scores = {START: score(reinforcement.serving_form(base.model, start), START)}
    for arm, used in ((WITHOUT, rl), (WITH, penalised(rl, config.penalty))):
        say(run.console, f"Reinforcement learning {arm} the penalty")
        reinforcement.train(used, base.model, start, base.tokenizer, folder / arm, run)
        scores[arm] = score(reinforcement.published(base.model, folder / arm), arm)
    return scores


def penalised(config: RLConfig, penalty: LengthPenaltyConfig) -> RLConfig:
    """The same run with a length penalty."""
    environments = config.environments
    rewards = replace(environments.rewards, length=penalty)
    return replace(config, environments=replace(environments, rewards=rewards))


def summarise(config: Config, steps: StepsBySeed, scores: ScoresBySeed, run: Run) -> Result:
    """Draws and judges what the runs did, see `conduct.by_step`, and what they scored."""
    with plotting.style():
        figure = draw(steps, run)
    rows = table(config, steps, scores)
    return Result(
        summary=summary(rows),
        claims=judge(config, steps, scores),
        figures=[figure],
        tables={"What the policies do, mean and range over seeds": rows},
    )


def judge(config: Config, steps: StepsBySeed, scores: ScoresBySeed) -> list[Claim]:
    """The claims."""
    last = {arm: [found[-config.last :] for found in seeds] for arm, seeds in steps.items()}

    def at_end(arm: str, name: str) -> list[Values]:
        return [conduct.joined(found, name) for found in last[arm]]

    def less(statement: str, name: str) -> Claim:
        return evidence.claim(statement, evidence.paired(at_end(WITHOUT, name), at_end(WITH, name)))

    rates = {arm: [worth(found, 1) for found in scores[arm]] for arm in (WITH, WITHOUT)}
    held_out = evidence.paired(rates[WITH], rates[WITHOUT])
    level, (value, error) = np.mean([*map(evidence.mean, rates[WITHOUT])]), held_out.mean
    return [
        less("With the penalty a policy writes fewer tokens", "tokens"),
        less("It takes fewer turns", "turns"),
        evidence.claim(
            "More of its turns with calls have several of them",
            evidence.paired(at_end(WITH, "parallel"), at_end(WITHOUT, "parallel")),
        ),
        evidence.claim(
            "More of them have several than at its start",
            evidence.unpaired(
                at_end(WITH, "parallel"),
                [conduct.joined(found[:1], "parallel") for found in steps[WITH]],
            ),
        ),
        Claim(
            statement=f"It keeps at least {KEPT:.0%} of the pass rate on held-out tasks: share, two"
            " standard errors over tasks below what was measured",
            measured=1 + (value - 2 * error) / level if level else np.nan,
            bound=KEPT,
            relation=">=",
            seeds=config.seeds,
            note=f"{level:.3f} without the penalty; with it {held_out}",
        ),
    ]


def table(config: Config, steps: StepsBySeed, scores: ScoresBySeed) -> list[dict[str, str]]:
    """One row per measure, a column for the start and for each run."""
    chosen = {START: [found[:1] for found in steps[WITHOUT]]}
    chosen |= {arm: [found[-config.last :] for found in steps[arm]] for arm in (WITHOUT, WITH)}

    def row(name: str, values: Mapping[str, Sequence[Values]]) -> dict[str, str]:
        cells = {
            stage: evidence.spread([*map(evidence.mean, seeds)]) for stage, seeds in values.items()
        }
        return {"": name, **cells}

    measured = [
        row(
            text,
            {stage: [conduct.joined(found, name) for found in x] for stage, x in chosen.items()},
        )
        for name, text in MEASURES.items()
    ]
    held_out = {stage: [worth(found, 1) for found in x] for stage, x in scores.items()}
    return [*measured, row("pass rate on held-out tasks", held_out)]


def draw(steps: StepsBySeed, run: Run) -> Figure:
    """Every measure over steps."""
    figure, axes = new_figure(1, len(MEASURES), width=3.0, height=3.0)
    for (name, title), panel in zip(MEASURES.items(), axes, strict=True):
        for arm, seeds in steps.items():
            curves = np.array(
                [smooth([evidence.mean(step[name]) for step in found]) for found in seeds]
            )  # [seed, step]
            at = np.arange(1, curves.shape[1] + 1)
            evidence.draw_seeds(panel, at, curves, COLORS[arm], label=f"{arm} penalty")
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("step")
        panel.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    return run.save_figure(
        figure,
        "length_penalty_rl",
        caption="Of the rollouts that a step was trained on, running means with the length penalty "
        "and without it. Lines are means over seeds, bands their range.",
    )


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """The findings in words, and what they cannot say."""
    lines = "\n".join(
        f"- {row['']}: {row[START]} at the start, {row[WITHOUT]} without, {row[WITH]} with"
        for row in rows
    )
    return f"""\
From the same start, on the same tasks, without the length penalty and with it:

{lines}

**Limits.** One price, k and q; the report publishes none. Both habits were shown, so this asks
which one a price brings out, not whether it invents one. On these small tasks few calls can be
made together: at best an edit with its tests. The penalty counts turns, calls and tokens with
weights that are ours, and turns weigh most.
"""
