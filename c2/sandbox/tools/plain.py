"""Calls in few characters, for policies of about a million parameters.

The first line has the tool and its short arguments in the order of the schema; those at its end
that have a default may be missing. A word with blanks or quotes is written as a JSON string. Texts
of several lines (`schema.argument`) follow below, with a line "====" between two of them.

    edit_lines lib/a.py 2 2
        return x + 1
"""

import dataclasses
import json
import re
import typing
from typing import Any

from c2.sandbox.protocol import ToolError
from c2.sandbox.tools.schema import Call, tool_name

SEPARATOR = "\n====\n"
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_BARE = re.compile(r'[^\s"]\S*')


def write(call: Call, arguments: type) -> str:
    """A call as text that `read` reads.

    Raises:
      ValueError: if it cannot be written: lists, or the separator inside of a text.
    """
    heads, bodies = _fields(arguments)
    given = [item for item in heads if item.name in call.arguments]
    if given != heads[: len(given)]:
        raise ValueError(f"{call.name}: an argument in front of a given one is missing")
    words = [_word(call.arguments[item.name]) for item in given]
    texts = [call.arguments[item.name] for item in bodies if item.name in call.arguments]
    if any(SEPARATOR in f"\n{text}\n" for text in texts[:-1]):
        raise ValueError(f"{call.name}: a text has the line that separates texts")
    body = "\n" + SEPARATOR.join(texts) if texts else ""
    return " ".join([tool_name(arguments), *words]) + body


def read(text: str, arguments: type) -> dict[str, Any]:
    """The arguments in a call of a tool; whether they are legal is for `schema.read` to say.

    Raises:
      ToolError: if there are more words than arguments.
    """
    head, newline, body = text.partition("\n")
    heads, bodies = _fields(arguments)
    words = _WORD.findall(head)[1:]
    if len(words) > len(heads):
        raise ToolError(f"arguments: {len(words)} words; {tool_name(arguments)} has {len(heads)}")
    kinds = typing.get_type_hints(arguments)
    result = {
        item.name: _value(word, kinds[item.name]) for item, word in zip(heads, words, strict=False)
    }
    texts = body.split(SEPARATOR, len(bodies) - 1) if newline and bodies else []
    return result | {item.name: value for item, value in zip(bodies, texts, strict=False)}


def _fields(arguments: type) -> tuple[list[dataclasses.Field], list[dataclasses.Field]]:
    fields = dataclasses.fields(arguments)
    heads = [item for item in fields if not item.metadata["body"]]
    return heads, [item for item in fields if item.metadata["body"]]


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"{value!r} is no word")


def _value(word: str, kind: Any) -> Any:
    """What a word means for a type; as it stands if it means nothing."""
    if kind is str and not word.startswith('"'):
        return word
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    fits = {str: str, int: int, float: (int, float), bool: bool}.get(kind, ())
    return value if isinstance(value, fits) else word
