"""Arguments of tools as dataclasses: a JSON schema for prompts, and checks of what a model sends.

A tool's arguments are a frozen, keyword-only dataclass (see `c2.config` for the legal types). Its
docstring describes the tool, its name in snake case is that of the tool, and `argument` describes a
field.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from c2.config import ConfigError, from_dict
from c2.sandbox.protocol import ToolError

Reading = Literal["strict", "lenient"]
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_FLAT = (str, int, float, type(None))
MAX_DEPTH = 32  # of lists and objects in arguments
_SHOWN = 60  # characters of a value in a note


@dataclass(frozen=True)
class Call:
    """A tool and its arguments, as a model or a script asks for them."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def argument(
    doc: str,
    default: Any = dataclasses.MISSING,
    *,
    aliases: tuple[str, ...] = (),
    body: bool = False,
) -> Any:
    """A field of arguments.

    Args:
      doc: what it is.
      default: what it is if a call does not have it.
      aliases: names by which lenient reading knows it too.
      body: whether it is a text of several lines (see `plain`).
    """
    metadata = {"doc": doc, "aliases": aliases, "body": body}
    return field(default=default, metadata=metadata)


def tool_name(arguments: type) -> str:
    """`ReadFile` -> "read_file"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", arguments.__name__).lower()


def description(arguments: type) -> str:
    """What the tool does: its docstring on one line."""
    return " ".join((arguments.__doc__ or "").split())


def json_schema(arguments: type) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    kinds = typing.get_type_hints(arguments)
    fields = dataclasses.fields(arguments)
    return {
        "type": "object",
        "properties": {
            item.name: _json_type(kinds[item.name]) | _annotations(item) for item in fields
        },
        "required": [item.name for item in fields if item.default is dataclasses.MISSING],
        "additionalProperties": False,
    }


def read(arguments: type, given: Any, reading: Reading) -> tuple[Any, list[str]]:
    """Checks what a model sent.

    Args:
      arguments: the dataclass of the tool.
      given: plain data, for instance parsed JSON.
      reading: "strict" takes only what the schema says. "lenient" also takes what can mean but one
        thing (a number in quotes, a name in another spelling) and leaves out what the tool does not
        know.

    Returns:
      The arguments, and one line for each repair.

    Raises:
      ToolError: one line that names the argument and what is legal.
    """
    notes: list[str] = []
    if reading == "lenient":
        given = _repaired(arguments, given, notes)
    if not isinstance(given, Mapping):
        raise ToolError(f"arguments: expected an object, got {_shown(given)}")
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ToolError("arguments: half of a surrogate pair is no character") from error
    try:
        return from_dict(arguments, given, where=tool_name(arguments)), notes
    except ConfigError as error:
        raise ToolError(str(error)) from error


def parse_json(text: str) -> dict[str, Any]:
    """The object that a model wrote as arguments.

    Raises:
      ToolError: if it is not one JSON object, has a key twice, or a number that JSON lacks.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"arguments: not JSON: {error}") from error
    if _is_deep(value):
        raise ToolError(f"arguments: nested more than {MAX_DEPTH} deep")
    if not isinstance(value, dict):
        raise ToolError(f"arguments: expected an object, got {_shown(value)}")
    return value


def similar(name: str, legal: Mapping[str, Any]) -> str | None:
    """The only legal name that differs just in case and signs, such as "readFile"; else None."""
    found = [other for other in legal if _plain(other) == _plain(name)]
    return found[0] if len(found) == 1 else None


def _json_type(kind: Any) -> dict[str, Any]:
    if kind in _JSON_TYPES:
        return {"type": _JSON_TYPES[kind]}
    if typing.get_origin(kind) is Literal:
        return {"type": "string", "enum": list(typing.get_args(kind))}
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": _json_type(typing.get_args(kind)[0])}
    if dataclasses.is_dataclass(kind):
        return json_schema(kind)
    raise TypeError(f"no JSON type for {kind}")


def _annotations(item: dataclasses.Field) -> dict[str, Any]:
    default = {} if item.default is dataclasses.MISSING else {"default": item.default}
    return {"description": item.metadata["doc"]} | default


# Lenient reading ----------------------------------------------------------------------------------


def _repaired(arguments: type, given: Any, notes: list[str]) -> Any:
    if isinstance(given, str):
        given = _noted(_loads(given, dict), given, "arguments", notes)
    if not isinstance(given, Mapping):
        return given
    kinds = typing.get_type_hints(arguments)
    names = {item.name: item for item in dataclasses.fields(arguments)}
    aliases = {alias: name for name, item in names.items() for alias in item.metadata["aliases"]}
    result = {}
    for key, value in given.items():
        name = key if key in names else similar(key, names)
        name = name or aliases.get(similar(key, aliases) or "")
        if name is None or (name != key and (name in given or name in result)):
            notes.append(f"{_shown(key)} is no argument and was left out")
        elif value is None and names[name].default is not dataclasses.MISSING:
            notes.append(f"{name}: null was read as its default")
        else:
            if name != key:
                notes.append(f"{_shown(key)} was read as {name}")
            result[name] = _noted(_coerced(kinds[name], value, notes), value, name, notes)
    return result


def _coerced(kind: Any, value: Any, notes: list[str]) -> Any:
    """What a value of a wrong type means if it can only mean one thing; else the value."""
    origin = typing.get_origin(kind)
    if kind is str and isinstance(value, int | float):
        return json.dumps(value)
    if kind is bool and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind in (int, float) and isinstance(value, str) and len(value) < 20:
        number = value.strip()
        pattern = r"[+-]?\d+" if kind is int else r"[+-]?\d+(\.\d+)?"
        return kind(number) if re.fullmatch(pattern, number, re.ASCII) else value
    if origin is Literal and isinstance(value, str):
        return similar(value, dict.fromkeys(typing.get_args(kind))) or value
    if origin is tuple:
        listed = _loads(value, list) if isinstance(value, str) else value
        items = listed if isinstance(listed, list | tuple) else [listed]
        return [_coerced(typing.get_args(kind)[0], item, notes) for item in items]
    if dataclasses.is_dataclass(kind):
        return _repaired(kind, value, notes)
    return value


def _noted(new: Any, old: Any, name: str, notes: list[str]) -> Any:
    if type(new) is not type(old) or new != old:
        notes.append(f"{name}: {_shown(old)} was read as {_shown(new)}")
    return new


def _loads(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, kind) and not _is_deep(value) else text


def _is_deep(value: Any) -> bool:
    """Whether a value could break what recurs into it, such as writing it to a transcript."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = (item for item in level if not isinstance(item, _FLAT))
        level = [
            inner
            for item in nested
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return any(not isinstance(item, _FLAT) for item in level)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {_shown(key)} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
