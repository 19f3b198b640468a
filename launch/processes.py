"""One run on several processes, which are started here or by something else.

    --processes=4                                           starts four here, on CPUs
    --processes=4 --process_id=1 --coordinator=HOST:PORT    is number 1 of four
    --processes=cluster                                     asks jax which one it is and of how many

Every process computes; number 0 alone speaks and writes. If one dies, the others end, too: at once
where this module started them, else when a collective fails or `HEARTBEAT` has passed.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, NoReturn

from c2.config import ConfigError

HEARTBEAT = 20  # seconds without a sign of life after which jax gives a process up for dead
CLUSTER = "cluster"
COORDINATOR, PROCESS_ID = "C2_COORDINATOR", "C2_PROCESS_ID"  # defaults of two flags
STOPPED = 128 + signal.SIGTERM  # status of a process that has saved and can be resumed
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """Which processes share a run, and which of them this is.

    Attributes:
      count: how many; none: as many as jax detects.
      index: which this is; none: the one that starts them, or as jax detects.
      coordinator: "HOST:PORT", where number 0 listens; none likewise.
    """

    count: int | None = 1
    index: int | None = None
    coordinator: str | None = None

    @property
    def alone(self) -> bool:
        """Whether there is one process only."""
        return self.count == 1

    @property
    def member(self) -> bool:
        """Whether this is one of several that run."""
        return not self.alone and not self.starts_others

    @property
    def starts_others(self) -> bool:
        """Whether this process starts those that run."""
        return not self.alone and self.count is not None and self.index is None


def parse(count: str, index: int | None, coordinator: str | None) -> Processes:
    """What the three flags say.

    Raises:
      ConfigError: if one is not legal, or they do not fit together.
    """
    if (index is None) != (coordinator is None):
        raise ConfigError("--process_id, --coordinator: one without the other; legal: both or none")
    if count == CLUSTER:
        if index is not None:
            raise ConfigError(f"--processes={CLUSTER}: jax finds --process_id and --coordinator")
        return Processes(count=None)
    if not re.fullmatch("[1-9][0-9]*", count):
        raise ConfigError(f"--processes: {count!r} is not legal; legal: 1, 2, ... or {CLUSTER}")
    if index is not None and not 0 <= index < int(count):
        raise ConfigError(f"--process_id: {index} is not legal; legal: 0 to {int(count) - 1}")
    if coordinator is not None and not re.fullmatch(r"\S+:\d{1,5}", coordinator):
        raise ConfigError(f"--coordinator: {coordinator!r} is not legal; legal: HOST:PORT")
    return Processes(count=int(count), index=index, coordinator=coordinator)


def join(processes: Processes) -> int:
    """Meets the other processes, before jax has looked for devices; waits until all are there.

    Returns:
      Which process this is; number 0 speaks and writes for all.

    Raises:
      RuntimeError: if they cannot meet.
    """
    if processes.alone:
        return 0
    import jax

    where = {}
    if processes.count is not None:
        where = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.count,
            "process_id": processes.index,
            "cluster_detection_method": "deactivate",
        }
        if processes.coordinator.startswith("127."):  # otherwise the whole network could join
            where["coordinator_bind_address"] = processes.coordinator
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT)
    except (RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise RuntimeError(f"the processes cannot meet: {first}") from error
    return jax.process_index()


def leave(status: int) -> NoReturn:
    """Ends a process that failed at once: jax would wait for the others, and they wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start(count: int, arguments: Sequence[str]) -> int:
    """Runs `launch.main` in ``count`` processes that meet on loopback, until all have ended.

    Number 0 has this process's standard output; standard errors are held back until the end. The
    first SIGTERM or Ctrl-C lets all save at the same step. If one fails, the others are killed; if
    this process dies, all are.

    Args:
      count: of processes.
      arguments: of each, without the name of the program.

    Returns:
      The exit status for this process: 0, or that of the first that failed.
    """
    with contextlib.ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        children = stack.enter_context(_started(count, arguments, errors))
        codes, received = _wait(children)
        for file in errors:
            file.seek(0)
        # One that is told to stop before it listens is ended by the signal.
        fine = (0, None, STOPPED, -signal.SIGTERM if received else 0)
        failed = [n for n, code in enumerate(codes) if code not in fine]
        if not failed:
            print(errors[0].read(), end="", file=sys.stderr)
            return 128 + (received or signal.SIGTERM) if any(codes) else 0
        # Those that abort or raise most likely do so for want of the one that was killed.
        culprit = min(failed, key=lambda n: codes[n] >= 0 or codes[n] == -signal.SIGABRT)
        print(_reason(culprit, codes[culprit], errors[culprit].read(), arguments), file=sys.stderr)
        return max(codes[culprit], 1)


def free_port() -> int:
    """A port of the loopback device that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _environment(count: int) -> dict[str, str]:
    """What all children share, beside what this process was given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    defaults = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(max(1, cores // count))}
    return defaults | os.environ | {COORDINATOR: f"127.0.0.1:{free_port()}"}


@contextlib.contextmanager
def _started(
    count: int, arguments: Sequence[str], errors: Sequence[IO[str]]
) -> Iterator[list[subprocess.Popen]]:
    """The children, in a process group of their own that no Ctrl-C reaches; none outlives this."""
    command = [sys.executable, "-m", "launch.main", *arguments]
    environment = _environment(count)
    children: list[subprocess.Popen] = []
    try:
        for index, error in enumerate(errors):
            child = subprocess.Popen(
                command,
                env={**environment, PROCESS_ID: str(index)},
                stdin=subprocess.DEVNULL,
                stdout=None if index == 0 else subprocess.DEVNULL,
                stderr=error,
                process_group=children[0].pid if children else 0,
                preexec_fn=_end_with_parent,
            )
            children.append(child)
        yield children
    finally:
        for child in children:
            child.kill()  # does nothing to those that have ended
        for child in children:
            child.wait()


def _end_with_parent() -> None:
    with contextlib.suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(children: Sequence[subprocess.Popen]) -> tuple[list[int | None], int]:
    """Waits until all have ended, or one has failed.

    Returns:
      The status of each, as in `subprocess` and None if it runs; the number of the signal that
      this process received, or 0.
    """
    received = 0

    def forward(number: int, _) -> None:
        nonlocal received
        received = number
        restore()  # the next one acts as it does without us
        children[0].terminate()

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    before = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        while running := [child for child in children if child.returncode is None]:
            os.waitid(os.P_PGID, children[0].pid, os.WEXITED | os.WNOWAIT)
            for child in running:
                child.poll()
            if any(child.returncode not in (0, STOPPED, None) for child in children):
                break
    finally:
        restore()
    return [child.returncode for child in children], received


def _reason(index: int, code: int, errors: str, arguments: Sequence[str]) -> str:
    """What the process that failed had to say; the last line tells a user why."""
    if code > 0:
        return errors.rstrip() or f"error: process {index} ended with status {code}"
    command = shlex.join(["python", "-m", "launch.main", *arguments])
    name = signal.Signals(-code).name
    return (
        f"{errors}error: process {index} was ended by {name}, so all are stopped; to resume: "
        f"{command}"
    )
