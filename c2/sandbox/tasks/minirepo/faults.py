"""Ways to spoil a function, by family: from a sound package to ones with something to do."""

import ast
import re
from collections.abc import Callable, Iterator

from c2.sandbox.tasks.minirepo.source import Function, Package
from c2.sandbox.tasks.minirepo.templates import TEMPLATES

# Pattern and replacement; every match in every line is one candidate.
_OPERATORS = (
    (r" \+ ", " - "), (r" \+ ", " * "), (r" - ", " + "), (r" \* ", " + "), (r" // ", " * "),
    (r" % ", " // "), (r" \+= ", " -= "), (r" > ", " < "), (r" < ", " > "), (r" >= ", " <= "),
    (r" <= ", " >= "), (r" == ", " != "), (r"\bmin\(", "max("), (r"\bmax\(", "min("),
    (r"\bsum\(", "len("), (r"if not ", "if "),
)  # fmt: skip
_BOUNDARIES = (
    (r" > ", " >= "), (r" >= ", " > "), (r" < ", " <= "), (r" <= ", " < "), (r"\[1:\]", "[2:]"),
    (r"\[1:\]", "[0:]"), (r"\[-1\]", "[-2]"), (r"word\[0\]", "word[1]"), (r", 0, -1\)", ", 1, -1)"),
    (r"range\(len\((\w+)\)\)", r"range(1, len(\1))"), (r"\[:(\w+)\]", r"[:\1 - 1]"),
    (r"range\((\w+), (\w+ \+ \w+)\)", r"range(\1, \2 - 1)"), (r"\((\w+) - 1\)", r"\1"),
)  # fmt: skip


def candidates(family: str, package: Package, target: Function) -> list[Package]:
    """Packages in which `target` is spoilt in the way of the family; some may work as before."""
    return list(FAMILIES[family](package, target))


def _operator(package: Package, target: Function) -> Iterator[Package]:
    return _substituted(package, target, _OPERATORS)


def _boundary(package: Package, target: Function) -> Iterator[Package]:
    return _substituted(package, target, _BOUNDARIES)


def _name(package: Package, target: Function) -> Iterator[Package]:
    """Another variable in scope, or a name with its last letter missing.

    Not where a loop would go through a list that it appends to, for ever.
    """
    nodes = [node for node in ast.walk(_parsed(target)) if isinstance(node, ast.Name)]
    local = [node.id for node in nodes if isinstance(node.ctx, ast.Store)]
    scope = list(dict.fromkeys([*target.params, *local]))
    pairs = [(old, new) for old in scope for new in (*scope, old[:-1]) if new != old]
    found = _substituted(package, target, [(rf"\b{old}\b", new) for old, new in pairs])
    return (spoilt for spoilt in found if not _is_endless(spoilt.function(target.name)))


def _is_endless(function: Function) -> bool:
    text = "\n".join(function.body)
    looped = re.findall(r"\bin (\w+):", text)
    return any(f"{name}.append(" in text for name in looped)


def _import(package: Package, target: Function) -> Iterator[Package]:
    for line in target.imports:
        yield package.with_function(
            target, imports=tuple(other for other in target.imports if other != line)
        )


def _feature(package: Package, target: Function) -> Iterator[Package]:
    yield package.with_function(target, body=("raise NotImplementedError",))


def _rename(package: Package, target: Function) -> Iterator[Package]:
    """The function still has an old name; the task is to give it the new one everywhere."""
    for name in TEMPLATES[target.template].names:
        if name != target.name:
            yield package.renamed(target.name, name)


def _config(package: Package, target: Function) -> Iterator[Package]:
    """Another value, a text for a number, or a misspelt name; the README keeps the truth."""
    names = [key for key in package.settings if f"from .config import {key}" in target.imports]
    if not names:
        return  # another target shares the setting, and its fault is the name
    name = names[0]
    value = package.settings[name]
    for wrong in (*(str(digit) for digit in range(1, 10)), f'"{value}"'):
        if wrong != value:
            yield _with_settings(package, package.settings | {name: wrong})
    yield _with_settings(
        package, {key[:-1] if key == name else key: it for key, it in package.settings.items()}
    )


def _constant(package: Package, target: Function) -> Iterator[Package]:
    """Another digit, which nothing but the tests tells."""
    digits = [(digit, wrong) for digit in "123456789" for wrong in "123456789" if digit != wrong]
    return _substituted(package, target, [(rf"\b{digit}\b", wrong) for digit, wrong in digits])


def _flow(package: Package, target: Function) -> Iterator[Package]:
    """No return at the end, or one inside of the loop before it."""
    *before, last = target.body
    if before and before[-1].startswith("    "):
        yield package.with_function(target, body=(*before, f"    {last}"))
    yield package.with_function(target, body=(*before, last.removeprefix("return ")))


def _arguments(package: Package, target: Function) -> Iterator[Package]:
    """Two neighbouring arguments of a call in the wrong order."""
    return _substituted(package, target, [(r"\b(\w+), (\w+)\b(?=[\w, ]*\))", r"\2, \1")])


FAMILIES: dict[str, Callable[[Package, Function], Iterator[Package]]] = {
    "operator": _operator,
    "boundary": _boundary,
    "name": _name,
    "import": _import,
    "feature": _feature,
    "rename": _rename,
    "config": _config,
    "constant": _constant,
    "flow": _flow,
    "arguments": _arguments,
}


def _substituted(package: Package, target: Function, pairs) -> Iterator[Package]:
    for index, line in enumerate(target.body):
        for pattern, new in pairs:
            for match in re.finditer(pattern, line):
                changed = line[: match.start()] + match.expand(new) + line[match.end() :]
                body = (*target.body[:index], changed, *target.body[index + 1 :])
                if changed != line:
                    yield package.with_function(target, body=body)


def _parsed(target: Function) -> ast.Module:
    return ast.parse("def f():\n" + "\n".join(f"    {line}" for line in target.body))


def _with_settings(package: Package, settings: dict[str, str]) -> Package:
    return Package(package.name, package.functions, settings, package.readme)
