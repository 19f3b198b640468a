"""Compiles every kernel for chips that are not there, and looks for approximate division.

    python -m launch.aot                                   # all; writes pallas_kernels/aot.md
    python -m launch.aot --targets=b200 --ops=nvfp4,mxfp8  # prints only, unless --out is given

Needs the extra `aot`, see `launch/targets.py`; `make aot` does it all. Exit status 1 means that
a kernel does not compile for a chip it is made for, or that approximate division was found where
none may be, or that it was not found in the program that holds it on purpose.
"""

import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import app, flags

from launch import jax_setup, kernel_cases, targets

DEFAULT_OUT = "pallas_kernels/aot.md"

_TARGETS = flags.DEFINE_list("targets", [], "Chips to compile for; all by default.")
_OPS = flags.DEFINE_list("ops", [], "Ops to compile; all by default.")
_OUT = flags.DEFINE_string("out", DEFAULT_OUT, "Where the table goes; partial ones only if given.")

_INTRODUCTION = """\
Made by `python -m launch.aot` on a machine without any of these chips, with {versions}. It shows
that programs can be compiled, down to machine code, and how much temporary memory they take. It
does not show that they compute the right numbers, or fast; `python -m launch.device_check` does
that, on a chip.
"""
_DIVISION = """\
## Approximate division

What was found, in how many texts, in the code of programs that must give the same bytes everywhere;
the ablation `reciprocal` shows that the search would find it. Read are the PTX of GPU programs, the
low-level (LLO) code of TPU kernels and the optimised HLO of TPU programs, which is all XLA shows.
"""

Job = tuple[str, str]  # name of a program, name of a chip


def main(argv: list[str]) -> None:
    """Compiles, prints the table and writes it."""
    known = kernel_cases.jobs()
    try:
        wanted = select(known, _OPS.value, _TARGETS.value)
    except ValueError as error:
        sys.exit(_fail(str(error)))
    if reason := next(filter(None, map(targets.missing, wanted)), None):
        sys.exit(_fail(reason))

    start = time.monotonic()
    results: dict[Job, dict] = {}
    total = sum(map(len, wanted.values()))
    for chip, names in wanted.items():
        for name, result in compile_all(chip, names):
            case, impl = known[name]
            approximate = impl == kernel_cases.APPROXIMATE
            wrong = failure(result, exact=case.exact, approximate=approximate)
            results[name, chip] = result | {"failure": wrong, "exact": case.exact}
            print(
                f"[{len(results)}/{total}] {chip}, {name}: {result['seconds']:.1f} s, "
                + (f"FAILED: {wrong}" if wrong else "ok"),
                flush=True,
            )
    text = table(results)
    print(f"\n{text}\n{len(results)} programs in {time.monotonic() - start:.0f} s")
    if _OUT.present or not (_TARGETS.value or _OPS.value):
        Path(_OUT.value).write_text(text)
        print(f"written to {_OUT.value}")
    sys.exit(1 if any(result["failure"] for result in results.values()) else 0)


def select(known: dict, ops: list[str], chips: list[str]) -> dict[str, list[str]]:
    """Names of programs for each chip.

    Args:
      known: `launch.kernel_cases.jobs`.
      ops: names to choose, all if empty.
      chips: likewise.

    Raises:
      ValueError: if there is no such op or chip.
    """
    made_for = {name: kernel_cases.chips(case, impl) for name, (case, impl) in known.items()}
    all_ops = list(dict.fromkeys(case.op for case, _ in known.values()))
    all_chips = list(dict.fromkeys(itertools.chain(*made_for.values())))
    for flag, given, legal in (("ops", ops, all_ops), ("targets", chips, all_chips)):
        if unknown := sorted(set(given) - set(legal)):
            raise ValueError(f"--{flag}: {unknown[0]!r} is not legal; legal: {', '.join(legal)}")
    return {
        chip: [n for n in known if chip in made_for[n] and known[n][0].op in (ops or all_ops)]
        for chip in chips or all_chips
    }


def failure(result: dict, *, exact: bool, approximate: bool) -> str | None:
    """What is wrong with a result of `launch.aot_worker.compile_for`.

    Args:
      result: of one program.
      exact: whether it must hold no approximate division.
      approximate: whether it is the ablation that must hold some.
    """
    if "error" in result:
        return result["error"]
    if exact and not result["texts"]:
        return "the compiler dumped nothing to search for division"
    if exact and bool(result["divisions"]) != approximate:
        return f"approximate division: {', '.join(result['divisions']) or 'none, on purpose'}"
    return None


def compile_all(
    chip: str, names: list[str], worker: tuple[str, ...] = ("-m", "launch.aot_worker")
) -> Iterator[tuple[str, dict]]:
    """Results of `launch.aot_worker.compile_for`, as they come.

    Where the compiler takes its process down, the program is to blame that it was at, and a new
    process goes on with the next.

    Args:
      chip: name of a target.
      names: of the programs.
      worker: arguments of the interpreter that make it a worker, in front of ``chip``.

    Raises:
      RuntimeError: if a worker ends before its first program.
    """
    left = list(names)
    while left:
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, *worker, chip],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            with process:
                json.dump(left, process.stdin)
                process.stdin.close()
                start, at = time.monotonic(), None
                for line in process.stdout:
                    match json.loads(line):
                        case str(name):
                            start, at = time.monotonic(), name
                        case result:
                            left.remove(at)
                            yield at, result
                            at = None
            errors.seek(0)
            last = ([line.strip() for line in errors if line.strip()] or ["no message"])[-1]
        if at is not None:
            left.remove(at)
            error = f"the compiler crashed with status {process.returncode}: {last}"
            yield at, {"error": error[:200], "seconds": time.monotonic() - start}
        elif left:
            raise RuntimeError(f"the worker for {chip} ended: {last}")


def table(results: dict[Job, dict]) -> str:
    """Markdown: temporary memory of every program on every chip, then the divisions in it."""
    exact = {job: result for job, result in results.items() if result["exact"]}
    return "\n".join(
        [
            "# Kernels compiled ahead of time",
            "",
            _INTRODUCTION.format(versions=", ".join(versions())),
            *_grid(results, _memory),
            "",
            _DIVISION,
            *_grid(exact, _divisions),
            "",
        ]
    )


def _grid(results: dict[Job, dict], cell: Callable[[dict], str]) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in results))
    chips = list(dict.fromkeys(chip for _, chip in results))
    rows = [["op", "backend", "program", *chips], ["---"] * (3 + len(chips))]
    for name in names:
        cells = (results.get((name, chip)) for chip in chips)
        rows.append(name.split(", ", 2) + [cell(result) if result else "" for result in cells])
    return [f"| {' | '.join(row)} |" for row in rows]


def _memory(result: dict) -> str:
    return result.get("error") or f"ok, {result['temp_bytes'] / 2**20:,.1f} MiB"


def _divisions(result: dict) -> str:
    if "error" in result:
        return ""
    return f"{', '.join(result['divisions']) or 'none'} in {result['texts']}"


def versions() -> list[str]:
    """Of what compiles."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    if cuda := targets.cuda_home():
        output = subprocess.run([cuda / "bin/ptxas", "--version"], capture_output=True, text=True)
        found += [f"ptxas {version}" for version in re.findall(r" V(\S+)", output.stdout)]
    return found


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    jax_setup.quiet_logs()
    app.run(main)
