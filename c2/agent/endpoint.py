"""A model behind an OpenAI-compatible endpoint (`/chat/completions`) as an agent."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2

from c2.agent.agents import AgentError, Turn
from c2.agent.chat import Message, Request
from c2.config import ConfigError
from c2.records import Generation
from c2.sandbox.protocol import ToolError
from c2.sandbox.tools import schema
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Toolset

RETRIES = 4
TIMEOUT_S = 600.0
_BYTES_PER_TOKEN = 3  # fewer than of any text that matters, so that estimates are not too small
_SHOWN = 300


class EndpointAgent:
    """Speaks through an endpoint, which keeps its tokens to itself: there is nothing to train on.

    Args:
      url: up to and without "/chat/completions".
      model: its name there.
      tools: what it is told that it can call.
      key: sent as a bearer token; "" sends none.
      wait_s: seconds before the first retry; each further one waits twice as long.

    Raises:
      ConfigError: if `url` is none of http or https.
    """

    generations: tuple[Generation, ...] = ()

    def __init__(
        self, url: str, model: str, tools: Toolset, *, key: str = "", wait_s: float = 1.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint: {url!r}; legal are http://... and https://...")
        self._url, self._model, self._wait_s = f"{url.rstrip('/')}/chat/completions", model, wait_s
        self._tools = [{"type": "function", "function": tool} for tool in tools.prompts()]
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._known: tuple[Message, ...] = ()  # messages whose tokens the endpoint has counted
        self._tokens = 0

    def size(self, messages: Sequence[Message]) -> int:
        """As `Agent.size`: what the endpoint has counted, and bytes of what is new."""
        known = len(self._known)
        if tuple(messages[:known]) != self._known:
            known = 0
        new = sum(len(str(_plain(message)).encode()) for message in messages[known:])
        return (self._tokens if known else 0) + new // _BYTES_PER_TOKEN

    async def turn(self, messages: Sequence[Message], *, max_tokens: int, seed: int) -> Turn:
        """As `Agent.turn`."""
        body = {
            "model": self._model,
            "messages": [_plain(message) for message in messages],
            "max_tokens": max_tokens,
            "seed": seed,
        }
        if self._tools:
            body["tools"] = self._tools
        answer = await self._post(body)
        try:
            choice = answer["choices"][0]
            message = _message(choice["message"])
            usage = answer.get("usage") or {}
            written = int(usage.get("completion_tokens") or 0)
            given = int(usage.get("prompt_tokens") or self.size(messages))
            cut = choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise AgentError(f"{self._url}: no chat completion: {str(answer)[:_SHOWN]}") from error
        written = written or len(str(_plain(message))) // _BYTES_PER_TOKEN
        self._known, self._tokens = (*messages, message), given + written
        return Turn(message=message, prompt_tokens=given, tokens=written, cut=cut)

    async def _post(self, body: dict[str, Any]) -> Any:
        """Sends a request, again if the network or the server has a bad moment."""
        for attempt in range(RETRIES):
            last = attempt == RETRIES - 1
            try:
                # A client for each request: sockets belong to one event loop.
                async with httpx2.AsyncClient(timeout=TIMEOUT_S, headers=self._headers) as client:
                    response = await client.post(self._url, json=body)
                if response.status_code == 200:
                    return response.json()
                why = f"{response.status_code} {response.text[:_SHOWN]}"
                if response.status_code not in (408, 429) and response.status_code < 500:
                    last = True
            except (httpx2.HTTPError, ValueError) as error:
                why = f"{type(error).__name__}: {error}"
            if last:
                raise AgentError(" ".join(f"{self._url}: {why}".split()))
            await asyncio.sleep(self._wait_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def _plain(message: Message) -> dict[str, Any]:
    """A message as the endpoint takes it; an assistant's thoughts are not sent back."""
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.answers, "content": message.text}
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.requests:
        plain["tool_calls"] = [_plain_request(request) for request in message.requests]
    return plain


def _plain_request(request: Request) -> dict[str, Any]:
    name = request.call.name if request.call else "unknown"
    # Some servers refuse a conversation in which arguments are no JSON.
    arguments = request.raw if request.call else "{}"
    return {
        "id": request.id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _message(raw: dict[str, Any]) -> Message:
    return Message(
        role="assistant",
        text=raw.get("content") or "",
        thinking=raw.get("reasoning_content") or raw.get("reasoning") or "",
        requests=tuple(_request(item) for item in raw.get("tool_calls") or ()),
    )


def _request(raw: dict[str, Any]) -> Request:
    name, arguments = raw["function"]["name"], raw["function"].get("arguments") or "{}"
    try:
        call = Call(name, schema.parse_json(arguments))
    except ToolError as error:
        return Request(call=None, error=f"{name}: {error}", raw=arguments, id=raw["id"])
    return Request(call=call, raw=arguments, id=raw["id"])
