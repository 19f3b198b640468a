"""Speed against the best-known peer, as a ratio measured in one process run.

    python -m launch.bench train_step                    # needs the extra `parity`
    python -m launch.bench train_step --dtypes=float32   # without the minutes that bfloat16 takes
                                                         # on CPUs that have no such arithmetic
    python -m launch.bench sandbox

Machines differ and drift, so no absolute figure is promised anywhere: both sides run interleaved,
on all cores of this process, and the best round of each counts. Peak memory is measured in a
process of its own for each side.
"""

import json
import os
import resource
import subprocess
import sys
import time
from types import ModuleType

import rich
import rich.box
import rich.table
from absl import app, flags, logging

from launch import (
    bench_asynchronous,
    bench_decode,
    bench_grouped_matmul,
    bench_quantize,
    bench_sandbox,
    bench_train_step,
    bench_weight_sync,
    jax_setup,
)
from launch.bench_case import Case

BENCHES = {
    "train_step": bench_train_step,
    "decode": bench_decode,
    "quantize": bench_quantize,
    "grouped_matmul": bench_grouped_matmul,
    "sandbox": bench_sandbox,
    "weight_sync": bench_weight_sync,
    "asynchronous": bench_asynchronous,
}
SETTLE = 0.3  # seconds before a timed round: thread pools of the other side spin for a while
PATIENCE = 30.0  # seconds of timed rounds after which a side is not run again

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds of every side.", lower_bound=1)
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "Precisions to compare.")
_MEMORY_OF = flags.DEFINE_string("memory_of", None, "Internal: print the peak memory of CASE/SIDE.")


def main(argv: list[str]) -> None:
    """Runs the benchmarks named on the command line, all by default."""
    logging.set_verbosity(logging.WARNING)
    names = argv[1:] or list(BENCHES)
    if unknown := sorted(set(names) - set(BENCHES)):
        sys.exit(_fail(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHES)}"))
    if unknown := sorted(set(_DTYPES.value) - {"float32", "bfloat16"}):
        sys.exit(_fail(f"--dtypes: {unknown[0]!r} is not legal; legal: float32, bfloat16"))
    jax_setup.split_cpu()
    jax_setup.release_compiler_memory()
    for name in names:
        bench = BENCHES[name]
        if bench is bench_sandbox:  # has figures of many kinds
            bench.report(rich.get_console(), _ROUNDS.value)
            continue
        try:
            cases = bench.cases(_DTYPES.value)
        except ImportError as error:
            sys.exit(_fail(f"{name} needs `pip install -e .[parity]`: {error}"))
        if _MEMORY_OF.value:
            case, side = _MEMORY_OF.value.split("/")
            getattr(cases[case], side)()
            print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        else:
            _compare(name, bench, cases)


def _compare(name: str, bench: ModuleType, cases: dict[str, Case]) -> None:
    """Prints a row per side and the ratios of ours to the peer's."""
    console = rich.get_console()
    console.print(f"{name}: {bench.__doc__.splitlines()[0]}", highlight=False)
    sides = [(case, side) for case in cases for side in ("ours", "peer")]
    memory = {}
    if bench.SAME_WORK:
        for side in sides:
            with console.status(f"peak memory: {' '.join(side)}"):
                memory[side] = f"{_peak_memory(name, '/'.join(side)) / 2**20:.2f} GiB"
    best = _best_times(cases, sides, console)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in ("case", "side", f"{bench.UNIT}/s", "peak memory")[: 4 if memory else 3]:
        table.add_column(column, justify="left" if column in ("case", "side") else "right")
    for case, side in sides:
        speed = f"{cases[case].amount / best[case, side]:,.0f}"
        label = "ours" if side == "ours" else bench.PEER
        table.add_row(case, label, speed, *([memory[case, side]] if memory else []))
    console.print(table)
    for case in cases:
        ratio = best[case, "peer"] / best[case, "ours"]
        console.print(f"{case}: {ratio:.2f} x the {bench.UNIT} per second of {bench.PEER}")
    if bench.SAME_WORK and len(cases) > 1:
        fastest = (min(best[case, side] for case in cases) for side in ("peer", "ours"))
        console.print(f"fastest against fastest: {next(fastest) / next(fastest):.2f} x")


def _best_times(cases, sides, console) -> dict[tuple[str, str], float]:
    """Seconds of the best round of every side, interleaved."""
    steps = {}
    for case, side in sides:
        with console.status(f"preparing {case} {side}"):
            steps[case, side] = getattr(cases[case], side)()
    seconds = {side: [] for side in sides}
    for number in range(_ROUNDS.value):
        for side in sides:
            if sum(seconds[side]) < PATIENCE:
                with console.status(f"round {number + 1}: {' '.join(side)}"):
                    time.sleep(SETTLE)
                    seconds[side].append(steps[side]())
    return {side: min(times) for side, times in seconds.items()}


def _peak_memory(name: str, side: str) -> int:
    """Peak resident memory of preparing one side in a fresh process, KiB."""
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
