"""Writes the viewer's page: data as JSON in a template that needs no network."""

import dataclasses
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from c2.data.files import atomic
from c2.losses.advantages import group_advantages
from c2.records import Generation, Group, Rollout

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class View:
    """A group to be shown.

    Attributes:
      step: the training step that learned from it.
      group: its rollouts.
      trainer: by (rollout, link): log-probabilities f32 [token] of the same tokens as the trainer
        has computed them, and bool [token], whether an expert was replaced; where they are known.
    """

    step: int
    group: Group
    trainer: Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def write(path: Path, views: Sequence[View], decode: Decode, *, title: str) -> None:
    """Writes a page that shows groups; it is whole or not there.

    Args:
      path: the file.
      views: what to show.
      decode: the text of token ids; single ones are asked for.
      title: of the page.
    """
    data = {"title": title, "groups": [_group(view, decode) for view in views]}
    # "</script>" and "<!--" inside of the data would end or hide it
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = importlib.resources.files("experiments.viewer").joinpath("template.html").read_text()
    with atomic(path) as temporary:
        temporary.write_text(template.replace("/*DATA*/null", text))


def _group(view: View, decode: Decode) -> dict[str, Any]:
    (advantages,) = group_advantages(view.group.rewards[None])
    return {
        "step": view.step,
        "task": view.group.task,
        "rollouts": [
            _rollout(rollout, advantage, decode, view.trainer, number)
            for number, (rollout, advantage) in enumerate(
                zip(view.group.rollouts, advantages, strict=True)
            )
        ],
    }


def _rollout(rollout: Rollout, advantage: float, decode: Decode, trainer, number) -> dict[str, Any]:
    return {
        "outcome": rollout.outcome,
        "stop": rollout.stop,
        "correct": _number(rollout.correct),
        "reward": _number(rollout.reward),
        "advantage": _number(advantage),
        "effort": dataclasses.asdict(rollout.effort),
        "behaviours": {k: v for k, v in rollout.behaviours.items() if v},
        "links": [
            _link(link, decode, trainer.get((number, i)))
            for i, link in enumerate(rollout.generations)
        ],
    }


def _link(link: Generation, decode: Decode, trainer) -> list[list[Any]]:
    """A row per token: text, sampled or not, log-probability, version, gap, replaced."""
    rows = []
    for i, token in enumerate(link.tokens.tolist()):
        row: list[Any] = [decode([token]), int(link.loss_mask[i])]
        if link.loss_mask[i]:
            row += [_number(link.log_probs[i]), int(link.versions[i])]
            if trainer is not None:
                row += [_number(trainer[0][i] - link.log_probs[i]), int(trainer[1][i])]
        rows.append(row)
    return rows


def _number(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None
