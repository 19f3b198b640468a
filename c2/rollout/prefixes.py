"""Which sequences' caches are kept, for requests that begin with the same tokens.

The device holds the caches; this is the index on the host. Everything in it was computed by one
policy version: new weights empty it, so no request ever starts from older ones.
"""

from dataclasses import dataclass

import numpy as np


@dataclass
class Entry:
    """A kept sequence: its cached tokens [token], their routes [token, ...], its last use."""

    tokens: np.ndarray
    routes: np.ndarray
    used: int


class Prefixes:
    """An index with a fixed number of places; the longest unused makes room."""

    def __init__(self, places: int) -> None:
        self._entries: list[Entry | None] = [None] * places
        self._clock = 0

    def clear(self) -> None:
        """Forgets everything: the policy version has changed."""
        self._entries = [None] * len(self._entries)

    def find(self, tokens: np.ndarray) -> tuple[int, int]:
        """The place with the longest common beginning, and its length; (-1, 0) without any."""
        lengths = [0 if e is None else common(e.tokens, tokens) for e in self._entries]
        longest = max(lengths, default=0)
        return (lengths.index(longest), longest) if longest else (-1, 0)

    def use(self, place: int, length: int) -> np.ndarray:
        """Marks a place as used; returns the routes of its first tokens."""
        entry = self._entries[place]
        self._clock += 1
        entry.used = self._clock
        return entry.routes[:length]

    def add(self, tokens: np.ndarray, routes: np.ndarray) -> int | None:
        """Where to keep a sequence, or None if it is kept already, by itself or in a longer one."""
        if not self._entries or not len(tokens):
            return None
        place, length = self.find(tokens)
        if length == len(tokens):
            self.use(place, length)
            return None
        if not length or length < len(self._entries[place].tokens):  # else this one goes on with it
            last_use = [0 if e is None else e.used for e in self._entries]
            place = last_use.index(min(last_use))
        self._clock += 1
        self._entries[place] = Entry(tokens, routes, self._clock)
        return place


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size
