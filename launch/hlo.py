"""Reads the text of a compiled module (`compiled.as_text()`), of TPUs and GPUs alike.

Only what costs are counted from is understood: computations in scheduled order, shapes, operands,
how often loops run, and which source file an instruction comes from. Lines and attributes that say
something else are passed over.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERAND = re.compile(r"%?([A-Za-z_][\w.\-]*)\s*(?:,|$)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|\w+_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:calls|called_computations|branch_computations)=\{([^}]*)\}")
_TABLE_ROW = re.compile(r'(\d+) (?:"([^"]*)"|\{(.*)\})$')


@dataclass(frozen=True)
class Shape:
    """An array: its type's name as in HLO, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Size without padding of tiles; 4-bit types are half bytes."""
        return self.elements * _bits(self.dtype) / 8


@functools.cache
def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+?(\d+)", dtype)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in its computation.
      shapes: of its results, tuples flattened.
      opcode: as "fusion" or "all-gather-start".
      operands: names.
      literal: what stands between the parentheses, for constants and parameters.
      attributes: the text behind the operands.
    """

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run once when this runs; of a loop the body."""
        lists = (re.findall(r"[\w.\-]+", x) for x in _CALLED_LIST.findall(self._references))
        names = (*_CALLED.findall(self._references), *(name for x in lists for name in x))
        return tuple(dict.fromkeys(names))

    @property
    def scope(self) -> str:
        """The path of jax transformations and named scopes it was traced in."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def _references(self) -> str:
        return self.attributes.partition("backend_config=")[0]


Computation = dict[str, Instruction]  # in scheduled order


@dataclass(frozen=True)
class Module:
    """A module: its computations by name, the entry's name, files behind every stack frame."""

    computations: Mapping[str, Computation]
    entry: str
    files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def operands(self, computation: str, instruction: Instruction) -> list[Instruction]:
        """The instructions that an instruction takes its operands from."""
        here = self.computations[computation]
        return [here[name] for name in instruction.operands if name in here]

    def sources(self, instruction: Instruction) -> tuple[str, ...]:
        """Files on the stack when the instruction was traced, innermost first, if noted."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.files.get(int(found[1]), ()) if found else ()

    def runs(self) -> dict[str, float]:
        """How often a run of the module runs each computation that is a schedule.

        Those are the entry, bodies of loops, calls and branches; not fusions, which are one
        instruction of a schedule. A loop whose bound is not known counts once, and so does every
        branch of a conditional.
        """
        counts: dict[str, float] = defaultdict(float)

        def visit(computation: str, times: float) -> None:
            counts[computation] += times
            for instruction in self.computations[computation].values():
                for name, trips in self.inner(computation, instruction):
                    visit(name, times * trips)

        visit(self.entry, 1.0)
        return dict(counts)

    def inner(self, computation: str, instruction: Instruction) -> list[tuple[str, int]]:
        """Schedules that an instruction runs, and how often."""
        if instruction.opcode not in ("while", "call", "conditional"):
            return []
        trips = 1
        if instruction.opcode == "while":
            trips = self.trips(computation, instruction)
            trips = 1 if trips is None else trips
        return [(name, trips) for name in instruction.called if name in self.computations]

    def trips(self, computation: str, loop: Instruction) -> int | None:
        """How often a loop's body runs: as the compiler noted, else from ``i < limit``."""
        if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(noted[1])
        condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
        here = self.computations.get(condition[1], {}) if condition else {}
        if not here:
            return None
        test = _root(here)
        if test.opcode == "fusion" and len(test.called) == 1:  # of the comparison alone
            inner = _root(self.computations[test.called[0]])
            if len(inner.operands) == len(test.operands):
                test = replace(inner, operands=test.operands)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        start = self.computations[computation].get(loop.operands[0])
        index, limit = (here.get(name) for name in test.operands)
        if index is None or index.opcode != "get-tuple-element":
            return None
        first, last = (self._scalar(x, computation, start) for x in (index, limit))
        return None if last is None else max(last - (first or 0), 0)

    def _scalar(
        self, found: Instruction | None, outside: str, start: Instruction | None
    ) -> int | None:
        """The integer that an instruction of a condition gives when the loop begins."""
        while found is not None and found.opcode in ("get-tuple-element", "copy", "bitcast"):
            if found.opcode != "get-tuple-element" or start is None or start.opcode != "tuple":
                return None
            index = int(re.search(r"\bindex=(\d+)", found.attributes)[1])
            found, start = self.computations[outside].get(start.operands[index]), None
        if found is not None and found.opcode == "constant" and found.literal.isdigit():
            return int(found.literal)
        return None


def _root(computation: Computation) -> Instruction:
    return next(reversed(computation.values()))  # a scheduled computation ends with its root


def parse(text: str) -> Module:
    """Reads a module.

    Raises:
      ValueError: if it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = here = table = None
    for line in text.splitlines():
        if here is not None:
            if line.startswith("}"):
                here = None
            elif (found := _LINE.match(line)) and (read := _instruction(*found.groups())):
                here[read.name] = read
        elif found := _COMPUTATION.match(line):
            here = computations[found[2]] = {}
            entry = found[2] if found[1] else entry
        elif line.isalpha():  # the title of a table, as "FileNames"
            table = tables[line] = {}
        elif table is not None and (found := _TABLE_ROW.match(line)):
            table[int(found[1])] = found[2] if found[2] is not None else found[3]
    if entry is None:
        raise ValueError("no entry computation: this is not the text of a compiled module")
    return Module(computations, entry, _files(tables))


def _instruction(name: str, rest: str) -> Instruction | None:
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    found = re.match(r" ?([\w\-]+)\(", rest[end:]) if end > 0 else None
    if not found:
        return None
    begin = end + found.end()
    close = _closing(rest, begin - 1) - 1
    literal = rest[begin:close]
    return Instruction(
        name,
        tuple(_shapes(rest[:end])),
        found[1],
        tuple(_OPERAND.findall(re.sub(r"/\*.*?\*/", "", literal))),
        literal,
        rest[close + 1 :],
    )


def _closing(text: str, begin: int) -> int:
    """The index behind the parenthesis that closes the one at ``begin``."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, begin):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims in _SHAPE.findall(text):
        yield Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))


def _files(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[str, ...]]:
    names, locations = tables.get("FileNames", {}), tables.get("FileLocations", {})
    frames = {key: _numbers(row) for key, row in tables.get("StackFrames", {}).items()}

    def walk(key: int) -> Iterable[str]:
        seen = set()
        while key in frames and key not in seen:
            seen.add(key)
            location = _numbers(locations.get(frames[key].get("file_location_id", 0), ""))
            yield names.get(location.get("file_name_id", 0), "")
            key = frames[key].get("parent_frame_id", 0) - 1  # ids of parents count from 1 for none

    return {key: tuple(walk(key)) for key in frames}


def _numbers(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
