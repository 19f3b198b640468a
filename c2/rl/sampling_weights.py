"""Which prompt comes next: each at most once, later in training rather a hard one; no jax.

What a prompt will take is not known before it is used, and it is used once. So difficulty is that
of its kind: how many turns and thinking tokens rollouts of other tasks of the kind have taken.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from c2.config import ConfigError
from c2.records import Effort


@dataclass(frozen=True, kw_only=True)
class OversamplingConfig:
    """Over-sampling of hard tasks late in training (report section 3), by simple heuristics.

    Attributes:
      start: the share of training after which it begins; 1 turns it off.
      power: how much it follows difficulty: tasks of twice the turns and thoughts come 2 ** power
        times as often.
      limit: how much more or less often than others a kind comes at most.
    """

    start: float = 0.5
    power: float = 1.0
    limit: float = 4.0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= 1:
            raise ConfigError(f"start: {self.start}; legal: 0 to 1")
        if not 0 <= self.power < math.inf:
            raise ConfigError(f"power: {self.power}; legal: finite numbers from 0")
        if not 1 <= self.limit < math.inf:
            raise ConfigError(f"limit: {self.limit}; legal: finite numbers from 1")


def kind_weights(
    spent: Mapping[str, Iterable[Effort]], config: OversamplingConfig, progress: float
) -> dict[str, float]:
    """How often tasks of a kind are to come, over those of average difficulty.

    Difficulty is the mean of two ratios, of turns and of thinking tokens, each that of a kind over
    the mean of all kinds.

    Args:
      spent: kind -> efforts of its latest rollouts. Kinds without any are left out.
      config: how much difficulty counts.
      progress: share of the training that is done.
    """
    means = {
        kind: np.mean([(e.turns, e.thinking_tokens) for e in efforts], axis=0)
        for kind, efforts in ((kind, list(efforts)) for kind, efforts in spent.items())
        if efforts
    }
    if not means or progress < config.start or config.start == 1:
        return dict.fromkeys(means, 1.0)
    average = np.maximum(np.mean(list(means.values()), axis=0), 1e-9)
    return {
        kind: float(
            np.clip((mean / average).mean() ** config.power, 1 / config.limit, config.limit)
        )
        for kind, mean in means.items()
    }


def draw(weights: np.ndarray, used: np.ndarray, seed: int) -> int:
    """The number of a prompt that has not been used.

    It depends on the arguments alone: the same is drawn when a run goes on from where it was.

    Args:
      weights: how often each prompt is to come, above 0 [prompt].
      used: bool [prompt].
      seed: of the run.

    Raises:
      ValueError: if all are used.
    """
    if used.all():
        raise ValueError(f"all {len(used)} prompts are used, and each is used once")
    chances = np.where(used, 0, weights)
    rng = np.random.default_rng([seed, int(used.sum())])
    return int(rng.choice(len(used), p=chances / chances.sum()))
