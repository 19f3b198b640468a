"""What a trainer of policies reads: rows of tokens with weights and advantages; imports no jax."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from c2.config import ConfigError
from c2.data.packing import Batch, best_fit

NO_TOKEN = -2  # routes of padding, see `c2.models.moe`


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A generation with what each of its tokens is worth: no reward, no group.

    Attributes:
      rollout: number of its rollout in the step. Rows of one stand together in the order of their
        chain.
      tokens: int32 [token], and so `log_probs`, `temperatures` and `routes`: as in
        `c2.records.Generation`.
      weights: [token], what a token counts; 0 where nothing is learned.
      advantages: [token].
    """

    rollout: int
    tokens: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    log_probs: np.ndarray
    temperatures: np.ndarray
    routes: np.ndarray


class Packed(NamedTuple):
    """Rows in a batch.

    Attributes:
      batch: see `pack`.
      places: int64 [row, 3], of each row the row of the batch and the places of its first token and
        behind its last one.
      rollouts: int64 [row], of `Row.rollout`.
    """

    batch: Batch
    places: np.ndarray
    rollouts: np.ndarray


def pack(rows: Sequence[Row], context: int, *, multiple: int = 1) -> Packed:
    """Packs rows, each a segment, into as few batch rows as best fit finds.

    The batch has arrays [batch row, context]. By token: ``tokens``, ``positions`` and
    ``segment_ids`` as in `c2.data.packing`, and ``routes`` [..., moe_layer, top_k], `NO_TOKEN` on
    padding. By target, at the place of the token in front of it: ``targets``, ``weights``,
    ``advantages``, ``sampled`` (log-probabilities under the policy that sampled) and
    ``temperatures`` (1 on padding).

    Args:
      rows: what to pack.
      context: tokens of a batch row.
      multiple: the number of batch rows is one of this; those added are padding.

    Raises:
      ConfigError: if a row is longer than `context`.
      ValueError: without rows, or if the first token of one, which nothing predicts, is learned.
    """
    if not rows:
        raise ValueError("rows: there are none, so there is nothing to learn")
    if learned := [number for number, row in enumerate(rows) if row.weights[0]]:
        raise ValueError(f"row {learned[0]}: its first token has a weight, but nothing predicts it")
    lengths = np.array([len(row.tokens) for row in rows])
    if lengths.max() > context:
        raise ConfigError(f"context: {context}; a row has {lengths.max()} tokens")
    at = best_fit(lengths, context)
    shape = (-(-(at.max() + 1) // multiple) * multiple, context)
    kinds = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), np.int32)
    kinds |= dict.fromkeys(("weights", "advantages", "sampled"), np.float32)
    batch = {name: np.zeros(shape, kind) for name, kind in kinds.items()}
    batch["temperatures"] = np.ones(shape, np.float32)
    batch["routes"] = np.full((*shape, *rows[0].routes.shape[1:]), NO_TOKEN, np.int16)

    used = np.zeros(shape[0], np.int64)
    segments = np.zeros(shape[0], np.int64)
    places = np.zeros((len(rows), 3), np.int64)
    for number, row in enumerate(rows):
        i, start, end = at[number], used[at[number]], used[at[number]] + lengths[number]
        segments[i] += 1
        by_token = {
            "tokens": row.tokens,
            "positions": np.arange(lengths[number]),
            "segment_ids": segments[i],
            "routes": row.routes,
        }
        by_target = {
            "targets": row.tokens,
            "weights": row.weights,
            "advantages": row.advantages,
            "sampled": row.log_probs,
            "temperatures": row.temperatures,
        }
        for name, values in by_token.items():
            batch[name][i, start:end] = values
        for name, values in by_target.items():
            batch[name][i, start : end - 1] = values[1:]
        places[number], used[i] = (i, start, end), end
    return Packed(batch, places, np.array([row.rollout for row in rows]))
