"""What the services of reinforcement learning tell each other: plain numpy records, no jax."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

NO_ROUTE = -1  # a real token without captured routes, in `Completion.routes`
NO_VERSION = -1  # a token that was not sampled, in `Generation.versions`


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """What the rollout engine sampled after one prompt; ids are never made from text again.

    Attributes:
      prompt: int32 [prompt].
      tokens: int32 [token]; a stop token that ended it is its last one.
      log_probs: f32 [token], of every token under the distribution that it was sampled from.
      versions: int32 [token], the policy version behind that distribution; never decreasing.
      forced: bool [token], True for tokens that the request dictated: no choice of the policy.
      routes: int16 [prompt + token, moe_layer, top_k], the experts that every token went through
        when it was first computed, `NO_ROUTE` for tokens that never were, such as the last.
      temperature: of the distribution.
      finish: whether a stop token or the token budget ended it. There is no other way: a request
        that is cancelled has no completion, and new weights end nothing.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    forced: np.ndarray
    routes: np.ndarray
    temperature: float
    finish: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """One context that only ever grew: a link of the chain that a rollout is.

    Attributes:
      tokens: int32 [token].
      loss_mask: bool [token], True for what the policy chose here.
      log_probs: f32 [token]; 0 where nothing was sampled.
      versions: int32 [token]; `NO_VERSION` where nothing was sampled.
      temperatures: f32 [token], of the distributions; 1 where nothing was sampled.
      routes: int16 [token, moe_layer, top_k], as of the first completion that has captured them.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    temperatures: np.ndarray
    routes: np.ndarray
