"""How much better than its group a rollout is; numpy only."""

from typing import get_args

import numpy as np
from numpy.typing import ArrayLike

from c2.losses.config import Baseline

STD_FLOOR = 1e-4  # added to standard deviations


def group_advantages(
    rewards: ArrayLike, *, baseline: Baseline = "mean", std_norm: bool = False
) -> np.ndarray:
    """Advantages of rollouts over others of the same prompt.

    Args:
      rewards: [group, sample]; NaN where there is none, because of a failure that is not the
        policy's: such a place is in no baseline.
      baseline: "mean" of the group (Dr. GRPO), or the mean of the others ("leave_one_out", RLOO),
        which makes the policy gradient unbiased. With n rewards the first is (n - 1) / n times the
        second.
      std_norm: whether to divide by the group's standard deviation, as GRPO does; population
        standard deviation plus 1e-4.

    Returns:
      f64 [group, sample]; NaN where there is no reward. If all rewards of a group are equal, or
      there is only one, they are 0 exactly; else at least one is not.

    Raises:
      ValueError: for another shape, infinite rewards or an unknown baseline.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2:
        raise ValueError(f"rewards: shape {rewards.shape}; legal: [group, sample]")
    if np.isinf(rewards).any():
        raise ValueError("rewards: some are infinite; legal: numbers, or NaN for none")
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline: {baseline!r} is none of {', '.join(get_args(Baseline))}")
    scored = ~np.isnan(rewards)
    count = np.maximum(scored.sum(1, keepdims=True), 1)

    def mean(x: np.ndarray) -> np.ndarray:
        return np.where(scored, x, 0).sum(1, keepdims=True) / count

    # Exactly: the mean of equal numbers can be another number, by rounding.
    highest = np.where(scored, rewards, -np.inf).max(1, keepdims=True, initial=-np.inf)
    lowest = np.where(scored, rewards, np.inf).min(1, keepdims=True, initial=np.inf)
    centred = np.where(scored & (highest == lowest), 0, rewards - mean(rewards))
    if baseline == "leave_one_out":
        centred = centred * (count / np.maximum(count - 1, 1))
    if std_norm:
        centred = centred / (np.sqrt(mean((rewards - mean(rewards)) ** 2)) + STD_FLOOR)
    return centred
