"""What policies did in the rollouts that a run was trained on, from its journal."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from c2.records import Rollout
from c2.rl.journal import Journal
from experiments.evidence import Values

MEASURES = {
    "tokens": "tokens that are written",
    "turns": "turns",
    "calls": "calls of a turn that has some",
    "parallel": "turns with calls that have several",
    "correct": "pass rate",
}

Steps = Sequence[Mapping[str, Values]]
"""Of a run, by step, measure and task."""


def by_step(journal: Path) -> list[dict[str, dict[str, float]]]:
    """`MEASURES` of the groups of every step."""
    with Journal(journal) as seen:
        steps = []
        for batch in seen.batches:
            groups = {seen.prompts[i]: measure(seen.rollouts(i).values()) for i in batch}
            steps.append({name: {task: x[name] for task, x in groups.items()} for name in MEASURES})
        return steps


def measure(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """`MEASURES` of a group; NaN where there is nothing to measure."""
    kept = [rollout for rollout in rollouts if not rollout.failed]
    calls = [
        len(event["calls"])
        for rollout in kept
        for event in rollout.transcript
        if event["event"] == "turn" and event.get("calls")
    ]
    values = {
        "tokens": [rollout.sampled_tokens for rollout in kept],
        "turns": [rollout.effort.turns for rollout in kept],
        "calls": calls,
        "parallel": [number > 1 for number in calls],
        "correct": [rollout.correct for rollout in kept],
    }
    return {name: float(np.mean(x)) if x else np.nan for name, x in values.items()}


def joined(steps: Steps, name: str) -> dict[str, float]:
    """A measure over several steps, by task; no task comes twice."""
    return {task: x for step in steps for task, x in step[name].items()}
