import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from c2.records import Completion


class ToyTokenizer:
    """Letters a to d, and "ab" and "cd", which `encode` prefers: most texts have several ids."""

    LETTERS = ("a", "b", "c", "d", "ab", "cd", " ", "\n")
    NAMES = ("end", "system", "user", "assistant", "tool", "think", "call", "turn_end")

    def encode(self, text: str) -> Sequence[int]:
        ids = []
        while text:
            best = max(filter(text.startswith, self.LETTERS), key=len, default=None)
            ids.append(self.LETTERS.index(best or " "))
            text = text[len(best or " ") :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        names = [*self.LETTERS, *(f"<|{name}|>" for name in self.NAMES)]
        return "".join(names[i] for i in ids)

    def special(self, name: str) -> int:
        return len(self.LETTERS) + self.NAMES.index(name)


class FixedPolicy:
    """Samples given turns; remembers what it was asked."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.completions: list[Completion] = []
        self.seeds: list[int] = []
        self.limits: list[int] = []

    async def complete(self, ids, *, max_tokens, stop, seed) -> Completion:
        await asyncio.sleep(0)
        turn = np.array(self.turns[len(self.prompts)][:max_tokens], np.int32)
        number = len(self.prompts)
        self.prompts.append(list(ids))
        self.seeds.append(seed)
        self.limits.append(max_tokens)
        self.completions.append(
            Completion(
                prompt=np.array(ids, np.int32), tokens=turn, log_probs=-0.5 - turn / 64,
                versions=np.full(len(turn), number), forced=np.zeros(len(turn), bool),
                routes=np.full((len(ids) + len(turn), 2, 1), number, np.int16), temperature=0.7,
                finish="stop" if len(turn) and turn[-1] in stop else "length",
            )
        )  # fmt: skip
        return self.completions[-1]


@pytest.fixture(scope="session")
def toy():
    return ToyTokenizer()


@pytest.fixture(scope="session")
def fixed_policy():
    return FixedPolicy
