"""Speed against the best-known peer, as a ratio measured in one process run.

    python -m launch.bench train_step              # needs the extra `parity`
    python -m launch.bench train_step --rounds=5

Machines differ and drift, so no absolute figure is promised anywhere: both sides run interleaved,
on all cores of this process, and the best round of each counts. Peak memory is measured in a
process of its own for each side.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable

import rich
import rich.box
import rich.table
from absl import app, flags, logging

from launch import bench_train_step, jax_setup

BENCHES = {"train_step": bench_train_step}

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed rounds of every side.", lower_bound=1)
_DTYPES = flags.DEFINE_list(
    "dtypes", ["float32", "bfloat16"], "Precisions; bfloat16 is very slow on CPUs without it."
)
_MEMORY_OF = flags.DEFINE_string("memory_of", None, "Internal: print the peak memory of one side.")


def main(argv: list[str]) -> None:
    """Runs the benchmarks named on the command line, all by default."""
    logging.set_verbosity(logging.WARNING)
    names = argv[1:] or list(BENCHES)
    if unknown := sorted(set(names) - set(BENCHES)):
        sys.exit(_fail(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHES)}"))
    jax_setup.split_cpu()
    jax_setup.release_compiler_memory()
    for name in names:
        bench = BENCHES[name]
        try:
            sides = bench.sides(_DTYPES.value)
        except ImportError as error:
            sys.exit(_fail(f"{name} needs `pip install -e .[parity]`: {error}"))
        if _MEMORY_OF.value:
            sides[_MEMORY_OF.value]()()
            print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        else:
            _compare(name, bench, sides)


def _compare(name: str, bench, sides: dict[str, Callable]) -> None:
    """Prints a row per side and the ratios of ours to the peer's."""
    console = rich.get_console()
    console.print(f"{name}: {bench.__doc__.splitlines()[0]}", highlight=False)
    memory = {side: _peak_memory(name, side) for side in sides}
    prepared = {}
    for side, prepare in sides.items():
        with console.status(f"preparing {side}"):
            prepared[side] = prepare()
    best = dict.fromkeys(sides, float("inf"))
    for number in range(_ROUNDS.value):
        for side, step in prepared.items():
            with console.status(f"round {number + 1}: {side}"):
                best[side] = min(best[side], step())
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in ("side", "tokens/s", "peak memory"):
        table.add_column(column, justify="left" if column == "side" else "right", no_wrap=True)
    for side in sides:
        speed = f"{bench.TOKENS / best[side]:,.0f}"
        table.add_row(side, speed, f"{memory[side] / 2**20:.2f} GiB")
    console.print(table)
    ours = {side: seconds for side, seconds in best.items() if side.startswith("ours")}
    peers = {side: seconds for side, seconds in best.items() if side not in ours}
    for dtype in _DTYPES.value:
        ratio = best[f"{bench.PEER} {dtype}"] / best[f"ours {dtype}"]
        console.print(f"{dtype}: {ratio:.2f} x the peer's tokens per second", highlight=False)
    fastest = min(peers.values()) / min(ours.values())
    console.print(f"fastest against fastest: {fastest:.2f} x", highlight=False)


def _peak_memory(name: str, side: str) -> int:
    """Peak resident memory of one step in a fresh process, KiB."""
    dtypes = f"--dtypes={','.join(_DTYPES.value)}"
    command = [sys.executable, "-m", "launch.bench", name, dtypes, f"--memory_of={side}"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return json.loads(run.stdout.splitlines()[-1])


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    jax_setup.quiet_logs()
    app.run(main)
