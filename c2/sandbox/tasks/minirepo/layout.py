"""Draws a sound package for a task: how many modules, who calls whom, and which names."""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from c2.sandbox.tasks.minirepo.source import Function, Package
from c2.sandbox.tasks.minirepo.templates import (
    CALLERS,
    PACKAGES,
    POOLS,
    TEMPLATES,
    Template,
)

LEVELS = (0, 1, 2, 3, 4)
NUMERIC = ("number", "count")
_FILLERS = ("DEPTH", "SPEED", "COLOR")


@dataclass(frozen=True)
class Layout:
    """A sound package and what the task is about in it.

    Attributes:
      package: all of it.
      targets: names of the functions that are to be spoilt.
      chain: names of the functions whose results then change, the outermost last.
      shown: names of those of the chain that have visible tests.
      templates: keys of the templates that the task is about.
    """

    package: Package
    targets: tuple[str, ...]
    chain: tuple[str, ...]
    shown: tuple[str, ...]
    templates: tuple[str, ...]


def eligible(family: str, template: Template, in_caller: bool = False) -> bool:
    """Whether a family can be made of a template, or with `in_caller` of a caller of it."""
    kinds = list(template.params.values())
    if family == "constant":
        return template.opaque
    if family == "import":
        return in_caller or bool(template.imports)
    if family == "config":
        return kinds[-1] in NUMERIC and len(kinds) > 1 and not template.opaque
    if family == "arguments":
        return len(kinds) > 1
    return family not in ("feature", "boundary", "operator") or not template.opaque


def draw(rng: random.Random, family: str, level: int, held: Sequence[str]) -> Layout:
    """A package for a task.

    Level 0 has one function, or one and its caller; 1 another one beside it, 2 a caller in a second
    module, 3 a chain of three modules of which only the end has visible tests, 4 two targets below
    one function, which alone has visible tests.

    Args:
      rng: draws everything.
      family: of the task.
      level: one of `LEVELS`.
      held: templates of a held-out split. If a task's first target is none of these, neither is
        anything else in it; bystanders never are.
    """
    name = rng.choice(list(PACKAGES))
    modules = rng.sample(PACKAGES[name], 4)
    # Arguments are swapped in a caller; imports can be missing there too.
    in_caller = family == "arguments" or (family == "import" and level > 1 and rng.random() < 0.5)
    legal = [t for t in TEMPLATES.values() if eligible(family, t, in_caller)]
    templates = _templates(rng, legal, 2 if level == 4 else 1, held)
    leaves: list[Function] = []
    for template, module in zip(templates, modules, strict=False):
        taken = [leaf.name for leaf in leaves]
        leaves.append(_instance(rng, template, module, taken, setting=family == "config"))
    settings = _settings(rng, leaves) if family == "config" else {}
    callers = _callers(rng, family, level, modules, leaves)
    bystanders = []
    plain = [t for t in TEMPLATES.values() if t.key not in (*held, *(t.key for t in templates))]
    rng.shuffle(plain)
    for module in modules[: (0, 1, 1, 3, 4)[level]]:
        bystanders.append(_instance(rng, plain.pop(), module, ()))
    functions = [*leaves, *callers, *bystanders]
    rng.shuffle(functions)
    readme = tuple(f"{key} is {value}." for key, value in settings.items())
    package = Package(name, tuple(functions), settings, readme)
    names = tuple(function.name for function in (*leaves, *callers))
    chain = names[len(leaves) :] if in_caller else names
    targets = chain[: len(leaves)]
    if family == "rename":
        chain = targets  # their callers work before and after
    return Layout(
        package=package,
        targets=targets,
        chain=chain,
        shown=chain[-1:] if level >= 3 and family != "rename" else chain,
        templates=tuple(template.key for template in templates),
    )


def _templates(
    rng: random.Random, legal: Sequence[Template], count: int, held: Sequence[str]
) -> list[Template]:
    first = rng.choice(legal)
    rest = [t for t in legal if t is not first and (first.key in held or t.key not in held)]
    # A family can have one template only; the second target is then like the first.
    return [first, *(rng.choice(rest or [first]) for _ in range(count - 1))]


def _instance(
    rng: random.Random,
    template: Template,
    module: str,
    taken: Sequence[str],
    *,
    setting: bool = False,
) -> Function:
    """A function of a template; with `setting` its last parameter comes from config.py."""
    names = _names(rng, template.params)
    words = {**names, "K": rng.randint(2, 9), "L": rng.randint(2, 9)}
    params = {names[key]: kind for key, kind in template.params.items()}
    imports = template.imports
    if setting:
        key = list(template.params)[-1]
        params.pop(names[key])
        words[key] = names[key].upper()
        imports = (*imports, f"from .config import {words[key]}")
    return Function(
        module=module,
        name=rng.choice([name for name in template.names if name not in taken]),
        params=params,
        doc=string.Template(template.doc).substitute(words),
        body=tuple(string.Template(line).substitute(words) for line in template.body),
        imports=imports,
        template=template.key,
    )


def _names(rng: random.Random, params: dict[str, str]) -> dict[str, str]:
    """Distinct names for parameters of the given kinds."""
    drawn = {kind: rng.sample(POOLS[kind], 4) for kind in sorted(set(params.values()))}
    return {key: drawn[kind].pop() for key, kind in params.items()}


def _settings(rng: random.Random, leaves: Sequence[Function]) -> dict[str, str]:
    used = [line.split()[-1] for leaf in leaves for line in leaf.imports if ".config" in line]
    names = [*dict.fromkeys(used), *rng.sample(_FILLERS, 2)]
    rng.shuffle(names)
    return {name: str(rng.randint(2, 9)) for name in names}


def _callers(
    rng: random.Random, family: str, level: int, modules: list[str], leaves: Sequence[Function]
) -> list[Function]:
    """Functions that call the leaves, the outermost last."""
    prefixes = rng.sample(CALLERS, 4)
    if level <= 1:
        inside = family in ("rename", "arguments")
        return [_caller(rng, prefixes.pop(), modules[0], leaves)] if inside else []
    if level == 2:
        return [_caller(rng, prefixes.pop(), modules[1], leaves)]
    places = (modules[1],) if level == 3 else (modules[2], modules[2])
    inner = [
        _caller(rng, prefixes.pop(), place, [leaf])
        for place, leaf in zip(places, leaves, strict=True)
    ]
    return [*inner, _caller(rng, prefixes.pop(), modules[level - 1], inner)]


def _caller(rng: random.Random, prefix: str, module: str, callees: Sequence[Function]) -> Function:
    kinds = {f"{index}{name}": kind for index, callee in enumerate(callees)
             for name, kind in callee.params.items()}  # fmt: skip
    names = _names(rng, kinds)
    calls = [
        f"{callee.name}({', '.join(names[f'{index}{name}'] for name in callee.params)})"
        for index, callee in enumerate(callees)
    ]
    if len(calls) > 1:
        body = (f"first = {calls[0]}", f"return [first, {calls[1]}]")
    elif rng.random() < 0.5:
        body = (f"found = {calls[0]}", "return [found]")
    else:
        body = (f'return "{prefix}: " + str({calls[0]})',)
    return Function(
        module=module,
        name=f"{prefix}_{module}",
        params={names[key]: kind for key, kind in kinds.items()},
        doc=f"The {prefix} of {' and '.join(callee.name for callee in callees)}.",
        body=body,
        imports=tuple(
            f"from .{callee.module} import {callee.name}"
            for callee in callees
            if callee.module != module
        ),
    )
