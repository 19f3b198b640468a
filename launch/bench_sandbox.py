"""Sandboxes: creates, first answers, forks, round trips, memory, grades.

Every figure stands beside bubblewrap or a plain command that does the least that the same thing can
be done with, measured in the same run and interleaved. A figure is the median of a round, the best
of all rounds counts. Beside it stands the processor time of all processes that had to do with it.
The goals are for two cores with nothing else to do: where others keep them busy, one that was not
reached was not missed either.
"""

import contextlib
import operator
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
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
from c2.sandbox.tasks.grade import grade, in_sandbox, tests_command

BACKENDS = ("zygote", "bwrap")
FILES, REPO_MB, CHANGED = 3144, 27, 8  # of the repository that is forked
READ_BYTES, READS = 500, 300
CREATES, SUSTAINED = 24, 200  # in a round
GRADES, PLACES = 8, 2
WORKERS = 2
LIVE = 300
SPEC = Spec(resources=Resources(memory_mb=256, disk_mb=64, pids=64))
GRADING = Spec(resources=Resources(memory_mb=255, disk_mb=64, pids=64))  # a kind of its own
OTHERS = 0.25  # of the processors' time, above which a machine is not at rest
ACCOUNTING = Path("/sys/fs/cgroup/cpuacct")
CREATE, FORK, GRADE = "create and close", f"fork of {REPO_MB} MB", "grade of a MiniRepo"
ANSWER, READ = "create to first answer", f"read of {READ_BYTES} bytes"
MEMORY = "memory of one of many"
GOALS = {CREATE: 200, ANSWER: 25, FORK: 6, READ: 1, GRADE: 150, MEMORY: 2}
# The bench is to measure a busy machine, not to wait until it is idle.
LIMITS = Limits(cpu_pressure=100, memory_pressure=100, starting=WORKERS)
# A bubblewrap with the same namespaces and rights, on the machine's own files.
BARE = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
    "--unshare-net", "--disable-userns", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL",
    "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
)  # fmt: skip


class Row(NamedTuple):
    """How one figure of one side is measured."""

    what: str
    side: str
    unit: str  # "ms", "MB", or "/s", of which more is better
    times: int  # that it is done in a round
    run: Callable[[], float]


class Usage(NamedTuple):
    """Seconds of processors until now: of this process and all that it started, of all; the time.

    The first is None where it is not counted.
    """

    ours: float | None
    all: float
    time: float


class Figure(NamedTuple):
    """A measured value.

    Attributes:
      value: the value.
      unit: of it.
      cpu_ms: milliseconds of processor time for each of what was done, if known.
      others: share of the processors that others used meanwhile, if known.
    """

    value: float
    unit: str
    cpu_ms: float | None = None
    others: float | None = None

    def __str__(self) -> str:
        used = "" if self.cpu_ms is None else f" ({self.cpu_ms:.1f})"
        return f"{self.value:,.3g} {self.unit}{used}"

    def verdict(self, goal: float) -> str:
        """Whether it is as good as that."""
        if (operator.ge if self.unit == "/s" else operator.le)(self.value, goal):
            return "reached"
        if self.others is not None and self.others > OTHERS:
            return f"not shown ({self.others:.0%} of the processors were others')"
        return "missed"


Figures = dict[tuple[str, str], Figure]


def report(console: rich.console.Console, rounds: int, live: int = LIVE) -> Figures:
    """Prints the table; returns its figures, (what, side) -> value."""
    with contextlib.ExitStack() as stack:
        clock = stack.enter_context(usage())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repo = make_repo(folder / "repo")
        rows = list(peers(repo, folder))
        for name in BACKENDS:
            pool = stack.enter_context(Pool(PoolConfig(backend=name, limits=LIMITS)))
            rows += sides(pool, name, repo)
        best = best_of(rows, rounds, clock, console.status)
        for name in BACKENDS:
            with console.status(f"memory of {live} sandboxes, {name}"):
                for what, value in memory(name, live).items():
                    best[what, name] = Figure(value, "MB")
    _print(console, best, live)
    return best


def best_of(
    rows: Sequence[Row],
    rounds: int,
    clock: Callable[[], Usage],
    status: Callable[[str], contextlib.AbstractContextManager],
) -> Figures:
    """Runs the rows in turn and returns the best value of each, (what, side) -> figure."""
    found: dict[Row, list[Figure]] = {row: [] for row in rows}
    for number in range(rounds):
        for row in rows:
            with status(f"round {number + 1}: {row.what}, {row.side}"):
                before, value, after = clock(), row.run(), clock()
            found[row].append(_figure(row, value, before, after))
    return {
        (row.what, row.side): (max if row.unit == "/s" else min)(figures)  # the value decides
        for row, figures in found.items()
    }


def _figure(row: Row, value: float, before: Usage, after: Usage) -> Figure:
    if before.ours is None:
        return Figure(value, row.unit)
    ours, whole = after.ours - before.ours, after.all - before.all
    there = (os.cpu_count() or 1) * (after.time - before.time)
    return Figure(value, row.unit, ours * 1e3 / row.times, (whole - ours) / there)


