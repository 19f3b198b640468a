"""What groups of rollouts look like, for logs; no jax."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from c2.records import Group


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over rollouts, but for failures without those that the infrastructure has failed.

    ``reward``, ``correct``, ``overlong``, ``policy_failure``, ``links`` of their chains,
    ``sampled_tokens``; ``effort/NAME`` and ``behaviour/NAME``. Of all: ``lost``, the share of
    failures. Of groups: ``best_of_group``, the mean of the best correctness, and ``flat_groups``,
    the share of those with equal rewards, which teach nothing. NaN where nothing is left.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    kept = [rollout for rollout in rollouts if not rollout.failed]
    rewards = [reward[~np.isnan(reward)] for reward in (group.rewards for group in groups)]
    best = [max((r.correct for r in g.rollouts if not r.failed), default=np.nan) for g in groups]
    values = {
        "reward": [r.reward for r in kept],
        "correct": [r.correct for r in kept],
        "overlong": [r.overlong for r in kept],
        "policy_failure": [r.outcome == "policy_failure" for r in kept],
        "links": [len(r.generations) for r in kept],
        "sampled_tokens": [r.sampled_tokens for r in kept],
        "lost": [r.failed for r in rollouts],
        "best_of_group": [x for x in best if x == x],
        "flat_groups": [len(set(reward)) == 1 for reward in rewards if len(reward)],
    }
    for r in kept:
        for name, value in dataclasses.asdict(r.effort).items():
            values.setdefault(f"effort/{name}", []).append(value)
        for name, value in r.behaviours.items():
            values.setdefault(f"behaviour/{name}", []).append(value)
    return {name: float(np.mean(x)) if x else np.nan for name, x in values.items()}
