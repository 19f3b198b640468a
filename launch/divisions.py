"""Finds approximate division in what a compiler made of a program.

The block-scaled formats promise the same bytes on every chip, and a compiler that makes an
approximation of a division, or of a reciprocal, breaks that silently. So no program on their path
may hold one, not even where it would do no harm.
"""

import re
from pathlib import Path
from typing import NamedTuple

# PTX of a GPU program; low-level code of a TPU kernel; HLO, where XLA hides the code for a TPU
_PTX = re.compile(r"\b(?:div\.full|div\.approx|rcp\.approx)[.\w]*")
_LLO = re.compile(r"\bllo\.v\w*(?:recip|rcp|div)[.\w]*")
_HLO = re.compile(r"= (?:bf16|f\d+)\S* (divide)\(")


class Found(NamedTuple):
    """How many texts were read, and which approximate instructions they hold, sorted."""

    texts: int
    instructions: tuple[str, ...]


def search(dumped: Path, hlo: str | None) -> Found:
    """Reads what `targets.prepare` had dumped, and the HLO of the program if that is given."""
    found, texts = set(), 0
    for pattern, files in (
        (_PTX, dumped.glob("*.ptx")),
        (_LLO, dumped.glob("*-post-finalize-llo.txt")),
    ):
        for file in files:
            texts += 1
            found |= set(pattern.findall(file.read_text(errors="replace")))
    if hlo is not None:
        texts += 1
        found |= {f"hlo {name}" for name in _HLO.findall(hlo)}
    return Found(texts, tuple(sorted(found)))
