"""The training loop: phases one after another under one global step, resumable at any moment.

A checkpoint holds the state, the position of the phase's data iterator and the number of tokens so
far, and a step depends on nothing else: a run that is killed and started again computes bit for
bit what an uninterrupted one does, from the same documents in the same order.
"""

import contextlib
import dataclasses
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from c2.config import ConfigError, runtime
from c2.training.checkpoint import Checkpoints, ForeignCheckpointError
from c2.training.metrics import MetricsLog
from c2.training.progress import TrainingProgress

Batch = Mapping[str, np.ndarray]
StepFn = Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]]
Evaluate = Callable[[Any], Mapping[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How often a run reports, evaluates and saves; none of it changes what it computes."""

    log_every: int = runtime(10)  # steps between two lines of metrics
    eval_every: int | None = runtime(None)  # steps; also before the first and after each phase
    checkpoint_every: int = runtime(100)  # steps; also after each phase
    keep: int = runtime(3)  # newest checkpoints that stay
    keep_every: int | None = runtime(None)  # checkpoints at multiples of this step stay for ever

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ConfigError(f"{field.name}: {value}; must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of training with its own step function and data.

    Attributes:
        name: Shown to the user and written to the metrics.
        steps: How many steps it lasts.
        step_fn: ``(state, batch) -> (state, metrics)``, jitted; may donate ``state``. The metrics
            hold at least the scalars ``loss`` and ``tokens`` (how many this step trained on).
        make_batches: Makes a fresh Grain iterator over the batches of the phase.
        evaluate: Takes the place of the run's ``evaluate`` during the phase.
    """

    name: str
    steps: int
    step_fn: StepFn
    make_batches: Callable[[], Iterator[Batch]]
    evaluate: Evaluate | None = None

    def __post_init__(self):
        if self.steps < 1:
            raise ConfigError(f"phase {self.name}: {self.steps} steps; must be at least 1")


class Interrupted(SystemExit):
    """The run was asked to stop and has saved its state; the same command resumes it.

    Left alone it ends the process with the status that shells use for the signal: 143 after
    SIGTERM, 130 after Ctrl-C.
    """

    def __init__(self, received: signal.Signals, step: int):
        super().__init__(128 + received)
        self.step = step


def train(
    phases: Sequence[Phase],
    state: Any,
    *,
    checkpoints: Checkpoints,
    log: MetricsLog,
    progress: TrainingProgress,
    config: LoopConfig,
    evaluate: Evaluate | None = None,
) -> Any:
    """Trains through all phases, from the newest sound checkpoint if there is one.

    Args:
        phases: In order; they share one step count.
        state: Initial ``TrainState``, donated to the first step. When there is a checkpoint, only
            its shapes, dtypes and shardings matter.
        checkpoints: Where state and data position are saved.
        log: Gets a line of metrics at every reported step.
        progress: Shows the run to a person.
        config: How often to do what.
        evaluate: ``state -> {name: value}``; the values join the metrics of their step.

    Returns:
        The state after the last step.

    Raises:
        RuntimeError: The loss or the parameters are no longer finite, or the data ended early.
        Interrupted: SIGTERM or Ctrl-C arrived, at any process; the step was finished and saved.
        CheckpointError: A checkpoint could not be written or read.
        ForeignCheckpointError: The newest checkpoint belongs to another run.
    """
    spans = _spans(phases)
    total = spans[-1].last
    saved = checkpoints.latest()
    if saved is None:
        step, batches, tokens = 0, None, 0
    else:
        step = saved
        state, batches, tokens = _restore(spans, step, state, checkpoints)
        progress.note(f"resuming after step {step:,} of {total:,} from {checkpoints.folder(step)}")
    log.rewind(-1 if saved is None else saved)  # after all that may refuse to resume
    reporter = _Reporter(log, progress, tokens)

    with progress, _Signals() as signals, _naming_last_good(checkpoints):
        progress.begin(total)
        for span in spans:
            if span.last <= step:
                continue
            phase = span.phase
            score = phase.evaluate or evaluate
            progress.phase(phase.name, span.first, span.last)
            if step == 0 and score is not None:
                progress.busy(step, "evaluating")
                log.write(step, {"phase": phase.name, **score(state)})
            progress.busy(step, "compiling")
            compiling = True
            if batches is None:
                batches = phase.make_batches()

            while step < span.last:
                step += 1
                state, metrics = phase.step_fn(state, _next(batches, phase, step))
                reporter.flush()  # an earlier line, now that the device has this step to do
                stopping = signals.stop_after(step)
                evaluating = score is not None and _due(step, config.eval_every, span)
                saving = stopping is not None or _due(step, config.checkpoint_every, span)
                reporting = evaluating or saving or _due(step, config.log_every, span)
                if evaluating:
                    progress.busy(step, "evaluating")
                    with reporter.clock_stopped(metrics):
                        metrics = {**metrics, **score(state)}
                reporter.add(step, phase.name, metrics, reporting)
                if compiling:
                    reporter.start_clock()
                    compiling = False
                if saving:
                    reporter.flush()  # first: a resumed run does not write this line again
                    _require_finite(state.params, step)
                    position = {"phase": phase.name, "total_tokens": reporter.total_tokens}
                    checkpoints.save(step, state, batches, position)
                progress.advance(step)
                if stopping is not None and step < total:
                    checkpoints.wait()
                    progress.note(
                        f"{stopping.name}: stopped after step {step:,} of {total:,}; the "
                        f"same command resumes from {checkpoints.folder(step)}"
                    )
                    raise Interrupted(stopping, step)

            batches.close()
            batches = None
        checkpoints.wait()
    return state


@dataclasses.dataclass(frozen=True)
class _Span:
    """A phase in the global count: it does the steps ``first + 1 ... last``."""

    phase: Phase
    first: int
    last: int


def _spans(phases: Sequence[Phase]) -> list[_Span]:
    if not phases:
        raise ConfigError("phases: none given; at least one is needed")
    ends = list(itertools.accumulate(phase.steps for phase in phases))
    return [_Span(*span) for span in zip(phases, [0, *ends], ends, strict=False)]


def _restore(
    spans: Sequence[_Span], step: int, state: Any, checkpoints: Checkpoints
) -> tuple[Any, Iterator[Batch] | None, int]:
    """State, the iterator of a phase that is not over yet, and the number of tokens so far."""
    saved = checkpoints.metadata(step)
    span = next((span for span in spans if span.first < step <= span.last), None)
    if span is None or span.phase.name != saved["phase"]:
        schedule = ", ".join(f"{span.phase.name} to step {span.last}" for span in spans)
        raise ForeignCheckpointError(
            f"{checkpoints.folder(step)}: belongs to another run: step {step} in phase "
            f"{saved['phase']} is not in this schedule ({schedule})"
        )
    batches = span.phase.make_batches() if step < span.last else None
    return checkpoints.restore(step, state, batches), batches, saved["total_tokens"]


def _next(batches: Iterator[Batch], phase: Phase, step: int) -> Batch:
    try:
        return next(batches)
    except StopIteration:
        raise RuntimeError(f"phase {phase.name}: the data ended before step {step}") from None


def _due(step: int, every: int | None, span: _Span) -> bool:
    return step == span.last or (every is not None and step % every == 0)


class _Reporter:
    """Carries metrics from the device to the log and the display, without hurrying the device."""

    def __init__(self, log: MetricsLog, progress: TrainingProgress, total_tokens: int):
        self.total_tokens = total_tokens
        self._log = log
        self._progress = progress
        self._unread: list[tuple[int, jax.Array, jax.Array]] = []  # (step, loss, tokens)
        self._line: tuple[int, str, dict[str, Any]] | None = None
        self._clock = 0.0  # when the two counts below began
        self._steps = self._tokens = 0

    def add(self, step: int, phase: str, metrics: dict[str, Any], reporting: bool) -> None:
        """Takes the metrics of a step; does not wait for them."""
        self._unread.append((step, metrics["loss"], metrics["tokens"]))
        if reporting:
            self._line = (step, phase, metrics)

    def flush(self) -> None:
        """Waits for the line that is due, if one is, and writes it.

        Raises:
            FloatingPointError: A loss is not finite.
        """
        if self._line is None:
            return
        (step, phase, metrics), self._line = self._line, None
        self._read()
        seconds = time.perf_counter() - self._clock
        speed = self._tokens / seconds if self._steps else math.nan
        self._progress.report(
            loss=float(metrics["loss"]),
            tokens_per_second=speed,
            seconds_per_step=seconds / self._steps if self._steps else math.nan,
        )
        line = {"phase": phase, **jax.device_get(metrics), "total_tokens": self.total_tokens}
        self._log.write(step, line | ({"tokens_per_second": speed} if self._steps else {}))
        self._restart()

    def start_clock(self) -> None:
        """Waits for the steps so far; speed is counted from here on."""
        self._read()
        self._restart()

    @contextlib.contextmanager
    def clock_stopped(self, metrics: dict[str, jax.Array]) -> Iterator[None]:
        """Does not count what happens inside as training; first waits for ``metrics``."""
        jax.block_until_ready(metrics)
        stopped = time.perf_counter()
        yield
        self._clock += time.perf_counter() - stopped

    def _restart(self) -> None:
        self._clock = time.perf_counter()
        self._steps = self._tokens = 0

    def _read(self) -> None:
        unread, self._unread = jax.device_get(self._unread), []
        for step, loss, tokens in unread:
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {step}")
            self.total_tokens += int(tokens)
            self._tokens += int(tokens)
            self._steps += 1


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _require_finite(params: Any, step: int) -> None:
    # A finite loss with infinite gradients ruins the parameters one step before it shows.
    if not _all_finite(params):
        raise FloatingPointError(f"the parameters are not finite after step {step}")


@contextlib.contextmanager
def _naming_last_good(checkpoints: Checkpoints) -> Iterator[None]:
    try:
        yield
    except FloatingPointError as error:
        good = checkpoints.latest()
        hint = "no checkpoint was saved before"
        if good is not None:
            hint = f"the last good checkpoint is {checkpoints.folder(good)}"
        raise RuntimeError(f"{error}; {hint}") from None


class _Signals:
    """Notes the first SIGTERM or Ctrl-C; the next one acts as it does without us.

    Of several processes any may receive it and all must stop after the same step. Since its start
    jax has waited for SIGTERM, tells all of it and names a step that none has reached yet, without
    a collective in any step; so there a Ctrl-C becomes a SIGTERM.
    """

    def __init__(self):
        self._received: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        self._several = jax.process_count() > 1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            ours = (signal.SIGINT,) if self._several else (signal.SIGTERM, signal.SIGINT)
            for number in ours:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def stop_after(self, step: int) -> signal.Signals | None:
        """The signal that ends the run after ``step``, if one does; to be asked at every step."""
        if self._several:
            reached = multihost_utils.reached_preemption_sync_point(step)
            return (self._received or signal.SIGTERM) if reached else None
        return self._received

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        self.__exit__()
        if self._several:
            signal.raise_signal(signal.SIGTERM)
