"""From groups of rollouts to tokens with advantages; imports no jax.

One reward for a rollout, and its advantage for every token that the policy chose in it: in all
links of the chain, summaries included, so that summaries learn what the turns behind them need
(report section 3). The baseline counts rollouts, however many links they have.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from c2.losses.advantages import group_advantages
from c2.losses.config import PolicyGradientConfig
from c2.records import Group, Rollout
from c2.rl.rows import Row


class Credit(NamedTuple):
    """What a step learns from.

    Attributes:
      rows: every token that the policy chose is in exactly one of them; none for rollouts that
        cannot change the gradient.
      denominator: what the summed loss is divided by.
    """

    rows: tuple[Row, ...]
    denominator: float


def assign(groups: Sequence[Group], config: PolicyGradientConfig, *, rollouts: int) -> Credit:
    """Gives every token its weight and advantage.

    A group whose rewards are all equal has no gradient and gets no rows, but counts in the
    denominator; if there is a KL it gets rows, since that has one.

    Args:
      groups: of the step. Failures of the infrastructure are in no baseline and have no rows.
      config: the objective. A KL in the reward is for `c2.rl.kl_penalty` to add.
      rollouts: of the step as it was planned: failures change no one's share.
    """
    rows: list[Row] = []
    tokens = 0
    for group in groups:
        (advantages,) = group_advantages(
            group.rewards[None], baseline=config.baseline, std_norm=config.std_norm
        )
        learned = [
            (rollout, advantage)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
            if not rollout.failed and not (config.mask_overlong and rollout.overlong)
        ]
        tokens += sum(rollout.sampled_tokens for rollout, _ in learned)
        if config.kl.beta or np.nan_to_num(advantages).any():
            for rollout, advantage in learned:
                number = rows[-1].rollout + 1 if rows else 0
                rows += _rows(rollout, advantage, number, config)
    denominators = {
        "constant": rollouts * config.tokens_per_rollout,
        "rollout": rollouts,
        "batch": max(tokens, 1),
    }
    return Credit(tuple(rows), float(denominators[config.length_norm]))


def _rows(
    rollout: Rollout, advantage: float, number: int, config: PolicyGradientConfig
) -> list[Row]:
    weight = 1 / max(rollout.sampled_tokens, 1) if config.length_norm == "rollout" else 1.0
    return [
        Row(
            rollout=number,
            tokens=link.tokens,
            weights=np.where(link.loss_mask, weight, 0),
            advantages=np.where(link.loss_mask, advantage, 0),
            log_probs=link.log_probs,
            temperatures=link.temperatures,
            routes=link.routes,
        )
        for link in rollout.generations
        if link.loss_mask.any()
    ]
