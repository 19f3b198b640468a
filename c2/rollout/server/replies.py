"""The reply to a request for tokens: whole, or as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from c2.rollout.config import Request
from c2.rollout.engine import Engine, EngineError
from c2.rollout.server import errors
from c2.rollout.server.answers import Answer
from c2.rollout.server.reading import Reader
from c2.rollout.server.sampling import Piece, pieces, sampling

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]


@dataclass(frozen=True, kw_only=True)
class SampledReply:
    """Samples while the client is there, and tells it; an ASGI application.

    Attributes:
      engine: samples.
      requests: one for each choice.
      readers: one for each choice.
      answer: the form.
      admitted: holds places for a number of sequences, or refuses.
    """

    engine: Engine
    requests: Sequence[Request]
    readers: Sequence[Reader]
    answer: Answer
    admitted: Callable[[int], AbstractContextManager]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises as `sampling`, before anything is sent."""
        with (
            self.admitted(len(self.requests)),
            sampling(self.engine, self.requests) as samples,
        ):
            news = pieces(samples, self.requests, self.readers)
            if self.answer.streams:
                work = self._stream(news, send)
            else:
                work = self._whole(news, scope, receive, send)
            await _while_connected(receive, work)

    async def _whole(
        self, news: AsyncIterator[tuple[int, Piece]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        choices = [Piece() for _ in self.requests]
        async for index, piece in news:
            choices[index] += piece
        await JSONResponse(self.answer.whole(choices))(scope, receive, send)

    async def _stream(self, news: AsyncIterator[tuple[int, Piece]], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            await _send_events(send, self.answer.first_chunks())
            async for index, piece in news:
                await _send_events(send, self.answer.chunks(index, piece))
            await _send_events(send, [*self.answer.last_chunks(), "[DONE]"])
        except EngineError as error:
            await _send_events(send, [errors.body(503, str(error))])
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_events(send: Send, events: Sequence[Any]) -> None:
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
        data = b"data: %b\n\n" % text.encode()
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does some work, but cancels it as soon as the client has left."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
