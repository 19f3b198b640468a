"""What several seeds say together: gains that are paired by task, and rank correlation.

A claim about a policy rests on tasks and on seeds. A gain is measured task by task, since most of
the variance is between tasks, with a standard error over them; and all seeds have to agree about
its sign, which that error says nothing about.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.post_training_report import CLEAR, Mean
from experiments.study import Claim

Values = Mapping[str, float]
"""Of one seed, by task; NaN where nothing could be measured."""

AGREEING = "gain in standard errors over tasks; 0 if seeds disagree"


class Gain(NamedTuple):
    """How much larger something is than something else.

    Attributes:
      mean: over tasks, of the mean over seeds, with a standard error over tasks.
      seeds: the mean over tasks of every seed.
    """

    mean: Mean
    seeds: tuple[float, ...]

    @property
    def errors(self) -> float:
        """How many standard errors it is above 0; 0 if the seeds disagree about its sign."""
        value, error = self.mean
        if not all(math.copysign(1, value) * seed > 0 for seed in self.seeds):
            return 0.0
        return value / error if error else math.copysign(math.inf, value)

    def __str__(self) -> str:
        """The gain with its error, and that of every seed."""
        seeds = ", ".join(f"{seed:+.3f}" for seed in self.seeds)
        value, error = self.mean
        return f"{value:+.3f} with a standard error of {error:.3f} over tasks; by seed {seeds}"


def paired(after: Sequence[Values], before: Sequence[Values]) -> Gain:
    """The gain on the same tasks, by seed; what only one of the two has counts for nothing."""
    by_task, seeds = defaultdict(list), []
    for a, b in zip(after, before, strict=True):
        found = {task: a[task] - b[task] for task in a if task in b}
        found = {task: x for task, x in found.items() if x == x}
        seeds.append(Mean.of(list(found.values())).value)
        for task, x in found.items():
            by_task[task].append(x)
    return Gain(Mean.of([np.mean(x) for x in by_task.values()]), tuple(seeds))


def unpaired(after: Sequence[Values], before: Sequence[Values]) -> Gain:
    """The gain where tasks are others; errors add up."""
    a, b = (
        Mean.of([x for values in side for x in values.values() if x == x])
        for side in (after, before)
    )
    seeds = (mean(x) - mean(y) for x, y in zip(after, before, strict=True))
    return Gain(Mean(a.value - b.value, math.hypot(a.error, b.error)), tuple(seeds))


def mean(values: Values) -> float:
    """Over tasks where something was measured; NaN without any."""
    return Mean.of([x for x in values.values() if x == x]).value


def claim(statement: str, gain: Gain, note: str = "") -> Claim:
    """That a gain is clear: so many standard errors, with all seeds agreeing."""
    return Claim(
        statement=f"{statement} ({AGREEING})", measured=gain.errors, bound=CLEAR,
        relation=">=", seeds=len(gain.seeds), note=f"{note}{gain}",
    )  # fmt: skip


def spread(values: Sequence[float]) -> str:
    """Mean and range over seeds, in words."""
    return f"{np.mean(values):.3f} ({np.min(values):.3f} to {np.max(values):.3f})"


def draw_seeds(axes: Axes, x: np.ndarray, values: np.ndarray, color: str, **line: Any) -> None:
    """A line for the mean over seeds and a band for their range; values are [seed, x]."""
    axes.plot(x, values.mean(0), color=color, **line)
    low, high = values.min(0), values.max(0)
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


class Correlation(NamedTuple):
    """Spearman's rank correlation, and the chance of one as low or lower without any relation."""

    rho: float
    p: float


def falls_with(x: np.ndarray, y: np.ndarray) -> Correlation:
    """Whether one quantity falls as the other rises, exactly, whatever their distributions are.

    Ranks are over all points. Without any relation all orders of a seed's values are equally
    likely; p is the share of them, over all seeds together, that correlate as negatively. What a
    seed has in common cannot make p small. Ties have their mean rank; NaN if a value is, or if all
    are equal.

    Args:
      x: [seed, level].
      y: [seed, level], what is reordered.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    ranks_x, ranks_y = _centred_ranks(x), _centred_ranks(y)
    norm = np.linalg.norm(ranks_x) * np.linalg.norm(ranks_y)  # the same in every order
    if np.isnan(x).any() or np.isnan(y).any() or norm == 0:
        return Correlation(math.nan, math.nan)
    by_seed = [
        np.array([a @ np.array(order) for order in itertools.permutations(b)])
        for a, b in zip(ranks_x, ranks_y, strict=True)
    ]
    found = float((ranks_x * ranks_y).sum() / norm)
    orders = functools.reduce(np.add.outer, by_seed) / norm
    return Correlation(found, float(np.mean(orders <= found + 1e-9)))


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    flat = np.round(values.ravel(), 9)  # what differs by rounding alone is a tie
    below, equal = (flat < flat[:, None]).sum(1), (flat == flat[:, None]).sum(1)
    ranks = below + equal / 2
    return (ranks - ranks.mean()).reshape(values.shape)
