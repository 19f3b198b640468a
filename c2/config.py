"""Strict building of frozen dataclass configs from plain data and command line words.

A config is a frozen, keyword-only dataclass. Its fields are int, float, bool, str, `Literal`,
`X | None`, `tuple[T, ...]`, `tuple[A, B]`, `dict[str, T]`, another such dataclass, or one of
several (`A | B`), told apart by a field `kind: Literal["a"] = "a"` in each. A config checks itself
in `__post_init__`, raising `ConfigError("key: what is wrong; what is legal")`; this module puts the
dotted path in front.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_SCALARS = {int: "int", float: "float", bool: "true or false", str: "str"}
_NON_FINITE = ("inf", "-inf", "nan")  # how plain data spells them, since JSON has no such numbers


class ConfigError(ValueError):
    """Bad input from the user; the message is one complete line that names the key."""

    def __init__(self, message: str) -> None:
        """Keeps the message on one line, whatever user input is quoted in it."""
        super().__init__(" ".join(message.splitlines()))


def runtime(
    default: Any = dataclasses.MISSING, *, default_factory: Any = dataclasses.MISSING
) -> Any:
    """A dataclass field that may change between two starts of one run, such as `log_every`."""
    return dataclasses.field(
        default=default, default_factory=default_factory, metadata={"identity": False}
    )


def to_dict(cfg: Any) -> dict[str, Any]:
    """The config as JSON-able data; tuples become lists, inf and nan become strings."""
    return _plain(cfg, _always)


def identity(cfg: Any) -> dict[str, Any]:
    """`to_dict` without the `runtime` fields: what decides whether two runs are the same run."""
    return _plain(cfg, _in_identity)


def runtime_keys(cfg: Any) -> list[str]:
    """The dotted keys of the `runtime` fields."""
    kept = dict(_leaves(identity(cfg)))
    return [key for key, _ in _leaves(to_dict(cfg)) if key not in kept]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per leaf that differs: `["model.hidden: 128 -> 256", ...]`."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    absent = object()

    def show(value: Any) -> str:
        return "(absent)" if value is absent else json.dumps(value)

    pairs = ((key, before.get(key, absent), after.get(key, absent)) for key in before | after)
    return [f"{key}: {show(a)} -> {show(b)}" for key, a, b in pairs if a != b]


def from_dict(cls: type[T], data: Mapping[str, Any], *, where: str = "config") -> T:
    """Builds `cls` from plain data, e.g. a parsed JSON file.

    Args:
      cls: a config dataclass.
      data: field name -> value; fields with a default may be absent.
      where: the name of `data` in error messages.

    Raises:
      ConfigError: for an unknown or missing key, a wrong type, or what `__post_init__` refuses.
      TypeError: if a field of `cls` has a type that configs cannot have.
    """
    return _build(cls, data, where)


def override(cfg: T, assignments: Sequence[str], *, where: str = "config") -> T:
    """Applies command line words such as `["model.hidden=128", "phases.0.steps=10"]`.

    All of them are applied before the config is rebuilt once, so two fields that must fit each
    other can be changed in any order. Tuples, dicts and dataclasses are written as JSON or Python
    literals; a dataclass literal changes only the keys it names; "none" is None where None is
    legal.

    Raises:
      ConfigError: as `from_dict`.
    """
    data = to_dict(cfg)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{where}.{path}: no value; write {path}=VALUE")
        data = _assigned(type(cfg), data, path.split("."), text, where)
    return _build(type(cfg), data, where)


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Puts `where` in front of errors that start with the key of a part of a config.

    For what a room finds out only when it runs: inside `located("config.data")` its error
    "sources: ..." becomes "config.data.sources: ...".
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from error


def suggestion(word: str, legal: Iterable[str]) -> str:
    """The words " did you mean 'X'?" for the legal word closest to `word`; "" if none is close."""
    close = difflib.get_close_matches(word, list(legal), n=1)
    return f" did you mean {close[0]!r}?" if close else ""


# Plain data ---------------------------------------------------------------------------------------


def _always(field: dataclasses.Field) -> bool:
    return True


def _in_identity(field: dataclasses.Field) -> bool:
    return field.metadata.get("identity", True)


def _plain(value: Any, keep: Callable[[dataclasses.Field], bool]) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if field.init and keep(field)]
        return {field.name: _plain(getattr(value, field.name), keep) for field in fields}
    if isinstance(value, tuple | list):
        return [_plain(item, keep) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, keep) for key, item in value.items()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, int | str):
        return value
    raise TypeError(f"a config cannot hold {value!r} of type {type(value).__name__}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that has no keys of its own."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


# Types --------------------------------------------------------------------------------------------


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _unwrap(kind: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); any other type, a union of dataclasses too -> (type, False)."""
    if not _is_union(kind):
        return kind, False
    inner = [arg for arg in typing.get_args(kind) if arg is not types.NoneType]
    if len(inner) > 1 and not all(dataclasses.is_dataclass(arg) for arg in inner):
        raise TypeError(f"config fields of type {kind} are not supported")
    return typing.Union[tuple(inner)], types.NoneType in typing.get_args(kind)  # noqa: UP007


