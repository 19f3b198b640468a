"""The format of a conversation, in text and in tokens.

    <|end|> <|system|> text <|turn_end|> <|user|> text <|turn_end|>
    <|assistant|> text <|think|> thoughts <|assistant|> text <|call|> call <|call|> call
    <|turn_end|>
    <|tool|> answer <|turn_end|> <|tool|> answer <|turn_end|> <|assistant|> ...

The marks are single tokens that text cannot produce, so nothing that a tool returns can end a turn
or forge a call. Messages are rendered one by one and never looked at again: a conversation that
grows has a prompt that grows.
"""

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from c2.sandbox.protocol import ToolError
from c2.sandbox.tools import plain, schema
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Toolset

Role = Literal["system", "user", "assistant", "tool"]
Syntax = Literal["json", "plain"]
_SECTIONS = {"assistant": "text", "think": "thinking", "call": "call"}
_MAX_NAME = 64

SUMMARY_REQUEST = (
    "Your context is nearly full. Sum up for yourself what matters for going on: what was asked, "
    "what you found out, which files you changed and how, and what is left to do. All but the task "
    "and this summary will be forgotten. Call no tool."
)


class Tokenizer(Protocol):
    """As `c2.data.tokenizer.Tokenizer`: lossless, and text never becomes a special token."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    def special(self, name: str) -> int:
        """Id of a special token, named without its brackets."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call as a model wrote it.

    Attributes:
      call: what was understood, or None.
      error: why nothing was understood, for the model; else "".
      raw: the arguments as they were written.
      id: names it in the conversation.
    """

    call: Call | None
    error: str = ""
    raw: str = ""
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A turn of a conversation.

    Attributes:
      role: whose.
      text: what is said, asked or answered.
      thinking: an assistant's thoughts.
      requests: an assistant's calls.
      ids: an assistant's tokens as they were sampled, behind the mark that opens the turn; None
        where there are none, as with an endpoint.
      answers: of role "tool": the id of the request.
      text_only: whether tokens of thoughts and calls are left out of prompts.
    """

    role: Role
    text: str = ""
    thinking: str = ""
    requests: tuple[Request, ...] = ()
    ids: tuple[int, ...] | None = None
    answers: str = ""
    text_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Tokens of an assistant's turn, marks included."""

    text: int = 0
    thinking: int = 0
    call: int = 0


