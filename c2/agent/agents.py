"""Who speaks in a conversation: a policy that samples tokens, or an endpoint on the network.

A script is a policy too, so what it says goes through the same rendering and parsing.
"""

import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from c2.agent.chat import SUMMARY_REQUEST, ChatFormat, Counts, Message, Request
from c2.agent.trace import Trace
from c2.records import NO_VERSION, Completion, Generation
from c2.sandbox.tools.schema import Call

Script = Generator[Call | Sequence[Call] | Message, Any, None]
"""Yields a call, several for one turn, or a whole turn; is sent the answer, or a list of them."""


class AgentError(Exception):
    """The agent cannot speak, through no fault of what it has said: an infrastructure failure."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What an agent said.

    Attributes:
      message: its words and calls.
      prompt_tokens: tokens of what it was given.
      tokens: tokens that it wrote.
      counts: of which kind they are; None if that is not known.
      cut: whether it was cut at its limit.
    """

    message: Message
    prompt_tokens: int
    tokens: int
    counts: Counts | None = None
    cut: bool = False


class Agent(Protocol):
    """Speaks in one conversation."""

    def size(self, messages: Sequence[Message]) -> int:
        """Tokens of the prompt that these messages are, or an estimate that is not too small."""

    async def turn(self, messages: Sequence[Message], *, max_tokens: int, seed: int) -> Turn:
        """Says what comes next; raises `AgentError` if that is not possible."""

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Rows for training; none if tokens are not known."""


class Policy(Protocol):
    """Samples tokens."""

    async def complete(
        self, ids: Sequence[int], *, max_tokens: int, stop: Sequence[int], seed: int
    ) -> Completion:
        """Samples behind `ids` until one of `stop`, which is kept, or to the limit.

        Raises:
          AgentError: if it cannot, for another reason than what it is given.
        """


class TokenAgent:
    """A policy in one conversation; what it samples is kept token by token.

    Args:
      policy: who samples.
      chat: the format of the conversation.
      generations: what was sampled earlier, of a conversation that goes on.
    """

    def __init__(
        self, policy: Policy, chat: ChatFormat, generations: Sequence[Generation] = ()
    ) -> None:
        self._policy, self._chat = policy, chat
        self._trace = Trace(generations)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """As `Agent.generations`."""
        return self._trace.generations

    def size(self, messages: Sequence[Message]) -> int:
        """As `Agent.size`; exact."""
        return len(self._chat.prompt(messages))

    async def turn(self, messages: Sequence[Message], *, max_tokens: int, seed: int) -> Turn:
        """As `Agent.turn`."""
        prompt = self._chat.prompt(messages)
        completion = await self._policy.complete(
            prompt, max_tokens=max_tokens, stop=self._chat.stop, seed=seed
        )
        self._trace.add(completion)
        ids = completion.tokens.tolist()
        return Turn(
            message=self._chat.parse(ids), prompt_tokens=len(prompt), tokens=len(ids),
            counts=self._chat.counts(ids), cut=completion.finish == "length",
        )  # fmt: skip


@dataclass
class ScriptedPolicy:
    """A script as a policy, for demonstrations and tests. Its log-probabilities are 0.

    Attributes:
      script: a fresh generator. When it returns, the agent says `last` and calls nothing more.
      chat: the format of the conversation.
      summary: what it says when it is asked for a summary.
      last: its final message.
    """

    script: Script
    chat: ChatFormat
    summary: str = "I go on as planned."
    last: str = "done"
    _answers: list[str] | None = field(default=None, init=False)
    _several: bool = field(default=False, init=False)

    async def complete(
        self, ids: Sequence[int], *, max_tokens: int, stop: Sequence[int], seed: int
    ) -> Completion:
        """As `Policy.complete`; neither depends on the seed nor stops at another token."""
        unanswered = self.chat.unanswered(ids)
        answers = [text for role, text in unanswered if role == "tool"]
        if answers:
            self._answers = answers
        asked = bool(unanswered) and unanswered[-1][1] == SUMMARY_REQUEST
        message = _assistant(self.summary) if asked else self._next()
        turn = np.array(self.chat.encode_turn(message)[:max_tokens], np.int32)
        return Completion(
            prompt=np.array(ids, np.int32),
            tokens=turn,
            log_probs=np.zeros(len(turn), np.float32),
            versions=np.full(len(turn), NO_VERSION, np.int32),
            forced=np.zeros(len(turn), bool),
            routes=np.zeros((len(ids) + len(turn), 0, 0), np.int16),
            temperature=1.0,
            finish="stop" if turn[-1] in stop else "length",
        )

    def _next(self) -> Message:
        answers = self._answers
        sent: Any = answers if self._several or answers is None else answers[0]
        try:
            said = self.script.send(sent)
        except StopIteration:
            return _assistant(self.last)
        self._several = not isinstance(said, Call)
        if isinstance(said, Message):
            return said
        said = [said] if isinstance(said, Call) else said
        requests = tuple(Request(call=call, id=str(number)) for number, call in enumerate(said))
        return dataclasses.replace(_assistant(""), requests=requests)


def _assistant(text: str) -> Message:
    return Message(role="assistant", text=text)
