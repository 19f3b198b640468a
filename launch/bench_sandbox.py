"""Sandboxes: creates, first answers, forks, round trips, memory, grades.

Every figure stands beside bubblewrap or a plain command that does the least that the same thing can
be done with, measured in the same run and interleaved. A figure is the median of a round, the best
of all rounds counts.
"""

import contextlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import rich.box
import rich.console
import rich.table

from c2.sandbox.command import find_bwrap
from c2.sandbox.pool import Limits, Pool, PoolConfig
from c2.sandbox.protocol import Handle, Resources, Spec
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.grade import grade, in_sandbox

BACKENDS = ("zygote", "bwrap")
FILES, REPO_MB, CHANGED = 3144, 27, 8  # of the repository that is forked
READ_BYTES, READS = 500, 300
CREATES = 24  # in a round
WORKERS = 2
LIVE = 300
SPEC = Spec(resources=Resources(memory_mb=256, disk_mb=64, pids=64))
# The bench is to measure a busy machine, not to wait until it is idle.
LIMITS = Limits(cpu_pressure=100, memory_pressure=100, starting=WORKERS)
# A bubblewrap with the same namespaces and rights, on the machine's own files.
BARE = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
    "--unshare-net", "--disable-userns", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL",
    "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
)  # fmt: skip

Round = Callable[[], float]


class Row(NamedTuple):
    """One figure of one side."""

    what: str
    side: str
    unit: str  # "ms", "MB", or "/s", of which more is better
    run: Round


