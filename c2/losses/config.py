"""What reinforcement learning maximises, as a config; imports no jax."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from c2.config import ConfigError

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
Baseline = Literal["mean", "leave_one_out"]


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The pull towards a reference policy, KL(policy || reference) (report section 3).

    The report uses k1 and says neither where it puts it nor what it costs; only in the reward has
    it a gradient. `experiments/kl_placement.py` compares all uses.

    Attributes:
      beta: reward that a nat costs; 0 needs no reference.
      estimator: see `c2.losses.kl`.
      placement: "reward" subtracts the estimate from the reward, as a constant; "loss"
        differentiates it, token by token.
      horizon: in the reward, what a token answers for. "to_go" is its own estimate and all later
        ones of its rollout: the gradient of the KL of whole rollouts. "token" is its own alone,
        which leaves out what it does to the tokens behind it.
    """

    beta: float = 0.0
    estimator: Estimator = "k1"
    placement: Literal["reward", "loss"] = "reward"
    horizon: Literal["to_go", "token"] = "to_go"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise ConfigError(f"beta: {self.beta}; legal: finite numbers from 0")
        if (self.estimator, self.placement) == ("k1", "loss"):
            raise ConfigError(
                "placement: 'loss' does nothing with estimator k1, whose derivative is that of the"
                " policy's log-probability and has mean 0 whatever the reference is; legal:"
                " 'reward', or 'loss' with estimator k2, which has the gradient that k1 has in the"
                " reward"
            )


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig:
    """How tokens are weighted that another policy has sampled than the one that learns.

    The report names no such weights: it keeps samples fresh and replays routes.

    Attributes:
      kind: "off"; "token_tis", truncated ratios of single tokens; "sequence_tis", the truncated
        product of the ratios of a sequence, for all of its tokens; "mis", ratios of single tokens,
        where those out of bounds are left out instead of truncated.
      high: largest ratio.
      low: smallest ratio, of "mis".
    """

    kind: Literal["off", "token_tis", "sequence_tis", "mis"] = "off"
    high: float = 2.0
    low: float = 0.5

    def __post_init__(self) -> None:
        if not self.high >= 1:
            raise ConfigError(f"high: {self.high}; legal: at least 1, the ratio of equal policies")
        if not 0 <= self.low <= 1:
            raise ConfigError(f"low: {self.low}; legal: 0 to 1, the ratio of equal policies")


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig:
    """The objective: by default that of Dr. GRPO (Liu et al. 2025), as in the report.

    Attributes:
      baseline: what a reward is compared with: the mean of its group, or of the others in it.
      std_norm: whether advantages are divided by the standard deviation of their group, as in
        GRPO. It blows up tiny differences in groups of equal correctness.
      length_norm: what a token counts. "constant": the same in every rollout and step.
        "rollout": one over the tokens of its rollout, as in GRPO, which shortens right answers and
        lengthens wrong ones. "batch": one over the tokens of the step, as in DAPO.
      tokens_per_rollout: the constant; a rollout's token budget is a good one.
      mask_overlong: whether rollouts that a budget has ended are not learned from. They stay in
        the baseline.
      kl: the pull towards a reference policy.
      importance: weights of tokens that another policy has sampled.
    """

    baseline: Baseline = "mean"
    std_norm: bool = False
    length_norm: Literal["constant", "rollout", "batch"] = "constant"
    tokens_per_rollout: int = 32768
    mask_overlong: bool = False
    kl: KLConfig = field(default_factory=KLConfig)
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)

    def __post_init__(self) -> None:
        if self.tokens_per_rollout < 1:
            raise ConfigError(f"tokens_per_rollout: {self.tokens_per_rollout}; legal: at least 1")
