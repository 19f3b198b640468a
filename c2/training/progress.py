"""What a person sees while a run trains: a live bar in a terminal, plain lines elsewhere."""

import datetime
import math
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class TrainingProgress:
    """Shows phase, step, loss, tokens/s and the time left.

    Args:
        console: Standard error by default. A terminal gets a live bar; a file, a pipe or a
            notebook gets one plain line now and then.
        every: Seconds between two plain lines.
    """

    def __init__(self, console: Console | None = None, *, every: float = 5.0):
        self.console = console or Console(stderr=True)
        self._every = every
        self._printed = -math.inf  # when the last plain line was
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._phase = ""
        self._first = self._last = 0
        self._loss = self._tokens_per_second = self._seconds_per_step = math.nan

    def begin(self, total: int) -> None:
        """Starts the display of a run of ``total`` steps."""
        self._total = total
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(BarColumn(20), text, console=self.console, refresh_per_second=4)
            self._task = self._bar.add_task("")
            self._bar.start()

    def phase(self, name: str, first: int, last: int) -> None:
        """Enters the phase that takes the run from step ``first`` to step ``last``."""
        self._phase, self._first, self._last = name, first, last
        self._loss = self._tokens_per_second = self._seconds_per_step = math.nan

    def busy(self, step: int, doing: str) -> None:
        """Says at once what takes long after ``step``: compiling, evaluating."""
        self._show(step, f"{self._head(step)} | {doing}", now=True)

    def advance(self, step: int) -> None:
        """Counts a step; cheap enough to be called at every one."""
        self._show(step, f"{self._head(step)} | {self._numbers(step)}", now=step == self._last)

    def report(self, *, loss: float, tokens_per_second: float, seconds_per_step: float) -> None:
        """Sets the numbers that :meth:`advance` shows; NaN where there is none yet."""
        self._loss = loss
        self._tokens_per_second = tokens_per_second
        self._seconds_per_step = seconds_per_step

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the display; what it showed last stays."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, step: int, text: str, *, now: bool) -> None:
        if self._bar is not None:
            done, steps = step - self._first, self._last - self._first
            self._bar.update(self._task, description=text, completed=done, total=steps)
        elif now or time.monotonic() >= self._printed + self._every:
            self._printed = time.monotonic()
            self.note(text)

    def _head(self, step: int) -> str:
        return f"{self._phase} | step {step:,}/{self._total:,}"

    def _numbers(self, step: int) -> str:
        phase = _duration((self._last - step) * self._seconds_per_step)
        run = _duration((self._total - step) * self._seconds_per_step)  # later phases may differ
        return (
            f"loss {_or_dash(self._loss, '.4f')} | "
            f"{_or_dash(self._tokens_per_second, ',.0f')} tokens/s | "
            f"left: phase {phase}, run {run}"
        )


def _or_dash(value: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(value, spec)


def _duration(seconds: float) -> str:
    return "-" if math.isnan(seconds) else str(datetime.timedelta(seconds=round(seconds)))
