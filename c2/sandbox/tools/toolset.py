"""Answers calls: looks the tool up, checks the arguments, bounds the result, and never raises."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from c2.config import ConfigError, suggestion
from c2.sandbox.protocol import SandboxError, SandboxLost, ToolError
from c2.sandbox.tools import schema
from c2.sandbox.tools.schema import Call, Reading
from c2.sandbox.toolserver.capture import MIN_CAP, Capture

MAX_NAME = 100


@dataclass(frozen=True, kw_only=True)
class ToolsConfig:
    """Which tools an environment has and how they behave.

    Attributes:
      names: the tools, in the order of the prompt; None means all that there are.
      reading: how arguments are read. "strict" is for training: a policy sees its mistakes.
        "lenient" is for use by people: what is unambiguous is repaired, and the answer says so.
      max_result: bytes of an answer.
      max_shell_s: seconds that a command may ask for.
    """

    names: tuple[str, ...] | None = None
    reading: Reading = "strict"
    max_result: int = 16384
    max_shell_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_result < 2 * MIN_CAP:
            raise ConfigError(f"max_result: {self.max_result}; legal are {2 * MIN_CAP} and more")
        if not 0 < self.max_shell_s < float("inf"):
            raise ConfigError(f"max_shell_s: {self.max_shell_s}; legal are finite numbers > 0")
        if len(set(self.names or ())) != len(self.names or ()):
            raise ConfigError("names: a tool is named twice")


@dataclass(frozen=True)
class Tool:
    """A tool of an environment.

    Attributes:
      arguments: the dataclass of its arguments, which names and describes it.
      run: does it; raises `ToolError` if it cannot be done.
      reads_only: whether it changes nothing, so that several calls may run at once.
    """

    arguments: type
    run: Callable[[Any], str]
    reads_only: bool = False

    @property
    def name(self) -> str:
        """What a call names."""
        return schema.tool_name(self.arguments)

    def prompt(self) -> dict[str, Any]:
        """Its name, description and parameters, as chat endpoints and templates take them."""
        return {
            "name": self.name,
            "description": schema.description(self.arguments),
            "parameters": schema.json_schema(self.arguments),
        }


@dataclass(frozen=True)
class ToolResult:
    """The answer to a call.

    Attributes:
      text: for the agent; a failure begins with "error: ", and what was cut says so.
      ok: whether the call was done.
      lost: why the environment can answer no more (`protocol.Reason`), else None. "exited" and
        "deadline" can be the agent's own doing, the others cannot.
    """

    text: str
    ok: bool = True
    lost: str | None = None


@dataclass(frozen=True)
class Toolset:
    """The tools of one environment.

    Attributes:
      tools: by name, in the order of the prompt.
      config: how they behave.
    """

    tools: dict[str, Tool]
    config: ToolsConfig = field(default_factory=ToolsConfig)

    @classmethod
    def of(cls, tools: Iterable[Tool], config: ToolsConfig) -> "Toolset":
        """Those of the tools that the config names.

        Raises:
          ConfigError: if it names one that there is not.
        """
        found = {tool.name: tool for tool in tools}
        names = found if config.names is None else config.names
        if unknown := [name for name in names if name not in found]:
            guess = suggestion(unknown[0], found)
            raise ConfigError(
                f"names: no tool {unknown[0]!r} here;{guess} there are {', '.join(found)}"
            )
        return cls({name: found[name] for name in names}, config)

    def prompts(self) -> list[dict[str, Any]]:
        """All tools as `Tool.prompt`."""
        return [tool.prompt() for tool in self.tools.values()]

    def find(self, name: str) -> Tool | None:
        """The tool that a call means; lenient reading takes other spellings too."""
        if name not in self.tools and self.config.reading == "lenient":
            name = schema.similar(name, self.tools) or name
        return self.tools.get(name)

    def __call__(self, call: Call) -> ToolResult:
        """Answers a call; whatever goes wrong is in the result."""
        try:
            return ToolResult(clip(self._answer(call), self.config.max_result))
        except ToolError as error:
            return self.refusal(str(error))
        except SandboxLost as error:
            return self._lost(str(error), error.reason)
        except SandboxError as error:
            return self._lost(str(error), "backend")
        except Exception as error:
            # A mistake of ours must neither end a run nor count against the agent.
            logging.getLogger(__name__).exception("tool %.100r failed", call.name)
            return self._lost(f"{type(error).__name__}: {error}", "backend")

    def refusal(self, why: str) -> ToolResult:
        """The result of a call that cannot be done."""
        return ToolResult(clip(f"error: {why}", self.config.max_result), ok=False)

    def _lost(self, why: str, reason: str) -> ToolResult:
        return ToolResult(clip(f"error: {why}", self.config.max_result), ok=False, lost=reason)

    def _answer(self, call: Call) -> str:
        tool = self.find(call.name)
        if tool is None:
            there = ", ".join(self.tools)
            raise ToolError(f"no tool {call.name[:MAX_NAME]!r}; there are {there}")
        arguments, notes = schema.read(tool.arguments, call.arguments, self.config.reading)
        if tool.name != call.name:
            notes.insert(0, f"{call.name[:MAX_NAME]!r} was read as {tool.name}")
        return "".join(f"note: {note}\n" for note in notes) + tool.run(arguments)


def clip(text: str, limit: int) -> str:
    """At most `limit` bytes of a text: its beginning and end, around a line that says what lacks.

    What cannot be encoded, such as bytes of a file name, becomes "?".
    """
    data = text.encode(errors="replace")
    capture = Capture(limit)
    capture.feed(data)
    return capture.value().decode(errors="replace")
