"""What a rollout is worth: correctness, less its cost, with rewards for behaviour; no jax."""

import dataclasses
import math
from dataclasses import dataclass, field

from c2.agent.harness import Session
from c2.config import ConfigError, suggestion
from c2.records import Effort, Generation, Rollout
from c2.rl.behaviours import BEHAVIOURS, measure
from c2.sandbox.tasks.grade import Outcome


@dataclass(frozen=True, kw_only=True)
class LengthPenaltyConfig:
    """The length penalty: price * C_{k,q}(effort), see `c2.losses.length_penalty`.

    The report publishes none of these numbers. `experiments/length_penalty.py` shows what they do:
    with q of 1 and more hard tasks keep their effort, if 1 / k is about that of an easy one.

    Attributes:
      price: reward that the first unit of effort costs; 0 turns it off.
      k: how early the marginal cost starts to fall.
      q: how fast it falls.
      weights: effort of one of each quantity. A turn costs more than a call, so calls that are made
        together are cheaper.
    """

    price: float = 0.0
    k: float = 1.0
    q: float = 1.0
    weights: Effort = field(
        default_factory=lambda: Effort(
            thinking_tokens=1e-3,
            call_tokens=1e-3,
            answer_tokens=1e-4,
            final_tokens=1e-3,
            calls=0.05,
            turns=0.1,
        )
    )

    def __post_init__(self) -> None:
        for name, value in {**vars(self), **vars(self.weights)}.items():
            if name != "weights" and not 0 <= value < math.inf:
                raise ConfigError(f"{name}: {value}; legal: finite numbers from 0")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What counts besides correctness.

    Attributes:
      length: the length penalty.
      behaviours: name -> reward at full measure, below 0 for a penalty; see `c2.rl.behaviours`.
        What is not named is measured all the same.
    """

    length: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    behaviours: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.behaviours.items():
            if name not in BEHAVIOURS:
                guess = suggestion(name, BEHAVIOURS)
                raise ConfigError(
                    f"behaviours.{name}: unknown;{guess} legal: {', '.join(BEHAVIOURS)}"
                )
            if not math.isfinite(value):
                raise ConfigError(f"behaviours.{name}: {value}; legal: finite numbers")


def effort(session: Session) -> Effort:
    """What a conversation has cost."""
    return Effort(
        thinking_tokens=session.written.thinking + session.written.text - session.final,
        call_tokens=session.written.call,
        answer_tokens=session.answered,
        final_tokens=session.final,
        calls=session.calls,
        turns=session.turns,
    )


def length_cost(spent: Effort, config: LengthPenaltyConfig) -> float:
    """What an effort costs, in reward.

    As `c2.losses.length_penalty`, without jax and without a gradient: rollouts are scored in
    processes that have neither. Float64 needs no more care than this.
    """
    weights = dataclasses.asdict(config.weights)
    x = sum(weight * getattr(spent, name) for name, weight in weights.items())
    if config.k == 0:
        return config.price * x
    u = math.log1p(config.k * x)
    power = 1 - config.q
    return config.price * (math.expm1(power * u) / power if power else u) / config.k


def rollout(
    generations: tuple[Generation, ...],
    session: Session,
    graded: Outcome | None,
    config: RewardConfig,
) -> Rollout:
    """A finished attempt with its reward.

    Args:
      generations: what was sampled.
      session: how the conversation went.
      graded: what came of it; None if nothing could be graded: the conversation has `failed`, or
        the policy has brought its own sandbox down, which counts as wrong.
      config: what counts.
    """
    if session.failed or (graded is not None and graded.kind == "infrastructure_failure"):
        outcome, correct = "infrastructure_failure", math.nan
    elif graded is None:
        outcome, correct = "policy_failure", 0.0
    else:
        outcome, correct = graded.kind, graded.reward
    spent, seen = effort(session), measure(session)
    bonus = sum(weight * seen[name] for name, weight in config.behaviours.items())
    return Rollout(
        generations=generations,
        outcome=outcome,
        stop=session.stop,
        correct=correct,
        reward=correct + bonus - length_cost(spent, config.length),
        effort=spent,
        behaviours=seen,
    )
