"""Turns of a rollout as rows for training, exactly as they were sampled.

Text that is tokenised again can come out as other tokens, and then a trainer would learn from
tokens that nobody sampled. So prompts and completions are kept as tokens. A prompt that goes on
where the last completion ended extends the row; any other one (thoughts left out, a summary in the
place of old turns) begins a new row, and nothing is ever patched. Every sampled token is in the
loss mask of exactly one row.
"""

from collections.abc import Sequence

import numpy as np

from c2.records import NO_ROUTE, NO_VERSION, Completion, Generation


class Trace:
    """Collects the turns of one rollout.

    Attributes:
      generations: the rows so far, in their order.
    """

    def __init__(self, generations: Sequence[Generation] = ()) -> None:
        """Begins, or goes on behind these."""
        self.generations = tuple(generations)

    def add(self, turn: Completion) -> None:
        """Takes the next turn."""
        *done, last = self.generations or (_nothing(turn),)
        if not np.array_equal(turn.prompt[: len(last.tokens)], last.tokens):
            done, last = [*done, last], _nothing(turn)
        self.generations = (*done, _extended(last, turn))


def _extended(row: Generation, turn: Completion) -> Generation:
    new = len(turn.prompt) - len(row.tokens)  # of the prompt, which nobody sampled

    def joined(old: np.ndarray, fill: float, sampled: np.ndarray) -> np.ndarray:
        return np.concatenate([old, np.full(new, fill, old.dtype), sampled.astype(old.dtype)])

    routes = turn.routes.copy()
    old = routes[: len(row.tokens)]
    old[row.routes != NO_ROUTE] = row.routes[row.routes != NO_ROUTE]
    return Generation(
        tokens=np.concatenate([turn.prompt, turn.tokens]).astype(np.int32),
        loss_mask=joined(row.loss_mask, False, ~turn.forced),
        log_probs=joined(row.log_probs, 0, turn.log_probs),
        versions=joined(row.versions, NO_VERSION, turn.versions),
        temperatures=joined(row.temperatures, 1, np.full(len(turn.tokens), turn.temperature)),
        routes=routes,
    )


def _nothing(turn: Completion) -> Generation:
    return Generation(
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        log_probs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        temperatures=np.zeros(0, np.float32),
        routes=np.zeros((0, *turn.routes.shape[1:]), np.int16),
    )
