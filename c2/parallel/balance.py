"""Global sequence packing: which rank computes which sequence, by the true cost of attention.

Report section 5: before a step the sequences of all data-parallel ranks are dealt anew, since a
step takes as long as its busiest rank.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EXACT_ITEMS = 2048  # up to here the slower of the two heuristics is tried, too


class Cost(NamedTuple):
    """Forward FLOPs of a sequence of s tokens: ``quadratic * s**2 + linear * s``.

    Attributes:
      quadratic: of attention; a causal sequence has s**2 / 2 pairs.
      linear: of everything else.
    """

    quadratic: float
    linear: float

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """FLOPs of sequences with these lengths, f64."""
        lengths = np.asarray(lengths, np.float64)
        return self.quadratic * lengths**2 + self.linear * lengths


def partition(costs: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Deals items to ranks such that the most loaded rank has little more than the mean.

    The better of longest processing time first (Graham 1969) and, for few items, where it matters,
    the largest differencing method (Karmarkar and Karp 1982).

    Args:
      costs: of the items, not negative [item].
      ranks: number of ranks; some stay empty if there are fewer items.

    Returns:
      Per rank the ids of its items, ascending.

    Raises:
      ValueError: for fewer than one rank, or costs that are negative or not finite.
    """
    costs = np.asarray(costs, np.float64)
    if ranks < 1:
        raise ValueError(f"ranks = {ranks} must be positive")
    if not (np.isfinite(costs).all() and (costs >= 0).all()):
        raise ValueError("costs must be finite and not negative")
    found = [_longest_first(costs, ranks)]
    if len(costs) <= EXACT_ITEMS:
        found.append(_differencing(costs, ranks))
    best = min(found, key=lambda parts: max(costs[part].sum() for part in parts))
    return [np.sort(np.array(part, np.int64)) for part in best]


def imbalance(costs: np.ndarray, parts: Sequence[np.ndarray]) -> float:
    """Load of the busiest rank over the mean; no partition is below max(1, largest / mean)."""
    loads = [np.asarray(costs, np.float64)[part].sum() for part in parts]
    return float(max(loads) / np.mean(loads)) if sum(loads) else 1.0


def _longest_first(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Each item, the largest first, to the rank that has least."""
    parts = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, rank = heap[0]
        parts[rank].append(item)
        heapq.heapreplace(heap, (load + costs[item], rank))
    return parts


def _differencing(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Merges the two partial solutions with the largest spread, heaviest part to lightest."""
    # a solution: minus its spread, a number that breaks ties, its parts from light to heavy
    heap = []
    for item, cost in enumerate(costs.tolist()):
        parts = [(0.0, [])] * (ranks - 1) + [(cost, [item])]
        heap.append((parts[0][0] - cost, item, parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, number, second = heapq.heappop(heap)
        merged = [
            (a + b, left + right)
            for (a, left), (b, right) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda part: part[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
    if not heap:
        return [[] for _ in range(ranks)]
    return [items for _, items in heap[0][2]]
