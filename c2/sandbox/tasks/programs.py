"""What a Python program uses and dictates, by its text alone."""

import ast
import collections
from collections.abc import Iterator


def parsed(text: str) -> ast.AST:
    """The program of a text; an empty one if it is none."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])  # no program, so it does nothing


def used_names(tree: ast.AST) -> collections.Counter:
    """How often a program uses each dotted name and each prefix of one; imports are resolved.

    Strings that are a whole name count as well, for `getattr` and `sys.modules`.
    """
    real, used = {}, collections.Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                used.update(_prefixes(item.name))
                if item.asname:
                    real[item.asname] = item.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            used.update(_prefixes(node.module))
            for item in node.names:
                real[item.asname or item.name] = f"{node.module}.{item.name}"
                used[f"{node.module}.{item.name}"] += 1
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in inner:
            first, dot, rest = _dotted(node).partition(".")
            used.update(_prefixes(f"{real.get(first, first)}{dot}{rest}"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used[node.value] += 1
    used["__main__"] -= _main_guards(tree)
    return used


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _main_guards(tree: ast.AST) -> int:
    """How often `__name__ == "__main__"` is there."""
    compares = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return sum(_dotted(node.left) == "__name__" for node in compares)


def _constants(node: ast.AST) -> Iterator[str]:
    """The values of all literals in an expression, containers included."""
    for item in ast.walk(node):
        if isinstance(item, ast.expr) and (value := _literal(item)) is not None:
            yield value


def _literal(node: ast.AST | None) -> str | None:
    try:
        return None if node is None else repr(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def asserted(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs of an input and a result from `assert f(.., input, ..) == result`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            call, result = node.test.left, _literal(node.test.comparators[0])
            if isinstance(call, ast.Call) and result is not None:
                for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                    yield from ((given, result) for given in _constants(argument))


def dictated(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs of a literal that something is compared with and the literal that then results."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            results = [
                item.value for item in node.body if isinstance(item, (ast.Return, ast.Assign))
            ]
            pairs = [(node.test, result) for result in results]
        elif isinstance(node, ast.IfExp):
            pairs = [(node.test, node.body)]
        elif isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.match_case):
            results = [
                item.value for item in node.body if isinstance(item, (ast.Return, ast.Assign))
            ]
            pairs = [(node.pattern, result) for result in results]
        else:
            continue
        for test, result in pairs:
            if test is not None and (value := _literal(result)) is not None:
                yield from ((given, value) for given in _constants(test))
