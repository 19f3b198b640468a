"""A small search index over pieces of files: BM25 on words and on parts of words.

Names are split into words ("readFile" and "read_file" are "read" and "file"), and longer words also
count as their trigrams, which together weigh as much as the word, so that "initialise" finds
`Initializer`. BM25 is Robertson and Zaragoza,
"The Probabilistic Relevance Framework", 2009, with the idf that cannot be negative.
"""

import collections
import heapq
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LINES, STEP = 30, 20  # of a piece, and from one piece to the next
K1, B = 1.2, 0.75
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_LEAST = 5  # letters of a word that counts as its trigrams too


@dataclass(frozen=True)
class Hit:
    """A piece of a file, by the numbers of its first and last line."""

    path: str
    first: int
    last: int
    text: str
    score: float


class Index:
    """An index of texts; searching changes nothing, so threads can share it.

    Args:
      texts: path -> text.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._pieces = [piece for path in sorted(texts) for piece in _pieces(path, texts[path])]
        self._postings: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        lengths = []
        for number, (path, _, text) in enumerate(self._pieces):
            counts = collections.Counter(terms(f"{path}\n{text}"))
            lengths.append(counts.total())
            for term, count in counts.items():
                self._postings[term].append((number, count))
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]

    def search(self, query: str, count: int) -> list[Hit]:
        """The pieces that fit best, best first; ties in the order of paths and lines."""
        scores: dict[int, float] = collections.defaultdict(float)
        for term, share in weights(query).items():
            postings = self._postings.get(term, ())
            rarity = (len(self._pieces) - len(postings) + 0.5) / (len(postings) + 0.5)
            for number, times in postings:
                weight = times * (K1 + 1) / (times + self._norms[number])
                scores[number] += share * math.log1p(rarity) * weight
        best = heapq.nsmallest(count, scores, key=lambda number: (-scores[number], number))
        return [self._hit(number, scores[number]) for number in best]

    def _hit(self, number: int, score: float) -> Hit:
        path, first, text = self._pieces[number]
        return Hit(path, first, first + text.count("\n"), text, score)


def terms(text: str) -> Iterator[str]:
    """The words of a text in lower case, and the trigrams of longer ones."""
    for match in _WORD.finditer(text):
        word = match[0].lower()
        yield word
        if len(word) >= _LEAST:
            yield from _trigrams(word)


def weights(query: str) -> dict[str, float]:
    """The terms of a query: a word weighs 1, and so do all trigrams of it together."""
    result: dict[str, float] = {}
    for word in sorted({term for term in terms(query) if not term.startswith("~")}):
        result[word] = 1.0
        trigrams = _trigrams(word) if len(word) >= _LEAST else []
        for trigram in trigrams:
            result[trigram] = result.get(trigram, 0.0) + 1 / len(trigrams)
    return result


def _trigrams(word: str) -> list[str]:
    return [f"~{word[i : i + 3]}" for i in range(len(word) - 2)]


def _pieces(path: str, text: str) -> Iterator[tuple[str, int, str]]:
    lines = text.split("\n")
    for start in range(0, max(len(lines) - (LINES - STEP), 1), STEP):
        piece = "\n".join(lines[start : start + LINES])
        if piece.strip():
            yield path, start + 1, piece