def report(console: rich.console.Console, rounds: int, live: int = LIVE) -> dict:
    """Prints the table; returns its figures, (what, side) -> value."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repo = make_repo(folder / "repo")
        rows = list(peers(repo, folder))
        for name in BACKENDS:
            pool = stack.enter_context(Pool(PoolConfig(backend=name, limits=LIMITS)))
            rows += sides(pool, name, repo)
        best = best_of(rows, rounds, console.status)
        units = {row.what: row.unit for row in rows}
        for name in BACKENDS:
            with console.status(f"memory of {live} sandboxes, {name}"):
                for what, value in memory(name, live).items():
                    best[what, name], units[what] = value, "MB"
    _print(console, best, units)
    return best


def best_of(
    rows: Sequence[Row], rounds: int, status: Callable[[str], contextlib.AbstractContextManager]
) -> dict[tuple[str, str], float]:
    """Runs the rows in turn and returns the best value of each, (what, side) -> value."""
    found: dict[Row, list[float]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            with status(f"round {number + 1}: {row.what}, {row.side}"):
                found[row].append(row.run())
    return {
        (row.what, row.side): (max if row.unit == "/s" else min)(values)
        for row, values in found.items()
    }


def make_repo(folder: Path) -> Path:
    """A folder with as much in it as a middling repository."""
    rng = random.Random(0)
    for number in range(FILES):
        file = folder / f"d{number % 120}" / f"f{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.randbytes((REPO_MB << 20) // FILES))
    return folder


def peers(repo: Path, folder: Path) -> Iterator[Row]:
    """The least that each thing can be done with."""
    bare = [str(find_bwrap()), *BARE]
    python = [*bare, sys.executable, "-I", "-S", "-c", "import json"]
    copy = folder / "copy"

    def once(command: list[str]) -> float:
        return _timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))

    def copied() -> float:
        seconds = once(["cp", "-a", str(repo), str(copy)])
        shutil.rmtree(copy)
        return seconds * 1e3

    yield Row("create and close", "peer", "/s", lambda: _rate(lambda: once([*bare, "/bin/true"])))
    yield Row("create to first answer", "peer", "ms", lambda: _median_ms(lambda: once(python), 6))
    yield Row(f"fork of {REPO_MB} MB", "peer", "ms", copied)
    cat = [*bare, "/bin/cat", "/etc/hostname"]
    yield Row("read of 500 bytes", "peer", "ms", lambda: _median_ms(lambda: once(cat), 6))


def sides(pool: Pool, name: str, repo: Path) -> Iterator[Row]:
    """The same of a pool."""
    spec = Spec(resources=SPEC.resources, layers=(pool.add_layer(str(repo)),))
    parent = pool.create(spec)
    for number in range(CHANGED):
        pool.write(parent, f"/repo/d{number}/new", b"x" * READ_BYTES)

    def create_and_close() -> float:
        began = time.perf_counter()
        pool.close(pool.create(spec))
        return time.perf_counter() - began

    def warm() -> float:
        pool.keep_ready(SPEC, CREATES)
        while pool.ready(SPEC) < CREATES:
            time.sleep(0.05)
        pool.keep_ready(SPEC, 0)
        made: list[Handle] = []
        seconds = _timed(lambda: made.extend(pool.create(SPEC) for _ in range(CREATES)))
        _close(pool, made)
        return CREATES / seconds

    def first_answer() -> float:
        began = time.perf_counter()
        handle = pool.create(spec)
        pool.stat(handle, "/repo")
        seconds = time.perf_counter() - began
        pool.close(handle)
        return seconds

    def fork() -> float:
        began = time.perf_counter()
        (handle,) = pool.fork(parent)
        seconds = time.perf_counter() - began
        pool.close(handle)
        return seconds

    def grades() -> float:
        run, family = in_sandbox(pool, SPEC), minirepo.FAMILIES[0]
        tasks = [minirepo.generate(seed, family) for seed in range(6)]
        solutions = [minirepo.solve(task) for task in tasks]
        seconds = []
        for task, solution in zip(tasks, solutions, strict=True):
            began = time.perf_counter()
            assert grade(task, solution, run).reward == 1.0
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds) * 1e3

    def read() -> float:
        return _timed(lambda: pool.read(parent, "/repo/d0/new"))

    yield Row("create, of ready ones", name, "/s", warm)
    yield Row("create and close", name, "/s", lambda: _rate(create_and_close))
    yield Row("create to first answer", name, "ms", lambda: _median_ms(first_answer, CREATES))
    yield Row(f"fork of {REPO_MB} MB", name, "ms", lambda: _median_ms(fork, CREATES))
    yield Row("read of 500 bytes", name, "ms", lambda: _median_ms(read, READS))
    yield Row("grade of a MiniRepo", name, "ms", grades)


def memory(backend: str, live: int) -> dict[str, float]:
    """MB for each of `live` sandboxes that have answered a call.

    What the machine has less available then, kernel and files included; and the share of its
    processes in memory.
    """
    with Pool(PoolConfig(backend=backend, limits=LIMITS)) as pool:
        made = [pool.create(SPEC)]
        pool.stat(made[0], "/repo")
        before = _available()
        with ThreadPoolExecutor(WORKERS) as threads:
            made += threads.map(lambda _: pool.create(SPEC), range(live))
            list(threads.map(lambda handle: pool.stat(handle, "/repo"), made))
        taken = before - _available()
        shares = [_share(pid) for pid in _below(pool.node_pids()[0])]
        _close(pool, made)
    return {
        f"memory of one of {live}": taken / live / 1e6,
        f"of that, processes of one of {live}": sum(shares) / live / 1e6,
    }


def _rate(once: Callable[[], float]) -> float:
    """How many a second get done by two threads."""
    began = time.perf_counter()
    threads = [
        threading.Thread(target=lambda: [once() for _ in range(CREATES)]) for _ in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return WORKERS * CREATES / (time.perf_counter() - began)


def _median_ms(once: Callable[[], float], count: int) -> float:
    return statistics.median(once() for _ in range(count)) * 1e3


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _close(pool: Pool, handles: list[Handle]) -> None:
    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(pool.close, handles))


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def _below(pid: int) -> list[int]:
    inner = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return inner + [other for child in inner for other in _below(child)]


def _share(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def _print(console: rich.console.Console, best: dict, units: dict[str, str]) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("sandbox")
    for side in (*BACKENDS, "peer"):
        table.add_column(side, justify="right")
    for what, unit in sorted(units.items(), key=lambda item: item[1]):
        cells = [best.get((what, side)) for side in (*BACKENDS, "peer")]
        table.add_row(what, *("" if x is None else f"{x:,.3g} {unit}" for x in cells))
    console.print(table)
    console.print(
        "peer: a bare bubblewrap around /bin/true, an interpreter or cat; cp -a for forks",
        highlight=False,
    )
