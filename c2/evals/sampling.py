"""What several attempts at a task are worth, from more attempts than that; imports no jax."""

import math

import numpy as np


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k attempts is right, where c of n were.

    Unbiased: the mean over all choices of k of the n attempts (Chen et al. 2021, section 2.1).

    Raises:
      ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n = {n}, c = {c}, k = {k}; legal: 0 <= c <= n and 1 <= k <= n")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def best_of_k(rewards: np.ndarray, k: int) -> np.ndarray:
    """The expected best reward of k attempts, by the same mean over choices.

    With rewards of 0 and 1 it is `pass_at_k`.

    Args:
      rewards: [..., attempt].
      k: attempts to choose from.

    Returns:
      f64 [...].

    Raises:
      ValueError: unless 1 <= k <= attempts.
    """
    ascending = np.sort(np.asarray(rewards, np.float64), axis=-1)
    n = ascending.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k = {k}; legal: 1 to the {n} attempts")
    # the i-th smallest is the best of those choices that take k - 1 others from below it
    chances = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return ascending @ np.array(chances)