def _member(kind: Any, value: Any, where: str) -> Any:
    """The dataclass of a union that `kind` of ``value`` names; other types as they are."""
    if not (_is_union(kind) and isinstance(value, Mapping)):
        return kind
    members = {cls.kind: cls for cls in typing.get_args(kind)}
    name = value.get("kind")
    if name not in members:
        raise ConfigError(f"{where}.kind: expected one of {', '.join(members)}, got {_quote(name)}")
    return members[name]


def _item_types(kind: Any, length: int) -> list[Any]:
    """The types of the items of a tuple type; for `tuple[T, ...]`, `length` of them."""
    args = typing.get_args(kind)
    return [args[0]] * length if args[1:] == (Ellipsis,) else list(args)


def _describe(kind: Any) -> str:
    """What to write for a value of this type, for people."""
    kind, optional = _unwrap(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        text = f"an object with the keys {', '.join(_field_types(kind))}"
    elif _is_union(kind):
        text = " or ".join(map(_describe, args))
    elif origin is Literal:
        text = f"one of {', '.join(map(str, args))}"
    elif origin is tuple and args[1:] == (Ellipsis,):
        text = f"a list [..] of {_describe(args[0])}"
    elif origin is tuple:
        text = f"a list [{', '.join(map(_describe, args))}]"
    elif origin is dict:
        text = f"an object {{key: {_describe(args[1])}}}"
    elif kind in _SCALARS:
        text = _SCALARS[kind]
    else:
        raise TypeError(f"config fields of type {kind} are not supported")
    return f"{text}, or none" if optional else text


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Data -> config -----------------------------------------------------------------------------------


def _build(kind: Any, value: Any, where: str) -> Any:
    """The checked value for a field of type `kind`."""
    expected = _describe(kind)
    kind, optional = _unwrap(kind)
    origin = typing.get_origin(kind)
    if value is None and optional:
        return None
    kind = _member(kind, value, where)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _build_dataclass(kind, value, where)
    if origin is Literal:
        legal = typing.get_args(kind)
        if any(type(value) is type(choice) and value == choice for choice in legal):
            return value
        guess = suggestion(str(value), map(str, legal))
        raise ConfigError(f"{where}: {_quote(value)} is not legal;{guess} expected {expected}")
    if origin is tuple and isinstance(value, list | tuple):
        kinds = _item_types(kind, len(value))
        if len(kinds) != len(value):
            raise ConfigError(f"{where}: expected {expected}, got {len(value)} items")
        return tuple(
            _build(item_kind, item, f"{where}.{index}")
            for index, (item_kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict and isinstance(value, Mapping):
        item_kind = typing.get_args(kind)[1]
        return {
            _build(str, key, f"{where}, a key"): _build(item_kind, item, f"{where}.{key}")
            for key, item in value.items()
        }
    if kind is float and (type(value) is int or value in _NON_FINITE):
        return float(value)
    if kind in _SCALARS and type(value) is kind:
        return value
    raise ConfigError(f"{where}: expected {expected}, got {_quote(value)}")


def _build_dataclass(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    kinds = _field_types(cls)
    for key in data:
        _check_key(key, kinds, where)
    for field in dataclasses.fields(cls):
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if field.init and not has_default and field.name not in data:
            expected = _describe(kinds[field.name])
            raise ConfigError(f"{where}.{field.name}: missing; expected {expected}")
    values = {key: _build(kinds[key], value, f"{where}.{key}") for key, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(_located(str(error), kinds, where)) from error


def _check_key(key: str, legal: Iterable[str], where: str) -> None:
    legal = list(legal)
    if key not in legal:
        guess = suggestion(str(key), legal)
        raise ConfigError(f"{where}.{key}: unknown key;{guess} legal keys: {', '.join(legal)}")


def _located(message: str, keys: Iterable[str], where: str) -> str:
    """Puts the path in front: as a prefix of the key that `message` starts with, if it does."""
    if message.startswith((f"{where}.", f"{where}:")):
        return message
    named = re.match(r"\w+", message)
    return f"{where}.{message}" if named and named[0] in keys else f"{where}: {message}"


# Words -> data ------------------------------------------------------------------------------------


def _assigned(kind: Any, value: Any, keys: Sequence[str], text: str, where: str) -> Any:
    """`value` with the entry at `keys` replaced by what `text` means there."""
    if not keys:
        return _merged(kind, value, _parse(kind, text), where)
    kind = _member(_unwrap(kind)[0], {} if value is None else value, where)
    origin = typing.get_origin(kind)
    key, *rest = keys
    here = f"{where}.{key}"
    if dataclasses.is_dataclass(kind):
        kinds = _field_types(kind)
        _check_key(key, kinds, where)
        value = _defaults(kind) if value is None else value
        return value | {key: _assigned(kinds[key], value.get(key), rest, text, here)}
    if origin is tuple:
        items = list(value or ())
        if key not in map(str, range(len(items))):
            raise ConfigError(f"{here}: no such item; {where} has {len(items)}, counted from 0")
        index = int(key)
        item_kind = _item_types(kind, len(items))[index]
        items[index] = _assigned(item_kind, items[index], rest, text, here)
        return items
    if origin is dict:
        value = value or {}
        item_kind = typing.get_args(kind)[1]
        return value | {key: _assigned(item_kind, value.get(key), rest, text, here)}
    raise ConfigError(f"{here}: unknown key; {where} is {_describe(kind)} and has no keys")


def _parse(kind: Any, text: str) -> Any:
    """What a word means for a type; a word that means nothing stays text for `_build` to refuse."""
    kind, optional = _unwrap(kind)
    if optional and text.lower() in ("none", "null"):
        return None
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if typing.get_origin(kind) is Literal:
        return next((choice for choice in typing.get_args(kind) if str(choice) == text), text)
    for parse in (kind,) if kind in (int, float) else (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return text


def _merged(kind: Any, old: Any, new: Any, where: str) -> Any:
    """`new`, where a dataclass keeps the old values of the keys that `new` does not name."""
    kind, _ = _unwrap(kind)
    if not (isinstance(new, dict) and (_is_union(kind) or dataclasses.is_dataclass(kind))):
        return new
    if _is_union(kind):
        if old and new.get("kind", old["kind"]) != old["kind"]:
            old = None  # another member: nothing of the old one applies
        kind = _member(kind, (old or {}) | new, where)
    kinds = _field_types(kind)
    old = _defaults(kind) if old is None else old
    return old | {
        key: _merged(kinds[key], old.get(key), value, f"{where}.{key}") if key in kinds else value
        for key, value in new.items()
    }


def _defaults(cls: type) -> dict[str, Any]:
    """The default values of a dataclass' fields as plain data; fields without one are left out."""
    plain = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            plain[field.name] = _plain(field.default_factory(), _always)
        elif field.default is not dataclasses.MISSING:
            plain[field.name] = _plain(field.default, _always)
    return plain
