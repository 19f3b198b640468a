"""What the engine is asked for one HTTP request, and what comes of it, choice by choice."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from c2.config import ConfigError
from c2.records import Completion
from c2.rollout.config import SEEDS, Request
from c2.rollout.engine import Engine, EngineError, Event, Ticket
from c2.rollout.sequence import Token
from c2.rollout.server.protocol import Body, ChatBody
from c2.rollout.server.reading import Part, Reader

_DEFAULT_TOKENS = 16  # of a completion that is no chat, as with OpenAI


@dataclass(kw_only=True)
class Piece:
    """What is new of a choice.

    Attributes:
      tokens: with their log-probabilities and versions.
      offsets: of each token, characters of text in front of it.
      parts: what can be read.
      finish: why the choice has ended, if it has.
      completion: the engine's record, if it was the engine that ended it.
    """

    tokens: list[Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    finish: str | None = None
    completion: Completion | None = None

    def __iadd__(self, later: "Piece") -> "Piece":
        self.tokens += later.tokens
        self.offsets += later.offsets
        self.parts += later.parts
        self.finish, self.completion = later.finish, later.completion
        return self


def requests(
    body: Body, prompts: Sequence[Sequence[int]], engine: Engine, end: Sequence[int]
) -> list[Request]:
    """The engine's requests for a body, choice by choice; choice k is sample k of the seed.

    Raises:
      ConfigError: if they are illegal for every engine; `Engine.submit` says the rest.
    """
    if body.return_routes and body.stop:
        raise ConfigError(
            "return_routes: legal only without stop: a stop text ends a completion outside the "
            "engine, which then has no record of it; stop_token_ids can be used"
        )
    seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
    unlimited = body.top_k is None or body.top_k in (-1, 0)  # as in vLLM
    stop = (*([] if body.ignore_eos else end), *body.stop_token_ids)
    made = []
    for prompt in prompts:
        room = max(1, engine.config.capacity - len(prompt))
        given = body.max_completion_tokens if isinstance(body, ChatBody) else None
        given = body.max_tokens if given is None else given
        default = room if isinstance(body, ChatBody) else min(_DEFAULT_TOKENS, room)
        for _ in range(body.n):
            made.append(
                Request(
                    prompt=prompt,
                    max_tokens=default if given is None else given,
                    temperature=body.temperature,
                    top_k=None if unlimited else min(body.top_k, engine.cfg.vocab),
                    top_p=body.top_p,
                    stop=tuple(dict.fromkeys(stop)),
                    seed=seed,
                    id=len(made),
                )
            )
    return made


class Samples:
    """Requests that the engine works on at the same time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: dict[int, Ticket] = {}

    def start(self, choice: int, request: Request) -> None:
        """Submits a request. Raises as `Engine.submit`."""
        self._open[choice] = self._engine.submit(request, partial(self._emit, choice))

    def end(self, choice: int) -> None:
        """Cancels what has not ended; no more events come of it."""
        self._engine.cancel(self._open.pop(choice))

    def end_all(self) -> None:
        """As `end` for all."""
        for choice in list(self._open):
            self.end(choice)

    async def events(self) -> AsyncIterator[tuple[int, list[Token] | Completion]]:
        """What comes of all requests, until all have ended.

        Raises:
          EngineError: if the engine stops first.
        """
        while self._open:
            choice, event = await self._events.get()
            if isinstance(event, Exception):
                raise EngineError(f"the engine has stopped: {event}") from event
            if choice not in self._open:
                continue
            if isinstance(event, Completion):
                del self._open[choice]
            yield choice, event

    def _emit(self, choice: int, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))


@contextlib.contextmanager
def sampling(engine: Engine, requests: Sequence[Request]) -> Iterator[Samples]:
    """Lets the engine work on requests; those that have not ended by then are cancelled.

    Raises:
      ConfigError: if the engine cannot do one of them.
      EngineError: if it does not run.
    """
    samples = Samples(engine)
    try:
        for choice, request in enumerate(requests):
            samples.start(choice, request)
        yield samples
    finally:
        samples.end_all()


async def pieces(
    samples: Samples, requests: Sequence[Request], readers: Sequence[Reader]
) -> AsyncIterator[tuple[int, Piece]]:
    """What is new, choice by choice; the last piece of each says why it ended."""
    async for choice, event in samples.events():
        reader = readers[choice]
        if isinstance(event, Completion):
            piece = Piece(parts=reader.end(), completion=event)
            piece.finish = "stop" if reader.stopped else event.finish
        else:
            piece = _read(event, requests[choice].stop, reader)
            if piece.finish:
                samples.end(choice)
        yield choice, piece


def _read(tokens: Sequence[Token], stop: Sequence[int], reader: Reader) -> Piece:
    piece = Piece()
    for token in tokens:
        piece.tokens.append(token)
        piece.offsets.append(reader.length)
        if token.id in stop:  # it is no text; the completion follows
            break
        piece.parts += reader.add(token.id)
        if reader.stopped:
            piece.finish = "stop"
            break
    return piece
