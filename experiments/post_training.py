"""From a pretrained model to an agent: demonstrations, reinforcement learning, its controls.

First demonstrations may be sound; then come those of a careless expert, which makes mistakes and
does not always look at the tests. Reinforcement learning starts from there. Controls start from the
same weights: one learns from rewards that were shuffled, others go on with the demonstrations that
came last or with sound ones, for as much compute. All are scored on the same held-out tasks with
the same seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from c2.config import ConfigError
from c2.data import tokenizer as tokenizers
from c2.data.store import TokenStore
from c2.models import ModelConfig, Params
from c2.rl.environments import EnvironmentConfig
from c2.rl.journal import Journal
from experiments import demonstrations, reinforcement
from experiments.demonstrations import DemonstrationsConfig
from experiments.fine_tuning import FineTuningConfig, fine_tune
from experiments.reinforcement import RLConfig, Scores
from experiments.study import Run

Control = Literal["shuffled", "fine_tuning", "sound"]
START, TRAINED = "start", "reinforcement"  # names of stages; controls are called as they are
BEFORE = "before"  # folder of the lesson before


@dataclass(frozen=True, kw_only=True)
class LessonConfig:
    """A stage of its own.

    Attributes:
      demonstrations: what is shown.
      fine_tuning: how it is learned.
    """

    demonstrations: DemonstrationsConfig
    fine_tuning: FineTuningConfig


@dataclass(frozen=True, kw_only=True)
class PostTrainingConfig:
    """What follows pretraining.

    Attributes:
      before: a lesson before all else, or none.
      demonstrations: what is shown then.
      fine_tuning: how it is learned.
      reinforcement: how rewards are learned from, and what is evaluated.
      controls: what it is compared with: "fine_tuning" goes on with what was shown last, "sound"
        with what was shown before.
      control_rate: peak learning rate of controls that go on with demonstrations.
    """

    before: LessonConfig | None = None
    demonstrations: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    fine_tuning: FineTuningConfig
    reinforcement: RLConfig
    controls: tuple[Control, ...] = ("shuffled", "fine_tuning")
    control_rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.control_rate <= 0:
            raise ConfigError(f"control_rate: {self.control_rate}; legal: above 0")
        if "sound" in self.controls and self.before is None:
            raise ConfigError(
                "controls: 'sound' goes on with `before`, which is none; legal: without"
            )
        if not self.reinforcement.controller.eval_every:
            raise ConfigError(
                "reinforcement.controller.eval_every: 0; legal: at least 1, as all is compared "
                "with the start"
            )
        least = self.reinforcement.environments.harness.context
        for name, lesson in (("", self), ("before.", self.before)):
            if lesson and lesson.fine_tuning.phase.context < least:
                raise ConfigError(
                    f"{name}fine_tuning.phase.context: {lesson.fine_tuning.phase.context}; legal: "
                    "at least the context of a conversation, "
                    f"reinforcement.environments.harness.context = {least}"
                )


def post_train(
    config: PostTrainingConfig,
    model: ModelConfig,
    params: Params,
    tokenizer: Path,
    folder: Path,
    run: Run,
) -> dict[str, Scores]:
    """Runs all stages, or those that are left.

    Args:
      config: what to do.
      model: model configuration, without prediction modules.
      params: to begin with.
      tokenizer: the policy's `tokenizer.json`.
      folder: for everything, a folder in it for each stage.
      run: where services are started and progress is told.

    Returns:
      Scores by stage: `START`, `TRAINED` and the controls.
    """
    rl = config.reinforcement
    start = demonstrate(config, model, params, tokenizer, folder, run)

    def reinforce(config: RLConfig, name: str) -> dict[int, Scores]:
        return reinforcement.train(config, model, start, tokenizer, folder / name, run)

    def score(tensors: Mapping[str, Any], name: str) -> Scores:
        return reinforcement.evaluate(rl, model, tensors, tokenizer, folder / name, run)

    say(run.console, "Reinforcement learning")
    found = reinforce(rl, TRAINED)
    scores = {START: found[0], TRAINED: found[rl.controller.schedule.steps]}
    if "shuffled" in config.controls:
        say(run.console, "The same with shuffled rewards")
        without = replace(rl.controller, eval_every=0)
        reinforce(replace(rl, rewards="shuffled", controller=without), "shuffled")
        scores["shuffled"] = score(reinforcement.published(model, folder / "shuffled"), "shuffled")
    lessons = {"fine_tuning": (config, folder), "sound": (config.before, folder / BEFORE)}
    for name, (lesson, at) in lessons.items():
        if name in config.controls:
            more = longer(
                lesson.fine_tuning,
                equivalent_tokens(folder / TRAINED / "journal"),
                rate=config.control_rate,
            )
            say(run.console, f"More demonstrations instead, for the same compute ({name})")
            shown = show(lesson, rl.environments, tokenizer, at)
            tuned = fine_tune(more, model, start, shown, folder / f"more_{name}", run)
            served = reinforcement.serving_form(model, tuned)
            scores[name] = score(served, f"more_{name}")
    return scores


def demonstrate(
    config: PostTrainingConfig,
    model: ModelConfig,
    params: Params,
    tokenizer: Path,
    folder: Path,
    run: Run,
) -> Params:
    """What reinforcement learning starts from: fine-tuned on demonstrations, or found.

    Arguments are those of `post_train`.
    """
    environments = config.reinforcement.environments
    for lesson, at in ((config.before, folder / BEFORE), (config, folder)):
        if lesson is not None:
            say(run.console, f"Fine-tuning on {lesson.demonstrations.count:,} demonstrations")
            shown = show(lesson, environments, tokenizer, at)
            params = fine_tune(lesson.fine_tuning, model, params, shown, at / "fine_tuning", run)
    return params


def show(
    lesson: LessonConfig | PostTrainingConfig,
    environments: EnvironmentConfig,
    tokenizer: Path,
    folder: Path,
) -> TokenStore:
    """The demonstrations of a lesson, made once."""
    return demonstrations.cached_store(
        lesson.demonstrations, tokenizers.load(tokenizer), environments,
        folder / "demonstrations.npz",
    )  # fmt: skip


def longer(tuning: FineTuningConfig, tokens: float, *, rate: float) -> FineTuningConfig:
    """Fine-tuning of this many tokens, from the start of reinforcement learning on."""
    phase = tuning.phase
    steps = max(2, round(tokens / (phase.batch * phase.context)))
    schedule = replace(phase.learning_rate, peak=rate, warmup_steps=min(10, steps // 2))
    return replace(
        tuning,
        phase=replace(phase, name="more", steps=steps, learning_rate=schedule),
        seed=tuning.seed + 1,
    )


def equivalent_tokens(journal: Path) -> float:
    """Tokens of fine-tuning that cost as many operations as a run of reinforcement learning.

    A forward pass takes a third of a training step's operations: once for every token when it is
    sampled or read, and a whole step for those of groups whose rewards differ.
    """
    total = 0.0
    with Journal(journal) as seen:
        for batch in seen.batches:
            for index in batch:
                rollouts = seen.rollouts(index).values()
                tokens = sum(len(link.tokens) for r in rollouts for link in r.generations)
                learned = len({r.reward for r in rollouts if not r.failed}) > 1
                total += tokens * (1 / 3 + learned)
    return total


def say(console: Console, text: str) -> None:
    """Tells which stage begins."""
    console.rule(text, align="left", style="dim")
