"""Generated repair tasks on small packages, for models of about a million parameters.

`generate(seed, family, level)` gives a task and `draw(seed, level, split)` one of a held-out split;
`policies` has scripted agents. Files are short, lines are short, words are few.
"""

from c2.sandbox.tasks.minirepo.generate import FAMILIES, draw, from_id, generate, slip, solve, sound
from c2.sandbox.tasks.minirepo.layout import LEVELS
from c2.sandbox.tasks.minirepo.splits import SPLITS, split

__all__ = [
    "FAMILIES",
    "LEVELS",
    "SPLITS",
    "draw",
    "from_id",
    "generate",
    "slip",
    "solve",
    "sound",
    "split",
]
