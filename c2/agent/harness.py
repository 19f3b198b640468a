"""Plays a conversation: turns, calls, budgets, and summaries in the place of a full context.

Nothing that a model writes or a tool answers raises here. What ends a conversation is told apart by
who is to blame: `Session.failed` says that the environment or the agent's machinery broke, and such
a rollout is to be run again or left out, never to be scored as 0.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from c2.agent.agents import Agent, AgentError, Turn
from c2.agent.chat import SUMMARY_REQUEST, Counts, Message, Request, as_event, message_from
from c2.agent.compaction import COMPACTION
from c2.config import ConfigError
from c2.sandbox.tools.toolset import ToolResult, Toolset, clip
from c2.sandbox.toolserver.capture import MIN_CAP

Stop = Literal["done", "turns", "tokens", "context", "cut", "deadline", "lost", "agent"]
Observer = Callable[[dict[str, Any]], None]
"""Is told what happens, event by event: a `Transcript`, a screen."""

NO_ROOM = "[left out: the context is full]"
GO_ON = "This is your own summary; your earlier turns are gone. Go on with the task."


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Budgets of a conversation.

    Attributes:
      max_turns: turns of the agent, summaries not counted.
      max_calls: calls of one turn that are answered; more are refused.
      turn_tokens: tokens of one turn.
      total_tokens: tokens that the agent writes in all.
      context: tokens of a prompt with the turn behind it.
      summary_at: tokens of a prompt from which on a summary takes the place of the turns so far;
        None means that a full context ends the conversation.
      summary_tokens: tokens of a summary, its thoughts included.
      summary_by: what asks for it: "request", a few words behind the context, whose cache is used
        again, so that training has to teach what a summary needs (report section 3); or "prompt",
        the usual compaction: long instructions take the place of the system's words, and the whole
        context is read anew.
      deadline_s: seconds in all.
    """

    max_turns: int = 50
    max_calls: int = 16
    turn_tokens: int = 4096
    total_tokens: int = 200_000
    context: int = 32768
    summary_at: int | None = None
    summary_tokens: int = 1024
    summary_by: Literal["request", "prompt"] = "request"
    deadline_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_calls", "turn_tokens", "total_tokens", "summary_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal are 1 and more")
        if not 0 < self.deadline_s < float("inf"):
            raise ConfigError(f"deadline_s: {self.deadline_s}; legal are finite numbers > 0")
        if self.context <= self.turn_tokens:
            raise ConfigError(f"context: {self.context}; legal are > turn_tokens")
        most = self.context - self.turn_tokens - self.reserve
        if self.summary_at is not None and not 0 < self.summary_at <= most:
            raise ConfigError(
                f"summary_at: {self.summary_at}; legal are 1 to {most}, so that a turn and a "
                "summary still fit"
            )

    @property
    def reserve(self) -> int:
        """Tokens of a context that are kept free for asking for a summary and for its text."""
        if self.summary_at is None:
            return 0
        # Each byte is at most one token.
        asking = len(SUMMARY_REQUEST) + (len(COMPACTION) if self.summary_by == "prompt" else 0)
        return asking + 8 + self.summary_tokens


