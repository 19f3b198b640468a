"""The chat format of `c2.agent` for the server of `c2.rollout`, which do not know each other."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from c2.agent.chat import ChatFormat, Message, Request, Tokenizer, system_text
from c2.rollout.server import protocol
from c2.sandbox.protocol import ToolError
from c2.sandbox.tools import schema
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Toolset


@dataclass(frozen=True)
class _Declared:
    """Tools that are someone else's: only their schemas are known."""

    functions: Sequence[protocol.FunctionSchema]

    def prompts(self) -> list[dict[str, Any]]:
        """As `Toolset.prompts`."""
        kept = {"name", "description", "parameters"}
        return [function.model_dump(include=kept) for function in self.functions]


class ServedChat:
    """See `c2.rollout.server.Chat`. Calls are written as JSON, tools in the system's message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._format = ChatFormat(tokenizer, Toolset({}))
        self._call = tokenizer.special("call")
        self.stop, self.marks = self._format.stop, self._format.marks

    def prompt(
        self,
        messages: Sequence[protocol.Message],
        tools: Sequence[protocol.FunctionSchema],
    ) -> list[int]:
        """As `Chat.prompt`."""
        said = [_message(message) for message in messages]
        if tools:
            instructions = said.pop(0).text if said[0].role == "system" else ""
            text = system_text(instructions, _Declared(tools))
            said.insert(0, Message(role="system", text=text))
        return self._format.prompt(said)

    def call(self, ids: Sequence[int]) -> tuple[str, str]:
        """As `Chat.call`; what cannot be read is given as it was written."""
        (request,) = self._format.parse([self._call, *ids]).requests
        if request.call is not None:
            return request.call.name, json.dumps(request.call.arguments, ensure_ascii=False)
        name = re.match(r"[^\s{]*", request.raw)[0]
        return name, request.raw[len(name) :].strip()


def _message(message: protocol.Message) -> Message:
    return Message(
        role="system" if message.role == "developer" else message.role,
        text=message.content or "",
        thinking=message.reasoning_content,
        requests=tuple(map(_request, message.tool_calls)),
        answers=message.tool_call_id,
    )


def _request(call: protocol.ToolCall) -> Request:
    name, arguments = call.function.name, call.function.arguments
    try:
        return Request(call=Call(name, schema.parse_json(arguments)), id=call.id)
    except ToolError as error:
        return Request(call=None, error=str(error), raw=f"{name} {arguments}", id=call.id)
