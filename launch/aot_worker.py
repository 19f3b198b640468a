"""Compiles programs for one chip in a process of its own: a compiler's failed check ends it.

Reads names of jobs as a JSON list from standard input. Writes to standard output, as lines of JSON,
every name when its turn comes and what became of it.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launch import divisions, targets


def main() -> None:
    """Does the jobs, for the chip that the command line names."""
    (chip,) = sys.argv[1:]
    names = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        targets.prepare(Path(folder))
        from launch import kernel_cases  # imports jax, which reads what was prepared

        jobs = kernel_cases.jobs()
        device, *_ = targets.devices(chip)
        for name in names:
            _tell(name)
            case, impl = jobs[name]
            _tell(compile_for(device, partial(case.run, impl), case.shapes, Path(folder)))


def compile_for(device: Any, run: Callable, shapes: tuple, dumped: Path) -> dict[str, Any]:
    """Compiles ``run``, called with arrays of these shapes, and reads what the compiler dumped.

    Returns:
      "seconds" and either "error", one line, or "temp_bytes", "texts" that were read and the
      approximate "divisions" in them.
    """
    import jax

    start = time.perf_counter()
    try:
        with jax.default_device(device):
            args = targets.shapes_on(device, shapes)
            compiled = jax.jit(run).lower(*args).compile()
    except Exception as error:  # of whatever kind: the others must be compiled still
        return {"error": reason(error), "seconds": time.perf_counter() - start}
    seconds = time.perf_counter() - start
    hlo = compiled.as_text() if device.platform == "tpu" else None
    found = divisions.search(dumped, hlo)
    for file in dumped.rglob("*"):
        if file.is_file():
            file.unlink()
    return {
        "seconds": seconds,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "texts": found.texts,
        "divisions": found.instructions,
    }


def reason(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    return (next(filter(None, lines), "") or type(error).__name__)[:200]


def _tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
