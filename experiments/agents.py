"""What studies of agents share: a pretrained base, and one post-training of it for every seed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from c2.config import ConfigError, located
from c2.models import ModelConfig, Params
from c2.training.checkpoint import Checkpoints
from c2.training.pretrain import choose_mesh, make_optimizer, phase_model
from c2.training.sharding import abstract_state
from experiments import post_training_configs, recipe, reinforcement
from experiments.post_training import LessonConfig, PostTrainingConfig, say
from experiments.repair_tasks import TasksConfig
from experiments.study import Run


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What a study of agents does for every seed.

    Attributes:
      pretraining: of the base.
      post_training: of the base with every seed.
      seeds: how many.
    """

    pretraining: recipe.Config
    post_training: PostTrainingConfig
    seeds: int = 3

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds: {self.seeds}; legal: at least 1")
        if self.pretraining.post_training is not None:
            raise ConfigError(
                "pretraining.post_training: has a place of its own, post_training; legal: none"
            )


class Base(NamedTuple):
    """A pretrained model.

    Attributes:
      model: its configuration, without prediction modules.
      params: its weights.
      tokenizer: its `tokenizer.json`.
      bits_per_byte: what it needs for the held-out package.
    """

    model: ModelConfig
    params: Params
    tokenizer: Path
    bits_per_byte: float


def mini() -> AgentConfig:
    """The model, stages and tasks of the recipe."""
    return AgentConfig(
        pretraining=replace(recipe.mini(), post_training=None),
        post_training=post_training_configs.mini(),
    )


def smoke() -> AgentConfig:
    """Every stage once; nothing is learned."""
    pretraining = recipe.smoke()
    return AgentConfig(
        pretraining=replace(pretraining, phases=pretraining.phases[:1], post_training=None),
        post_training=post_training_configs.smoke(),
        seeds=1,
    )


def more_held_out(tasks: TasksConfig, times: int) -> TasksConfig:
    """With so many times the held-out tasks of every split."""
    return replace(tasks, held_out={name: times * count for name, count in tasks.held_out.items()})


def try_sandboxes(config: AgentConfig) -> None:
    """Raises ConfigError if there can be no sandboxes here: better now than after hours."""
    with located("config.post_training.reinforcement.environments"):
        reinforcement.try_sandboxes(config.post_training.reinforcement.environments)


def pretrain(config: recipe.Config, folder: Path, run: Run) -> Base:
    """Pretrains a base as the recipe does, or finds it; its report's figures are in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    say(run.console, f"Pretraining ({folder.name})")
    try:
        found = recipe.run(config, replace(run, workdir=folder))
    except ConfigError as error:  # it names keys from its own root
        raise ConfigError(str(error).replace("config.", "config.pretraining.", 1)) from error
    optimizer = make_optimizer(config.optimizer, config.phases, config.model)
    mesh = choose_mesh(config.phases, config.mesh)
    state = abstract_state(config.model, optimizer, mesh, config.mesh)
    with Checkpoints(folder / "checkpoints") as saved:
        params = saved.restore(saved.latest(), state).params
    return Base(
        model=replace(phase_model(config.model, config.phases[-1]), mtp=0),
        params=params.replace(mtp=()),
        tokenizer=folder / "data" / "tokenizer.json",
        bits_per_byte=found.metrics["held_out/bits_per_byte"],
    )


def seeded(config: PostTrainingConfig, seed: int) -> PostTrainingConfig:
    """The same with other demonstrations, training tasks and rollouts, in another order."""
    rl = config.reinforcement
    return replace(
        config,
        before=config.before and _lesson(config.before, seed),
        demonstrations=replace(config.demonstrations, seed=seed),
        fine_tuning=replace(config.fine_tuning, seed=seed),
        reinforcement=replace(rl, seed=seed, tasks=replace(rl.tasks, seed=seed)),
    )


def _lesson(config: LessonConfig, seed: int) -> LessonConfig:
    return LessonConfig(
        demonstrations=replace(config.demonstrations, seed=-1 - seed),  # not of the same tasks
        fine_tuning=replace(config.fine_tuning, seed=seed),
    )