@dataclass(kw_only=True)
class Session:
    """What came of a conversation.

    Attributes:
      messages: all of them in their order, those that a summary has replaced included.
      stop: why it ended: "done" (a turn without a call), a budget that was used up ("turns",
        "tokens", "context", "deadline"), "cut" (a turn reached its limit before any call), "lost"
        (the sandbox is gone) or "agent" (it could not speak).
      lost: why the sandbox is gone (`protocol.Reason`), or what the agent's machinery said.
      turns: turns of the agent without summaries.
      summaries: how often a summary took the place of turns.
      calls: calls that were made, those that failed included.
      bad_calls: those of them that were malformed, unknown or refused.
      tokens: tokens that the agent wrote.
      written: of which kind these are, as far as that is known.
      final: how many of them are the text of the message that ended it; 0 if a budget did.
      answered: tokens of the answers of tools, as the agent counts them.
    """

    messages: list[Message] = field(default_factory=list)
    stop: Stop = "done"
    lost: str = ""
    turns: int = 0
    summaries: int = 0
    calls: int = 0
    bad_calls: int = 0
    tokens: int = 0
    written: Counts = field(default_factory=Counts)
    final: int = 0
    answered: int = 0

    @property
    def failed(self) -> bool:
        """Whether it is to be left out: not the agent's fault."""
        return self.stop == "agent" or (
            self.stop == "lost" and self.lost not in ("exited", "deadline")
        )


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A conversation before a turn, for another process to go on with.

    What is random in a turn follows from the seed and the number of the turn, and parsing has no
    state, so this is all there is. What the agent and the tools know is theirs to keep.

    Attributes:
      session: what has come of it so far.
      context: what the agent is given next.
      seconds: that it has taken.
    """

    session: Session
    context: Sequence[Message]
    seconds: float

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Saved":
        """What `dataclasses.asdict` has taken apart, also after a journey through JSON."""
        session = record["session"]
        messages, written = session["messages"], session["written"]
        parts = {"messages": list(map(message_from, messages)), "written": Counts(**written)}
        return cls(
            session=Session(**{**session, **parts}),
            context=list(map(message_from, record["context"])),
            seconds=record["seconds"],
        )


async def run(
    agent: Agent,
    tools: Toolset,
    messages: Sequence[Message],
    config: HarnessConfig,
    *,
    seed: int = 0,
    observe: Sequence[Observer] = (),
    state: Callable[[], str] = str,
    save: Callable[[Saved], Awaitable[None]] | None = None,
    saved: Saved | None = None,
) -> Session:
    """Plays a conversation to its end.

    Tools block, so they run in threads: the default executor of the event loop should have as many
    as conversations run at once. Calls of one turn that change nothing run at the same time, others
    one after the other in the order in which they were written.

    Args:
      agent: who speaks; one for each conversation.
      tools: what it can call.
      messages: how the conversation begins: a system's words, if any, and the task.
      config: budgets.
      seed: of the agent's sampling; every turn has one of its own.
      observe: who is told what happens.
      state: what is told behind a summary besides it, such as a list of things to do.
      save: is given the conversation after every turn with calls and every summary; the
        conversation waits for it.
      saved: where an earlier process was with the same agent, tools, messages, config and seed.
    """
    play = _Play(agent, tools, messages, config, seed, observe, state, save, saved)
    try:
        async with asyncio.timeout(config.deadline_s - play.seconds()) as limit:
            stop = await play.run()
    except TimeoutError:
        if not limit.expired():
            raise  # not ours
        stop = "deadline"
    except AgentError as error:
        stop = "agent"
        play.session.lost = str(error)
    play.session.stop = stop
    play.tell("end", **play.totals())
    return play.session


class _Play:
    """The state of one conversation."""

    def __init__(self, agent, tools, messages, config, seed, observe, state, save, saved) -> None:
        self.agent: Agent = agent
        self.tools: Toolset = tools
        self.config: HarnessConfig = config
        self._beginning = messages
        self._seed = seed
        self._observe: Sequence[Observer] = observe
        self._state: Callable[[], str] = state
        self._save: Callable[[Saved], Awaitable[None]] | None = save
        self._began = time.monotonic() - (saved.seconds if saved else 0)
        self.session = saved.session if saved else Session(messages=list(messages))
        self._context: list[Message] = list(saved.context if saved else messages)
        for message in () if saved else messages:
            self.tell("message", **as_event(message))

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def tell(self, kind: str, **event: Any) -> None:
        for observer in self._observe:
            observer({"event": kind, **event})

    def totals(self) -> dict[str, Any]:
        session = self.session
        names = ("stop", "lost", "turns", "summaries", "calls", "bad_calls", "tokens")
        return {name: getattr(session, name) for name in names}

    async def run(self) -> Stop:
        config, session = self.config, self.session
        while True:
            if session.turns == config.max_turns:
                return "turns"
            size = self.agent.size(self._context)
            if config.summary_at is not None and size >= config.summary_at:
                if not await self._summarise():
                    return "context"
                await self._keep()
                size = self.agent.size(self._context)
            left = config.total_tokens - session.tokens
            room = config.context - size  # more than a turn needs if there are summaries
            if min(left, room) < 1:
                return "tokens" if left < 1 else "context"
            turn = await self._turn("turn", self._context, min(config.turn_tokens, left, room))
            session.turns += 1
            requests = turn.message.requests
            if not requests:
                session.final = (turn.counts or Counts()).text
                return "cut" if turn.cut else "done"
            results = await self._answer(requests)
            if lost := next((result.lost for result in results if result.lost), None):
                session.lost = lost
                return "lost"
            await self._keep()

    async def _keep(self) -> None:
        if self._save:
            seconds = self.seconds()
            await self._save(Saved(session=self.session, context=self._context, seconds=seconds))

    async def _turn(self, kind: str, context: Sequence[Message], limit: int) -> Turn:
        seed = derived_seed(self._seed, self.session.turns + self.session.summaries)
        turn = await self.agent.turn(context, max_tokens=limit, seed=seed)
        self._add(turn.message)
        session, new = self.session, turn.counts or Counts()
        session.tokens += turn.tokens
        session.written = Counts(
            text=session.written.text + new.text,
            thinking=session.written.thinking + new.thinking,
            call=session.written.call + new.call,
        )
        numbers = {"tokens": turn.tokens, "prompt_tokens": turn.prompt_tokens, "cut": turn.cut}
        self.tell(kind, **as_event(turn.message), **numbers)
        return turn

    async def _answer(self, requests: Sequence[Request]) -> list[ToolResult]:
        results = await answer_all(self.tools, requests, self.config.max_calls)
        size = self.agent.size(self._context)
        self.session.calls += len(requests)
        self.session.bad_calls += sum(not result.ok for result in results)
        for request, text in zip(requests, self._fitting(results), strict=True):
            self._add(Message(role="tool", text=text, answers=request.id))
            self.tell("result", text=text, answers=request.id)
        self.session.answered += self.agent.size(self._context) - size
        return results

    def _fitting(self, results: Sequence[ToolResult]) -> list[str]:
        """The answers; cut further where they would leave no room for what has to follow."""
        texts = [result.text for result in results]
        added = [*self._context, *(Message(role="tool", text=text) for text in texts)]
        room = self.config.context - self.config.reserve
        if self.agent.size(added) <= room:
            return texts
        free = room - self.agent.size(self._context) - 2 * len(texts)  # two marks each
        share = free // len(texts)
        return [clip(text, share) if share >= MIN_CAP else NO_ROOM for text in texts]

    async def _summarise(self) -> bool:
        """Lets the agent sum up; False if there is no room for that, or no sense in it."""
        request = Message(role="user", text=SUMMARY_REQUEST)
        context = [*self._context, request]
        if self.config.summary_by == "prompt":
            rest = [message for message in context if message.role != "system"]
            context = [Message(role="system", text=COMPACTION), *rest]
        left = self.config.total_tokens - self.session.tokens
        room = self.config.context - self.agent.size(context)
        if min(left, room) < 1:
            return False
        self._add(request)
        turn = await self._turn("summary", context, min(self.config.summary_tokens, left, room))
        self.session.summaries += 1
        text = "\n\n".join(filter(None, [GO_ON, self._state()]))
        summary = replace(turn.message, thinking="", requests=(), text_only=True)
        self._context = [*self._beginning, summary]
        self._add(Message(role="user", text=text))
        return self.config.summary_at is not None and (
            self.agent.size(self._context) < self.config.summary_at
        )

    def _add(self, message: Message) -> None:
        self._context.append(message)
        self.session.messages.append(message)


def derived_seed(*parts: int | str) -> int:
    """A seed, 0 to 2**31 - 1, for what these parts name, such as a conversation's and a turn."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


async def answer_all(
    tools: Toolset, requests: Sequence[Request], max_calls: int
) -> list[ToolResult]:
    """Answers the calls of one turn, in their order."""

    async def answer(number: int) -> ToolResult:
        call = requests[number].call
        if number >= max_calls:
            return tools.refusal(f"more than {max_calls} calls in one turn")
        if call is None:
            return tools.refusal(requests[number].error)
        return await asyncio.to_thread(tools, call)

    def reads_only(number: int) -> bool:
        call = requests[number].call
        tool = tools.find(call.name) if call else None
        return tool is None or tool.reads_only

    results: list[ToolResult] = []
    for together, group in itertools.groupby(range(len(requests)), reads_only):
        if together:
            results += await asyncio.gather(*map(answer, group))
        else:
            results += [await answer(number) for number in group]
    return results
