"""The ASGI application.

  POST /v1/completions, /v1/chat/completions     whole, or as server-sent events
  GET  /v1/models, /v1/models/NAME               the one model
  GET  /health                                   200 while the engine runs, else 503
  GET  /metrics                                  for Prometheus

Errors: 400 bad request, with the field and what is legal; 404 another model or path; 405 another
method; 408 a body that does not come; 413 one that is too large; 429 too many requests wait, with
Retry-After; 503 the engine does not run. A client that leaves frees its slots at once.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from c2.config import ConfigError
from c2.rollout.engine import Engine, EngineError
from c2.rollout.server import errors, metrics, protocol
from c2.rollout.server.answers import Answer, ChatAnswer, CompletionAnswer
from c2.rollout.server.config import ServerConfig
from c2.rollout.server.protocol import Body, ChatBody, CompletionBody
from c2.rollout.server.reading import Chat, Reader, Tokenizer
from c2.rollout.server.replies import SampledReply
from c2.rollout.server.sampling import requests

_BODY_S = 60.0  # seconds in which a body has to come
_LONG = 16_384  # bytes of a body that is read outside the event loop
_RETRY_S = "1"  # seconds after which a refused client may try again

Prompts = Callable[[Any], list[Sequence[int]]]


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    *,
    chat: Chat | None = None,
    end: Sequence[int] = (),
) -> Starlette:
    """The application; the engine is the caller's to close.

    Args:
      engine: samples.
      tokenizer: of texts.
      config: the server's.
      chat: the format of conversations; without one there are none.
      end: tokens that end a completion of `/v1/completions`, besides those that a request names.
    """
    server = _Server(engine, tokenizer, config, chat, end)
    return Starlette(
        routes=[
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat_completions, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
        ],
        exception_handlers=errors.HANDLERS,
    )


class _Server:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        config: ServerConfig,
        chat: Chat | None,
        end: Sequence[int],
    ) -> None:
        self._engine, self._tokenizer, self._config = engine, tokenizer, config
        self._chat, self._end = chat, end
        self._created = int(time.time())
        self._open = 0  # sequences of requests that are being answered

    async def completions(self, request: Request) -> SampledReply:
        def prompts(body: CompletionBody) -> list[Sequence[int]]:
            encode = self._tokenizer.encode
            return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompt]

        return await self._reply(request, CompletionBody, prompts, self._end, CompletionAnswer)

    async def chat_completions(self, request: Request) -> SampledReply:
        chat = self._chat
        if chat is None:
            raise HTTPException(404, "this model has no chat format; use /v1/completions")

        def prompts(body: ChatBody) -> list[Sequence[int]]:
            tools = [tool.function for tool in body.tools if body.tool_choice == "auto"]
            return [chat.prompt(body.messages, tools)]

        return await self._reply(request, ChatBody, prompts, chat.stop, ChatAnswer)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, _: Request) -> Response:
        if self._engine.error is not None:
            raise EngineError(f"the engine does not run: {self._engine.error}")
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return metrics.response(self._engine.metrics() | {"open": self._open})

    async def _reply(
        self,
        request: Request,
        kind: type[Body],
        prompts: Prompts,
        end: Sequence[int],
        form: type[Answer],
    ) -> SampledReply:
        def prepare(data: bytes):
            body = protocol.parse(kind, data)
            self._check_model(body.model)
            return body, requests(body, prompts(body), self._engine, end)

        data = await _body(request, self._config.max_body)
        long = len(data) > _LONG  # other requests do not wait for its tokenisation
        body, asked = await asyncio.to_thread(prepare, data) if long else prepare(data)
        decode = self._tokenizer.decode
        chat = self._chat if kind is ChatBody else None
        return SampledReply(
            engine=self._engine,
            requests=asked,
            readers=[Reader(decode, body.stop, chat) for _ in asked],
            answer=form(body, asked, decode),
            admitted=self._admitted,
        )

    @contextlib.contextmanager
    def _admitted(self, sequences: int) -> Iterator[None]:
        """Counts sequences while they are worked on, or refuses them."""
        limit = self._engine.config.slots + self._config.max_waiting
        if sequences > limit:
            raise ConfigError(f"n: {sequences} sequences in a request; legal: up to {limit}")
        if self._open + sequences > limit:
            waiting = f"{self._open} sequences run or wait, of {limit}; try again"
            raise HTTPException(429, waiting, {"Retry-After": _RETRY_S})
        self._open += sequences
        try:
            yield
        finally:
            self._open -= sequences

    def _check_model(self, name: str) -> None:
        if name != self._config.model:
            raise HTTPException(404, f"model: {name[:100]!r}; legal: {self._config.model!r}")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "c2",
            "max_model_len": self._engine.config.capacity,
            "policy_version": self._engine.metrics()["version"],
        }


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request. What is too long is read to its end, so that the client listens."""
    pieces, size = [], 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                size += len(piece)
                if size <= limit:
                    pieces.append(piece)
    except TimeoutError as error:
        raise HTTPException(408, f"the body has not come within {_BODY_S:.0f} s") from error
    if size > limit:
        raise HTTPException(413, f"the body has {size} bytes; legal: up to {limit}")
    return b"".join(pieces)