@contextlib.contextmanager
def usage() -> Iterator[Callable[[], Usage]]:
    """Looks at the processors' time.

    Ended processes whose end nobody waits for count too, so it takes a control group.
    """
    group = ACCOUNTING / f"c2-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield lambda: Usage(None, 0.0, 0.0)
        return

    def now() -> Usage:
        ours = int((group / "cpuacct.usage").read_text()) / 1e9
        every = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ticks = sum(map(int, every)) - int(every[3]) - int(every[4])  # idle, and waiting for disks
        return Usage(ours, ticks / os.sysconf("SC_CLK_TCK"), time.perf_counter())

    try:
        yield now
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # a process takes its time to end
            group.rmdir()


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

    true = [*bare, "/bin/true"]
    yield Row(CREATE, "peer", "/s", SUSTAINED, lambda: _rate(lambda: once(true), SUSTAINED))
    yield Row(ANSWER, "peer", "ms", 6, lambda: _median_ms(lambda: once(python), 6))
    yield Row(FORK, "peer", "ms", 1, copied)
    cat = [*bare, "/bin/cat", "/etc/hostname"]
    yield Row(READ, "peer", "ms", 6, lambda: _median_ms(lambda: once(cat), 6))


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
        _fill(pool, SPEC, CREATES)
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

    tasks = [minirepo.generate(seed, minirepo.FAMILIES[0]) for seed in range(GRADES)]
    solutions = [minirepo.solve(task) for task in tasks]
    command = tests_command({}, {}, ()).argv
    run = in_sandbox(pool, GRADING)

    def grades() -> float:
        _fill(pool, GRADING, PLACES, command)
        seconds = []
        for task, solution in zip(tasks, solutions, strict=True):
            began = time.perf_counter()
            assert grade(task, solution, run).reward == 1.0
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds) * 1e3

    def read() -> float:
        return _timed(lambda: pool.read(parent, "/repo/d0/new"))

    yield Row("create, of ready ones", name, "/s", CREATES, warm)
    yield Row(CREATE, name, "/s", SUSTAINED, lambda: _rate(create_and_close, SUSTAINED))
    yield Row(ANSWER, name, "ms", CREATES, lambda: _median_ms(first_answer, CREATES))
    yield Row(FORK, name, "ms", CREATES, lambda: _median_ms(fork, CREATES))
    yield Row(READ, name, "ms", READS, lambda: _median_ms(read, READS))
    yield Row(GRADE, name, "ms", GRADES, grades)


def memory(backend: str, live: int) -> dict[str, float]:
    """MB for each of `live` sandboxes that have answered a call.

    The share of its processes in memory, its tool server among them; and what the machine has less
    available, kernel and files included, should nothing else happen on it meanwhile.
    """
    with Pool(PoolConfig(backend=backend, limits=LIMITS)) as pool:
        made = [pool.create(SPEC)]
        pool.stat(made[0], "/repo")
        node, before = pool.node_pids()[0], _available()
        shared = sum(map(_share, _below(node)))  # what starts sandboxes, and the first of them
        with ThreadPoolExecutor(WORKERS) as threads:
            made += threads.map(lambda _: pool.create(SPEC), range(live))
            list(threads.map(lambda handle: pool.stat(handle, "/repo"), made))
        taken = before - _available()
        shares = sum(map(_share, _below(node)))
        _close(pool, made)
    return {
        MEMORY: (shares - shared) / live / 1e6,
        "taken from the machine by one": taken / live / 1e6,
    }


def _fill(pool: Pool, spec: Spec, count: int, command: Sequence[str] = ()) -> None:
    pool.keep_ready(spec, count, command=command)
    while pool.ready(spec) < count:
        time.sleep(0.02)


def _rate(once: Callable[[], float], count: int) -> float:
    """How many a second get done by `WORKERS` threads."""
    with ThreadPoolExecutor(WORKERS) as threads:
        return count / _timed(lambda: list(threads.map(lambda _: once(), range(count))))


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


def _print(console: rich.console.Console, best: Figures, live: int) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("sandbox")
    for column in ("goal", *BACKENDS, "peer"):
        table.add_column(column, justify="right")
    units = {what: figure.unit for (what, _), figure in best.items()}
    for what, unit in sorted(units.items(), key=lambda item: item[1]):
        cells = [best.get((what, side), "") for side in (*BACKENDS, "peer")]
        goal = f"{'>=' if unit == '/s' else '<='} {GOALS[what]} {unit}" if what in GOALS else ""
        table.add_row(what, goal, *map(str, cells))
    console.print(table)
    for what, goal in GOALS.items():
        said = ", ".join(f"{side} {best[what, side].verdict(goal)}" for side in BACKENDS)
        console.print(f"{what}: {said}", highlight=False)
    console.print(
        f"in parentheses: ms of processor time for each; many: {live}; "
        "peer: a bare bubblewrap around /bin/true, an interpreter or cat; cp -a for forks",
        highlight=False,
    )
