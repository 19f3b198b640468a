"""Which generated repair tasks a policy works on, in which order, and which are held out."""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

from c2.config import ConfigError
from c2.records import Effort, Rollout
from c2.rl.sampling_weights import OversamplingConfig, kind_weights
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.minirepo.splits import HELD_FAMILIES

REMEMBERED = 256  # efforts of a kind of tasks that its difficulty is judged by


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Which tasks there are.

    Attributes:
      level: difficulty, see `c2.sandbox.tasks.minirepo`.
      families: kinds of tasks to train on, and to evaluate but for split "family".
      oversampling: of kinds that turn out to be hard.
      held_out: how many tasks of which splits are evaluated, see `minirepo.SPLITS`; "train" are new
        tasks of the distribution that is trained on.
      seed: of tasks; those of evaluations do not depend on it.
    """

    level: int = 1
    families: tuple[str, ...] = minirepo.FAMILIES
    oversampling: OversamplingConfig = field(default_factory=OversamplingConfig)
    held_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(minirepo.SPLITS, 32))
    seed: int = 0

    def __post_init__(self):
        for name, values, legal in (
            ("families", self.families, minirepo.FAMILIES),
            ("held_out", self.held_out, minirepo.SPLITS),
        ):
            if unknown := [value for value in values if value not in legal]:
                raise ConfigError(f"{name}: {unknown[0]!r}; legal: {', '.join(legal)}")
        if few := [name for name, count in self.held_out.items() if count < 1]:
            raise ConfigError(f"held_out.{few[0]}: {self.held_out[few[0]]}; legal: at least 1")
        if not self.families:
            raise ConfigError(f"families: none; legal: {', '.join(minirepo.FAMILIES)}")
        if self.level not in minirepo.LEVELS:
            raise ConfigError(f"level: {self.level}; legal: {minirepo.LEVELS}")


class Prompts:
    """Tasks by their place in the order, each different from all others."""

    def __init__(self, config: TasksConfig, steps: int, groups: int) -> None:
        self._config, self._total = config, steps * groups
        self._spent: dict[str, deque[Effort]] = defaultdict(partial(deque, maxlen=REMEMBERED))

    def note(self, task: str, rollout: Rollout) -> None:
        """Takes note of what a rollout has cost."""
        self._spent[family(task)].append(rollout.effort)

    def __call__(self, index: int) -> str:
        """The id of a task."""
        config, progress = self._config, index / self._total
        weights = kind_weights(self._spent, config.oversampling, progress)
        rng = random.Random(f"{config.seed}/{index}")
        chances = [weights.get(name, 1.0) for name in config.families]
        (chosen,) = rng.choices(config.families, chances)
        seed = rng.getrandbits(40)
        return minirepo.draw(seed, config.level, "train", families=[chosen]).id


def held_out(config: TasksConfig) -> dict[str, tuple[str, ...]]:
    """The ids of the tasks of evaluations, by split.

    They are of the kinds that are trained on, but for "family": of those that never are.
    """
    families = (*config.families, *HELD_FAMILIES)
    return {
        part: tuple(
            minirepo.draw(-1 - i, config.level, part, families=families).id for i in range(count)
        )
        for part, count in config.held_out.items()
    }


def family(task: str) -> str:
    """The kind of a task, from its id."""
    return task.split("/")[1]
