"""What one benchmark compares; the protocol between `launch.bench` and its `bench_*` modules."""

import time
from collections.abc import Callable
from typing import NamedTuple

Step = Callable[[], float]  # does the work once, returns its seconds
Prepare = Callable[[], Step]  # builds one side and runs it at least once

SLOW_SECONDS = 10.0  # a side whose first run takes longer is not warmed up a second time


class Case(NamedTuple):
    """The same work done by this code and by the peer.

    A benchmark is a module with a docstring whose first line says what is measured, ``PEER``,
    ``UNIT`` and ``cases(dtypes) -> dict[str, Case]``, which raises ImportError, without importing
    the peer, if it is missing. ``SAME_WORK`` says whether its cases do the same work in different
    ways, so that the fastest of either side can be compared; memory is compared then too.
    """

    ours: Prepare
    peer: Prepare
    amount: float  # of UNIT, done by one step


def timed(step: Callable[[], object]) -> Step:
    """Warms ``step`` up and returns it with a stopwatch."""

    def run() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    if run() < SLOW_SECONDS:
        run()
    return run
