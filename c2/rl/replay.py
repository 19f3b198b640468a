"""How the experts that the engine chose are replayed while a policy learns (report section 3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from c2.config import ConfigError
from c2.models import moe


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Replay of routes.

    Attributes:
      mode: "none" routes anew; "strict" takes every captured route; "filter" takes from it the
        experts that are `c2.models.moe.plausible`. On sound routes "strict" is the best; the filter
        helps where some are wrong or stale.
      slack: of "filter", in selection scores, which are 0 to 1 before the bias. From 0.02 up it
        keeps what differs by the rounding of bfloat16.
    """

    mode: Literal["none", "strict", "filter"] = "filter"
    slack: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.slack < math.inf:
            raise ConfigError(f"slack: {self.slack}; legal: finite numbers from 0")

    def experts(self, experts: Callable = moe.moe) -> Callable:
        """The mixture function to run the model with.

        Args:
          experts: `c2.models.moe.moe`, or what a mesh makes of it.
        """
        if self.mode == "none":
            return lambda x, p, real, routes, cfg: experts(x, p, real, None, cfg)
        return partial(experts, slack=self.slack) if self.mode == "filter" else experts
