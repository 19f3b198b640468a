"""Wrong versions of a solution, to find out whether tests notice.

A mutant is the solution without one piece of its change, or with one operator, constant or
condition on a changed line altered. Those that compile to the same program, but for docstrings and
annotations, or to none are left out. A mutant may still be right by chance, so no set of tests has
to find all of them.
"""

import ast
import difflib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping

Option = Callable[[], str]

_SWAPS = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
    ast.LtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
}  # fmt: skip


def mutants(
    base: Mapping[str, str], solution: Mapping[str, str], count: int, seed: int = 0
) -> list[dict[str, str]]:
    """Up to `count` mutants, each as the files that differ from the solution.

    Args:
      base: the repository, path -> text.
      solution: the same with the solution.
      count: how many are drawn; partial solutions and altered ones evenly.
      seed: of the draw.
    """
    rng = random.Random(seed)
    kinds = []
    for make in (_partial, _altered):
        options = [
            (path, option)
            for path in sorted(solution)
            if path.endswith(".py") and base.get(path, "") != solution[path]
            for option in make(base.get(path, ""), solution[path])
        ]
        rng.shuffle(options)
        sound = (
            {path: text} for path, option in options if _differs(text := option(), solution[path])
        )
        kinds.append(list(itertools.islice(sound, count)))
    partial, altered = kinds
    some = partial[: count - min(count // 2, len(altered))]
    return some + altered[: count - len(some)]


def _partial(old: str, new: str) -> Iterator[Option]:
    """The new text without one of its changes."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for tag, i, j, k, m in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
        if tag != "equal":
            yield lambda i=i, j=j, k=k, m=m: "".join(after[:k] + before[i:j] + after[m:])


def _altered(old: str, new: str) -> Iterator[Option]:
    """The new program with one node on a changed line altered."""
    changed = _changed_lines(old, new)
    try:
        nodes = list(ast.walk(ast.parse(new)))
    except SyntaxError:
        return
    for number, node in enumerate(nodes):
        if getattr(node, "lineno", 0) in changed:
            for alter in _alterations(node):
                yield lambda number=number, alter=alter: _apply(new, number, alter)


def _apply(text: str, number: int, alter: Callable[[ast.AST], None]) -> str:
    tree = ast.parse(text)
    alter(list(ast.walk(tree))[number])
    return ast.unparse(ast.fix_missing_locations(tree))


def _changed_lines(old: str, new: str) -> set[int]:
    matcher = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), False)
    return {
        line
        for tag, _, _, k, m in matcher.get_opcodes()
        if tag != "equal"
        for line in range(k + 1, m + 1)
    }


def _alterations(node: ast.AST) -> Iterator:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield lambda n: n.ops.__setitem__(0, _SWAPS[type(n.ops[0])]())
    if isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in _SWAPS:
        yield lambda n: setattr(n, "op", _SWAPS[type(n.op)]())
    if isinstance(node, (ast.If, ast.IfExp)):
        yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda n: setattr(n, "value", not n.value)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Return) and node.value is not None:
        yield lambda n: setattr(n, "value", ast.Constant(None))


def _differs(text: str, solution: str) -> bool:
    try:
        return _program(text) != _program(solution)
    except SyntaxError:
        return False


def _program(text: str) -> str:
    """What a text does, without docstrings and annotations."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_string(body[0]):
            body[:1] = [] if len(body) > 1 else [ast.Pass()]
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
    return ast.dump(tree)


def _is_string(node: ast.AST) -> bool:
    value = getattr(node, "value", None)
    return (
        isinstance(node, ast.Expr)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
    )