class ChatFormat:
    """Renders and parses conversations with one tokenizer.

    Args:
      tokenizer: how to tokenise.
      tools: whose schemas the plain syntax follows.
      syntax: of calls: "json" is `NAME {"ARGUMENT": VALUE}`, "plain" that of `plain`.
      drop_thinking: whether thoughts in front of the newest user message are left out, as Kimi K2
        and others do it. Such a prompt does not extend the one before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Toolset,
        *,
        syntax: Syntax = "json",
        drop_thinking: bool = False,
    ) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self._syntax, self._drop_thinking = syntax, drop_thinking
        self._encode = functools.lru_cache(maxsize=1024)(tokenizer.encode)
        self.marks = {tokenizer.special(name): kind for name, kind in _SECTIONS.items()}
        self.stop = (tokenizer.special("turn_end"), tokenizer.special("end"))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens behind which an assistant's turn is sampled."""
        special = self._tokenizer.special
        users = [number for number, message in enumerate(messages) if message.role == "user"]
        ids = [special("end")]
        for number, message in enumerate(messages):
            ids.append(special(message.role))
            if message.role != "assistant":
                ids += [*self._encode(message.text), special("turn_end")]
                continue
            turn = self.encode_turn(message) if message.ids is None else message.ids
            if message.text_only:
                turn = self._without(turn, ("thinking", "call"))
            elif self._drop_thinking and users and number < users[-1]:
                turn = self._without(turn, ("thinking",))
            ids += turn
            if ids[-1] not in self.stop:  # it was cut; this token is not one that was sampled
                ids.append(special("turn_end"))
        return [*ids, special("assistant")]

    def parse(self, ids: Sequence[int]) -> Message:
        """The assistant's turn that some sampled tokens are; never fails."""
        texts = {"text": [], "thinking": [], "call": []}
        for kind, section in self._sections(ids):
            texts[kind].append(self._tokenizer.decode([i for i in section if i not in self.stop]))
        return Message(
            role="assistant",
            text="\n".join(filter(None, (text.strip() for text in texts["text"]))),
            thinking="\n".join(filter(None, (text.strip() for text in texts["thinking"]))),
            requests=tuple(
                self._request(text, str(number)) for number, text in enumerate(texts["call"])
            ),
            ids=tuple(int(i) for i in ids),
        )

    def encode_turn(self, message: Message) -> list[int]:
        """Tokens of an assistant's turn that nobody sampled, the one that ends it included."""
        special = self._tokenizer.special
        ids = [special("think"), *self._encode(message.thinking)] if message.thinking else []
        if message.text:
            ids += [special("assistant")] if ids else []
            ids += self._encode(message.text)
        for request in message.requests:
            ids += [special("call"), *self._encode(self._written(request))]
        return [*ids, special("turn_end")]

    def counts(self, ids: Sequence[int]) -> Counts:
        """How many tokens of a turn are what."""
        totals = {"text": 0, "thinking": 0, "call": 0}
        for number, (kind, section) in enumerate(self._sections(ids)):
            totals[kind] += len(section) + (number > 0)  # its mark
        return Counts(**totals)

    def unanswered(self, prompt: Sequence[int]) -> list[tuple[Role, str]]:
        """Role and text of the messages behind the last assistant's turn of a prompt."""
        roles: tuple[Role, ...] = ("system", "user", "assistant", "tool")
        marks = {self._tokenizer.special(role): role for role in roles}
        found: list[tuple[Role, list[int]]] = []
        for token in prompt[:-1]:
            if marks.get(token) == "assistant":
                found.clear()
            elif token in marks:
                found.append((marks[token], []))
            elif found and token not in self.stop:
                found[-1][1].append(token)
        return [(role, self._tokenizer.decode(ids)) for role, ids in found]

    def _sections(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        sections: list[tuple[str, list[int]]] = [("text", [])]
        for token in ids:
            if token in self.marks:
                sections.append((self.marks[token], []))
            else:
                sections[-1][1].append(int(token))
        return sections

    def _without(self, ids: Sequence[int], kinds: Sequence[str]) -> list[int]:
        """A turn without its sections of some kinds; the tokens that end it stay."""
        kept, kind = [], "text"
        for token in ids:
            kind = self.marks.get(token, kind)
            if kind not in kinds or token in self.stop:
                kept.append(int(token))
        return kept

    def _request(self, text: str, number: str) -> Request:
        text = text.strip() if self._syntax == "json" else text
        end = next((at for at, sign in enumerate(text) if sign in " \n\t{"), len(text))
        name, raw = text[:end], text[end:]
        try:
            if not name:
                raise ToolError("a call begins with the name of a tool")
            if self._syntax == "json":
                arguments = schema.parse_json(raw.strip() or "{}")
            else:
                tool = self._tools.find(name)
                arguments = plain.read(text, tool.arguments) if tool else {}
        except ToolError as error:
            return Request(call=None, error=f"{name[:_MAX_NAME]}: {error}", raw=text, id=number)
        return Request(call=Call(name, arguments), raw=raw, id=number)

    def _written(self, request: Request) -> str:
        if request.call is None:
            return request.raw
        name, arguments = request.call.name, request.call.arguments
        if self._syntax == "plain" and (tool := self._tools.find(name)):
            return plain.write(request.call, tool.arguments)
        return f"{name} {json.dumps(arguments, ensure_ascii=False)}"


class ByteTokenizer:
    """One token for each byte: a tokenizer that needs no vocabulary, for scripts and tests."""

    _NAMES = ("end", "system", "user", "assistant", "tool", "think", "call", "turn_end")
    size = 256 + len(_NAMES)  # a model may have more tokens, which mean nothing

    def encode(self, text: str) -> Sequence[int]:
        """As `Tokenizer.encode`."""
        return tuple(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """As `Tokenizer.decode`."""
        return "".join(
            "".join(f"<|{self._NAMES[i - 256]}|>" if i < self.size else "\ufffd" for i in group)
            if special
            else bytes(group).decode(errors="replace")
            for special, group in itertools.groupby(ids, lambda i: i > 255)
        )

    def special(self, name: str) -> int:
        """As `Tokenizer.special`."""
        return 256 + self._NAMES.index(name)


def system_text(instructions: str, tools: Toolset) -> str:
    """Instructions and the schemas of the tools, for policies that get them as text."""
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in tools.prompts()]
    return "\n".join([instructions, "", "Tools, called as NAME {ARGUMENTS}:", *lines]).strip()


def message_from(record: Mapping[str, Any]) -> Message:
    """The message whose `dataclasses.asdict` this is, also after a journey through JSON."""
    requests = (
        Request(**{**item, "call": item["call"] and Call(**item["call"])})
        for item in record["requests"]
    )
    ids = record["ids"]
    fields = {"requests": tuple(requests), "ids": None if ids is None else tuple(ids)}
    return Message(**{**record, **fields})


def as_event(message: Message) -> dict[str, Any]:
    """A message as plain data for transcripts."""
    event: dict[str, Any] = {"role": message.role, "text": message.text}
    if message.thinking:
        event["thinking"] = message.thinking
    if message.requests:
        event["calls"] = [
            {"id": item.id, "error": item.error, "raw": item.raw}
            if item.call is None
            else {"id": item.id, "name": item.call.name, "arguments": item.call.arguments}
            for item in message.requests
        ]
    if message.answers:
        event["answers"] = message.answers
    return event
