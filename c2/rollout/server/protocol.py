"""What a request may hold: OpenAI's fields, and some of vLLM's by their names there.

A field that this server does not know is refused, and so is a value that it cannot honour, such as
a frequency penalty; null is the same as nothing. Fields beyond OpenAI's:

  top_k, stop_token_ids, ignore_eos   as in vLLM
  return_token_ids                    adds `token_ids` and `policy_versions` to every choice, and
                                      `prompt_token_ids`; as in vLLM but for the versions
  return_routes                       adds `routes` to every choice: the experts of every token of
                                      prompt and completion, int16 [token, moe_layer, top_k], as
                                      `{"dtype", "shape", "base64"}`; see `c2.records.Completion`
"""

from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from c2.config import ConfigError, suggestion

MAX_STOPS = 16  # stop strings of a request
T = TypeVar("T", bound=BaseModel)


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        given = isinstance(data, dict)
        return {key: item for key, item in data.items() if item is not None} if given else data


def _prompts(value: Any) -> list[str | list[int]]:
    several = isinstance(value, list) and value and isinstance(value[0], list | str)
    prompts = value if several else [value]
    for prompt in prompts:
        ids = isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt)
        if not (ids or isinstance(prompt, str)):
            raise ValueError("it is none of these")
    return prompts


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not (isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)):
        raise ValueError("it is none of these")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"there are {len(stops)}")
    return stops


def _temperature(value: float) -> float:
    if value and not 1e-3 <= value <= 1e3:
        raise ValueError("it is out of range")
    return value


def _text(value: Any) -> Any:
    """The text of a message's parts."""
    if not isinstance(value, list):
        return value
    parts = [part if isinstance(part, dict) else {} for part in value]
    if any(part.get("type") != "text" or type(part.get("text")) is not str for part in parts):
        raise ValueError("only parts of type text can be read")
    return "".join(part["text"] for part in parts)


def _legal(text: str, **bounds: Any) -> Any:
    """A field whose errors say what is legal."""
    return Field(description=text, **bounds)


Nothing = Annotated[float, _legal("0: tokens are sampled as the model says", ge=0, le=0)]


class StreamOptions(_Fields):
    """How to stream."""

    include_usage: bool = False


class Body(_Fields):
    """What both kinds of requests have; see the module."""

    model: Annotated[str, _legal("the name of the model that is served")]
    n: Annotated[int, _legal("1 to 128", ge=1, le=128)] = 1
    max_tokens: Annotated[int | None, _legal("an integer")] = None
    temperature: Annotated[
        float, AfterValidator(_temperature), _legal("0, or a number from 0.001 to 1000")
    ] = 1.0
    top_p: Annotated[float, _legal("a number from 0.000001 to 1", ge=1e-6, le=1)] = 1.0
    top_k: Annotated[int | None, _legal("an integer")] = None
    seed: Annotated[int | None, _legal("an integer")] = None
    stop: Annotated[
        list[str],
        PlainValidator(_stops),
        _legal(f"a text, or a list of up to {MAX_STOPS}; token ids are given as stop_token_ids"),
    ] = []
    stop_token_ids: Annotated[list[int], _legal("a list of token ids")] = []
    ignore_eos: Annotated[bool, _legal("true, false")] = False
    stream: Annotated[bool, _legal("true, false")] = False
    stream_options: Annotated[StreamOptions, _legal('{"include_usage": true}')] = StreamOptions()
    return_token_ids: Annotated[bool, _legal("true, false")] = False
    return_routes: Annotated[bool, _legal("true, false")] = False
    frequency_penalty: Nothing = 0.0
    presence_penalty: Nothing = 0.0
    logit_bias: Annotated[dict[str, float], _legal("an empty object", max_length=0)] = {}
    user: Annotated[str, _legal("a text; nobody reads it")] = ""

    @property
    def wants_log_probs(self) -> bool:
        """Whether the answer has log-probabilities."""
        raise NotImplementedError


class CompletionBody(Body):
    """A request to complete prompts."""

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_prompts),
        _legal("a text, a list of token ids, or a list of either"),
    ]
    logprobs: Annotated[
        int | None, _legal("0, for those of the sampled tokens; others are not kept", ge=0, le=0)
    ] = None
    echo: Annotated[Literal[False], _legal("false")] = False

    @property
    def wants_log_probs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.logprobs is not None


class Function(_Fields):
    """A call, as a model wrote it."""

    name: str
    arguments: str = "{}"


class ToolCall(_Fields):
    """A call of an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(_Fields):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text)] = None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    name: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} has a content")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError(f"role {self.role} has neither calls nor thoughts")
        return self


class FunctionSchema(_Fields):
    """What a tool is."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: Literal[False] = False


class Tool(_Fields):
    """A tool that a model may call."""

    type: Literal["function"]
    function: FunctionSchema


class ResponseFormat(_Fields):
    """What the content is."""

    type: Literal["text"] = "text"


class ChatBody(Body):
    """A request for the next turn of a conversation."""

    messages: Annotated[list[Message], _legal("a list of messages", min_length=1)]
    max_completion_tokens: Annotated[int | None, _legal("an integer")] = None
    logprobs: Annotated[bool, _legal("true, false")] = False
    top_logprobs: Annotated[int, _legal("0: others are not kept", ge=0, le=0)] = 0
    tools: Annotated[list[Tool], _legal("a list of functions")] = []
    tool_choice: Annotated[Literal["auto", "none"], _legal("auto, none")] = "auto"
    parallel_tool_calls: Annotated[Literal[True], _legal("true")] = True
    response_format: Annotated[ResponseFormat, _legal('{"type": "text"}')] = ResponseFormat()

    @property
    def wants_log_probs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.logprobs


def parse(kind: type[T], data: bytes) -> T:
    """Reads a request's body.

    Raises:
      ConfigError: one line that names the field and what is legal.
    """
    try:
        fields = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ConfigError(f"body: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError("body: it is no JSON object")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(_reason(error, kind)) from error


def _reason(error: ValidationError, kind: type[BaseModel]) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part)[:60] for part in first["loc"]) or "body"
    top = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        legal = f"{suggestion(top[:60], kind.model_fields)} legal: {', '.join(kind.model_fields)}"
        return f"{where}: unknown;{legal}"
    described = kind.model_fields[top].description if len(first["loc"]) == 1 else None
    legal = f"; legal: {described}" if described else ""
    return f"{where}: {first['msg'].removeprefix('Value error, ')}{legal}"
