"""Answers in OpenAI's form, whole or in chunks.

Choices have more fields than OpenAI's if a request asks for them: `token_ids`, with the stop token,
and `policy_versions`, both aligned with the log-probabilities, and `routes`. In chunks they are of
the new tokens; routes come with the last chunk of a choice. The prompt comes as `prompt_token_ids`:
that of a completion in the choice, that of a chat in the answer, as with vLLM.
"""

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from c2.rollout.config import Request
from c2.rollout.sequence import Token
from c2.rollout.server.protocol import Body, ChatBody, CompletionBody
from c2.rollout.server.reading import Decode, Part
from c2.rollout.server.sampling import Piece

Json = dict[str, Any]


class Answer:
    """The form of the answer to one request."""

    prefix, whole_kind, chunk_kind = "", "", ""

    def __init__(self, body: Body, requests: Sequence[Request], decode: Decode) -> None:
        self.streams = body.stream
        self._body, self._requests, self._decode = body, requests, decode
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._tokens = 0

    def whole(self, choices: Sequence[Piece]) -> Json:
        """The answer."""
        made = [self._choice(index, piece) for index, piece in enumerate(choices)]
        answer = self._envelope(self.whole_kind, made) | {"usage": self._usage()}
        return self._with_prompts(answer)

    def first_chunks(self) -> list[Json]:
        """Chunks before the first token."""
        raise NotImplementedError

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        """What is new of a choice: one chunk, or none."""
        choice = self._choice(index, piece)
        by_token = self._body.return_token_ids or self._body.wants_log_probs
        if not (piece.parts or piece.finish or by_token):
            return []
        return [self._envelope(self.chunk_kind, [choice])]

    def last_chunks(self) -> list[Json]:
        """Chunks behind the last token."""
        if not self._body.stream_options.include_usage:
            return []
        return [self._envelope(self.chunk_kind, []) | {"usage": self._usage()}]

    def _choice(self, index: int, piece: Piece) -> Json:
        self._tokens += len(piece.tokens)
        choice = {"index": index, **self._said(index, piece)}
        if self._body.return_token_ids:
            choice["token_ids"] = [token.id for token in piece.tokens]
            choice["policy_versions"] = [token.version for token in piece.tokens]
        if self._body.return_routes and piece.completion is not None:
            choice["routes"] = packed(piece.completion.routes)
        return choice

    def _said(self, index: int, piece: Piece) -> Json:
        raise NotImplementedError

    def _with_prompts(self, answer: Json) -> Json:
        """An answer, with the tokens of the prompts if they are wanted."""
        raise NotImplementedError

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        prompts = self._requests[:: self._body.n]  # one of several choices counts once
        prompt = sum(len(request.prompt) for request in prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
        }


class CompletionAnswer(Answer):
    """Of `/v1/completions`."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    _body: CompletionBody

    def first_chunks(self) -> list[Json]:
        """As `Answer.first_chunks`: the prompts, if they are wanted."""
        if not self._body.return_token_ids:
            return []
        choices = [self._choice(index, Piece()) for index in range(len(self._requests))]
        return [self._with_prompts(self._envelope(self.chunk_kind, choices))]

    def _said(self, index: int, piece: Piece) -> Json:
        text = "".join(part.text for part in piece.parts)
        log_probs = self._log_probs(piece) if self._body.wants_log_probs else None
        return {"text": text, "logprobs": log_probs, "finish_reason": piece.finish}

    def _log_probs(self, piece: Piece) -> Json:
        return {
            "tokens": [self._decode([token.id]) for token in piece.tokens],
            "token_logprobs": [token.log_prob for token in piece.tokens],
            "top_logprobs": None,
            "text_offset": piece.offsets,
        }

    def _with_prompts(self, answer: Json) -> Json:
        if self._body.return_token_ids:
            for choice in answer["choices"]:
                choice["prompt_token_ids"] = list(self._requests[choice["index"]].prompt)
        return answer


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    _body: ChatBody

    def __init__(self, body: Body, requests: Sequence[Request], decode: Decode) -> None:
        super().__init__(body, requests, decode)
        self._calls = [0] * len(requests)  # so far, by choice

    def first_chunks(self) -> list[Json]:
        """As `Answer.first_chunks`: the roles, and the prompt if it is wanted."""
        said = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        choices = [{"index": index, **said} for index in range(len(self._requests))]
        return [self._with_prompts(self._envelope(self.chunk_kind, choices))]

    def _said(self, index: int, piece: Piece) -> Json:
        message = self._message(index, piece.parts)
        called = piece.finish == "stop" and self._calls[index] > 0
        key = "delta" if self.streams else "message"
        log_probs = {"content": [self._log_prob(token) for token in piece.tokens]}
        return {
            key: message if self.streams else {"role": "assistant", "content": None} | message,
            "logprobs": log_probs if self._body.wants_log_probs else None,
            "finish_reason": "tool_calls" if called else piece.finish,
        }

    def _message(self, index: int, parts: Sequence[Part]) -> Json:
        message: Json = {}
        for name, kind in (("content", "text"), ("reasoning_content", "thinking")):
            if text := "".join(part.text for part in parts if part.kind == kind):
                message[name] = text
        if calls := [self._call(index, part) for part in parts if part.kind == "call"]:
            message["tool_calls"] = calls
        return message

    def _call(self, index: int, part: Part) -> Json:
        number = self._calls[index]
        self._calls[index] += 1
        return {
            "index": number,
            "id": f"{self._id}-{index}-{number}",
            "type": "function",
            "function": {"name": part.name, "arguments": part.text},
        }

    def _log_prob(self, token: Token) -> Json:
        text = self._decode([token.id])
        return {
            "token": text,
            "logprob": token.log_prob,
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }

    def _with_prompts(self, answer: Json) -> Json:
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._requests[0].prompt)
        return answer


def packed(values: np.ndarray) -> Json:
    """An array for JSON: its bytes in little-endian C order, as base64."""
    data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    text = base64.b64encode(data).decode()
    return {"dtype": values.dtype.name, "shape": list(values.shape), "base64": text}
