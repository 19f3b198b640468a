"""Removes equal and nearly equal documents, and documents that give away the held-out package.

Two documents are compared by their sets of shingles: hashes of every `SHINGLE` consecutive tokens
(words and signs; white space does not count). MinHash with banding proposes pairs, and the exact
Jaccard similarity of the two sets decides, so a proposal is never a false removal; a pair of
similarity 0.8 is missed with probability 2e-4. Everything is deterministic.
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

SHINGLE = 5
BANDS, ROWS = 16, 4  # a pair of similarity s is proposed with probability 1 - (1 - s**4)**16
LEAK = 0.5  # a document sharing half of the smaller one's shingles with a held-out file is a leak

_TOKEN = re.compile(r"\w+|[^\w\s]")
_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads the bits of a product


class _TokenHashes(dict):
    """Memo of token -> 32-bit hash; Python's own hash of a string differs between processes."""

    def __missing__(self, token: str) -> int:
        self[token] = value = zlib.crc32(token.encode("utf-8"))
        return value


def deduplicate(
    texts: Sequence[str], held_out: Sequence[str], max_similarity: float
) -> tuple[list[int], Counter[str]]:
    """Indices of the texts to keep, in order, and how many were dropped for each reason.

    Of several similar texts the first is kept.

    Args:
      texts: candidates.
      held_out: texts that nothing in the result may resemble.
      max_similarity: Jaccard similarity from which two texts are near duplicates.
    """
    hashes = _TokenHashes()
    secret = [shingles(text, hashes) for text in held_out]
    secret_union = np.unique(np.concatenate(secret)) if secret else np.zeros(0, np.uint64)
    factors, offsets = _permutations()

    kept: dict[int, np.ndarray] = {}  # index -> shingles
    seen: set[str] = set()
    buckets: dict[tuple[int, bytes], list[int]] = defaultdict(list)
    dropped: Counter[str] = Counter()
    for index, text in enumerate(texts):
        if text in seen:
            dropped["duplicate"] += 1
            continue
        seen.add(text)
        mine = shingles(text, hashes)
        if _leaks(mine, secret, secret_union):
            dropped["resembles held-out"] += 1
            continue
        signature = _minhash(mine, factors, offsets).reshape(BANDS, ROWS)
        keys = [(band, row.tobytes()) for band, row in enumerate(signature)]
        candidates = sorted({other for key in keys for other in buckets[key]})
        if any(jaccard(mine, kept[other]) >= max_similarity for other in candidates):
            dropped["near duplicate"] += 1
            continue
        kept[index] = mine
        for key in keys:
            buckets[key].append(index)
    return list(kept), dropped


def shingles(text: str, hashes: dict[str, int] | None = None) -> np.ndarray:
    """Sorted unique uint64 hashes of all runs of `SHINGLE` tokens; of the whole text if shorter."""
    hashes = _TokenHashes() if hashes is None else hashes
    tokens = np.array([hashes[token] for token in _TOKEN.findall(text)], np.uint64)
    width = min(SHINGLE, len(tokens))
    if width == 0:
        return np.zeros(0, np.uint64)
    runs = len(tokens) - width + 1
    mixed = np.zeros(runs, np.uint64)
    for offset in range(width):
        mixed = (mixed + tokens[offset : offset + runs]) * _ODD
        mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """|a and b| / |a or b| of two sorted unique arrays; two empty sets are equal."""
    shared = _shared(a, b)
    union = len(a) + len(b) - shared
    return shared / union if union else 1.0


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    return len(np.intersect1d(a, b, assume_unique=True))


def _leaks(mine: np.ndarray, secret: Sequence[np.ndarray], union: np.ndarray) -> bool:
    """Whether this document and a held-out file share much of the smaller of the two."""
    mine_secret = mine[np.isin(mine, union, assume_unique=True)]
    return any(
        _shared(mine_secret, other) >= LEAK * min(len(mine), len(other))
        for other in secret
        if len(other)
    )


def _permutations() -> tuple[np.ndarray, np.ndarray]:
    """Parameters of the multiply-add hash functions that stand for random permutations."""
    draws = np.random.default_rng(0).integers(0, 2**64, (2, BANDS * ROWS), np.uint64)
    return draws[0] | np.uint64(1), draws[1]


def _minhash(values: np.ndarray, factors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint64 [BANDS * ROWS]: the smallest value under each hash function."""
    if not len(values):
        return np.zeros(len(factors), np.uint64)
    return np.array([(values * a + b).min() for a, b in zip(factors, offsets, strict=True)])
