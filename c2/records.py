"""What the services of reinforcement learning tell each other: plain numpy records, no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a rollout has cost: the quantities of the length penalty (report section 3).

    Every token that the policy wrote is in one of the three kinds of its own.

    Attributes:
      thinking_tokens: of thoughts, of summaries, and of what is said before the final message.
      call_tokens: of calls.
      answer_tokens: of the answers to them.
      final_tokens: of the final message.
      calls: how many.
      turns: how many, summaries not counted.
    """

    thinking_tokens: float = 0
    call_tokens: float = 0
    answer_tokens: float = 0
    final_tokens: float = 0
    calls: float = 0
    turns: float = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One attempt at a task: a chain of generations with one reward.

    Attributes:
      generations: the chain; a summary, or a prompt that leaves something out, begins a new link.
      outcome: "scored" by the grader; "policy_failure", the policy prevented a score, which counts
        as wrong; "infrastructure_failure", not its fault: no reward, no row, in no baseline.
      stop: why it ended, see `c2.agent.harness.Session`.
      correct: 0 to 1, what the grader says; NaN after a failure of the infrastructure.
      reward: what advantages are made of: `correct` with rewards and penalties for the behaviour;
        NaN where that is.
      effort: what it has cost.
      behaviours: what was seen of its behaviour, by name, whether or not it is rewarded.
      transcript: the conversation for people, see `c2.agent.harness.Observer`.
    """

    generations: tuple[Generation, ...]
    outcome: Literal["scored", "policy_failure", "infrastructure_failure"]
    stop: str
    correct: float
    reward: float
    effort: Effort
    behaviours: Mapping[str, float]
    transcript: tuple[Mapping[str, Any], ...] = ()

    @property
    def failed(self) -> bool:
        """Whether nothing can be learned from it."""
        return self.outcome == "infrastructure_failure"

    @property
    def overlong(self) -> bool:
        """Whether a budget of turns, tokens or time ended it, and not the policy."""
        return self.stop in ("turns", "tokens", "context", "cut", "deadline")

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy chose, each of them counted once."""
        return sum(int(link.loss_mask.sum()) for link in self.generations)

    @property
    def oldest_version(self) -> int:
        """Of the policies that its tokens were sampled from; `NO_VERSION` if there are none."""
        versions = [link.versions[link.loss_mask] for link in self.generations]
        return min((int(v.min()) for v in versions if v.size), default=NO_VERSION)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """All rollouts of one prompt.

    Attributes:
      task: id of the task.
      rollouts: as many as were asked for; failures of the infrastructure may be left out.
    """

    task: str
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> np.ndarray:
        """f64 [rollout]; NaN where the infrastructure failed."""
        return np.array([np.nan if r.failed else r.reward for r in self.rollouts], np.float64)
