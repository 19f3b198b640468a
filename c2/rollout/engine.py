"""The engine that others talk to: a thread that owns a scheduler, and an asynchronous front.

    with Engine(params, cfg, EngineConfig(slots=8, capacity=512)) as engine:
        async for token in engine.stream(Request(prompt=ids, max_tokens=64)):
            ...                                      # leaving the loop cancels the request
        completion = await engine.complete(request)  # a `c2.records.Completion`
        engine.stage(new_params, version=1).result() # in flight: nothing stops

All methods may be called from any thread; the asynchronous ones from any event loop.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future

import jax

from c2.config import ConfigError
from c2.models import ModelConfig, Params
from c2.records import Completion
from c2.rollout.config import EngineConfig, Request, check
from c2.rollout.device import Device
from c2.rollout.scheduler import Scheduler
from c2.rollout.sequence import Sequence, Token

Action = Callable[[], None]
Event = list[Token] | Completion | Exception  # the last one is a completion or an exception


class EngineError(RuntimeError):
    """The engine does not run, or stopped before the request had ended."""


class Ticket:
    """A submitted request; what `Engine.cancel` takes."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.emit = emit
        self.sequence: Sequence | None = None  # of the engine's thread alone


class Engine:
    """Samples from a model; see the module."""

    def __init__(
        self,
        params: Params,
        cfg: ModelConfig,
        engine: EngineConfig,
        *,
        version: int = 0,
        device: jax.Device | None = None,
    ) -> None:
        """Compiles and starts.

        Args:
          params: parameters of the model.
          cfg: model configuration.
          engine: engine configuration.
          version: policy version of the parameters.
          device: where to run; several engines make use of several devices.

        Raises:
          ConfigError: if model and engine do not fit.
        """
        self.cfg, self.config = cfg, engine
        self._device = Device(params, cfg, engine, device)
        self._scheduler = Scheduler(self._device, engine, cfg.vocab, version)
        # what to do in the thread, and whom to tell if it will not be done
        self._inbox: queue.SimpleQueue[tuple[Action, Callable[[Exception], None]]]
        self._inbox = queue.SimpleQueue()
        self._open: set[Ticket] = set()
        self._lock = threading.Lock()  # between the last look into the inbox and refusing more
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops; requests that have not ended get an `EngineError`."""
        with contextlib.suppress(EngineError):  # it has stopped by itself
            self._post(self._stop, _nobody)
        self._thread.join()

    @property
    def error(self) -> Exception | None:
        """Why it does not run, if it does not."""
        return self._error

    def metrics(self) -> dict[str, float]:
        """See `c2.rollout.scheduler.Scheduler.metrics`."""
        return self._scheduler.metrics()

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Ticket:
        """Queues a request; ``emit`` is called in the engine's thread and must not block.

        Raises:
          ConfigError: if the engine cannot do it.
          EngineError: if it does not run.
        """
        check(request, self.config, self.cfg.vocab)
        ticket = Ticket(emit)

        def begin():
            self._open.add(ticket)
            ticket.sequence = self._scheduler.submit(
                request, lambda event: self._emit(ticket, event)
            )

        self._post(begin, emit)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request without a completion and frees its slot, unless it has ended."""

        def end():
            self._open.discard(ticket)
            self._scheduler.cancel(ticket.sequence)

        with contextlib.suppress(EngineError):  # then it has ended
            self._post(end, _nobody)

    async def stream(self, request: Request) -> AsyncGenerator[Token, None]:
        """The tokens of one completion as they come; closing the iterator cancels the request.

        Raises:
          ConfigError: if the engine cannot do it.
          EngineError: if the engine stops first.
        """
        async with contextlib.aclosing(self._events(request)) as events:
            async for event in events:
                if isinstance(event, list):
                    for token in event:
                        yield token

    async def complete(self, request: Request) -> Completion:
        """The whole completion; cancelling the task cancels the request. Raises as `stream`."""
        async with contextlib.aclosing(self._events(request)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    return event
        raise EngineError("a request ended without a completion")

    def stage(self, params: Params, version: int) -> Future:
        """Prepares new weights in this thread; the engine changes to them between two dispatches.

        Sequences go on as `EngineConfig.after_update` says. The future's result is the version.

        Raises:
          ConfigError: if the parameters are not the model's. If the version is not above the
            engine's, the future does.
          EngineError: if the engine does not run.
        """
        placed = self._device.place(params)
        future: Future = Future()

        def change():
            try:
                self._scheduler.update(placed, version)
            except ConfigError as error:
                future.set_exception(error)
            else:
                future.set_result(version)

        self._post(change, future.set_exception)
        return future

    async def _events(self, request: Request) -> AsyncGenerator[list[Token] | Completion, None]:
        loop, events = asyncio.get_running_loop(), asyncio.Queue()

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = self.submit(request, emit)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Completion):
                    return
        finally:
            self.cancel(ticket)

    def _post(self, action: Action, refuse: Callable[[Exception], None]) -> None:
        with self._lock:
            if self._error is not None:
                raise EngineError("the engine does not run") from self._error
            self._inbox.put((action, refuse))

    def _emit(self, ticket: Ticket, event: list[Token] | Completion) -> None:
        if isinstance(event, Completion):
            self._open.discard(ticket)
        ticket.emit(event)

    def _stop(self) -> None:
        raise EngineError("the engine was closed")

    def _run(self) -> None:
        try:
            while True:
                while self._scheduler.idle or not self._inbox.empty():
                    self._inbox.get()[0]()
                self._scheduler.round()
        except Exception as error:  # whoever waits is told, whatever it is
            with self._lock:
                self._error = error
            for ticket in self._open:
                ticket.emit(error)
            while not self._inbox.empty():
                self._inbox.get()[1](error)


def _nobody(_: Exception) -> None:
    """Nobody waits for it."""
