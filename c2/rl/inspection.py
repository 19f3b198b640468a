"""What the trainer saw of the tokens of a step, for people; imports no jax.

Per-token differences between what sampled and what learns are the first place to look when
training goes wrong, and too much to keep of every step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from c2.records import Generation
from c2.rl.rows import Packed, Row

Seen = tuple[np.ndarray, np.ndarray]
"""Of a generation's tokens: log-probabilities f32 of the policy that learns, before the step, and
bool, whether an expert of the token's route was replaced."""


def save(
    path: Path,
    rows: Sequence[Row],
    packed: Packed,
    log_probs: np.ndarray,
    replaced: np.ndarray,
) -> None:
    """Writes what was seen.

    Args:
      path: the file.
      rows: of the step.
      packed: the same rows in a batch.
      log_probs: f32 [batch row, token], of the targets, at the place of the token in front.
      replaced: bool [batch row, token], of the tokens themselves.
    """
    arrays = {}
    for number, (row, (i, start, end)) in enumerate(zip(rows, packed.places, strict=True)):
        seen = np.zeros(len(row.tokens), np.float32)
        seen[1:] = log_probs[i, start : end - 1]
        arrays[f"{number}.tokens"] = np.asarray(row.tokens, np.int32)
        arrays[f"{number}.sampled"] = np.asarray(row.log_probs, np.float32)
        arrays[f"{number}.log_probs"] = seen
        arrays[f"{number}.replaced"] = replaced[i, start:end].copy()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    save_file(arrays, temporary)
    temporary.rename(path)


class Inspection:
    """What was seen in a step, found by what was sampled."""

    def __init__(self, path: Path) -> None:
        arrays: Mapping[str, np.ndarray] = load_file(path)
        self._seen: dict[tuple[bytes, bytes], Seen] = {}
        for number in range(len(arrays) // 4):
            names = (f"{number}.{name}" for name in ("tokens", "sampled", "log_probs", "replaced"))
            tokens, sampled, *seen = (arrays[name] for name in names)
            self._seen[tokens.tobytes(), sampled.tobytes()] = tuple(seen)

    def of(self, link: Generation) -> Seen | None:
        """Of a generation; None if nothing was learned from it."""
        return self._seen.get((link.tokens.tobytes(), link.log_probs.tobytes()))
