"""What goes on behind the calls of a pool."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from c2.sandbox.pool.engine import TICK_S, Engine, kind_of
from c2.sandbox.protocol import SandboxError, SandboxLost, Spec

HELPERS = 4  # threads that start ready sandboxes, close expired ones and replace dead nodes
REFILLERS = 2  # of them may start ready sandboxes


class Stock(NamedTuple):
    """A kind of sandboxes of which some are kept ready.

    Attributes:
      kind: what they are made of.
      count: how many.
      command: what is prepared in them; () for nothing.
    """

    kind: Spec
    count: int
    command: tuple[str, ...]


class Keeper:
    """A thread that watches an engine, and some that do what it finds to be done."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready: list[Stock] = []
        self._filling: list[Spec] = []  # kinds of those on their way to be ready
        self._tasks: set[str] = set()  # that helpers are at
        self._helpers = ThreadPoolExecutor(HELPERS, "c2-pool")
        self._thread = threading.Thread(target=self._keep, name="c2-pool-keeper", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Waits for all threads, once the engine is not open any more."""
        if self._thread.is_alive():
            self._thread.join()
        self._helpers.shutdown(cancel_futures=True)

    def keep_ready(self, spec: Spec, count: int, command: Sequence[str]) -> None:
        """As `Pool.keep_ready`."""
        new = Stock(kind_of(spec), count, tuple(command))
        with self._engine.turn:
            self._ready = [*(stock for stock in self._ready if stock.kind != new.kind), new]
            self._engine.turn.notify_all()

    def _keep(self) -> None:
        engine = self._engine
        with engine.turn:
            while engine.open:
                engine.turn.wait(min(TICK_S, max(0.0, engine.core.next_due() - engine.now())))
                engine.changed()
                for lease, reason in engine.core.due(engine.now()):
                    if engine.core.close(engine.now(), lease, reason):
                        place = engine.places[lease.sandbox]
                        self._help(lease.sandbox, engine.finish, lease, place)
                for member in engine.members.values():
                    if member.dead:
                        self._help(member.name, engine.replace, member)
                if len(engine.members) < engine.config.nodes:
                    self._help("add", engine.add_member)
                if engine.layers.unused:
                    self._help("free", engine.layers.free)
                if self._short() is not None:
                    for number in range(REFILLERS):
                        self._help(f"refill {number}", self._refill)

    def _help(self, name: str, task: Callable[..., None], *args: object) -> None:
        """Lets a helper do it, unless one is at the task of this name already."""

        def run() -> None:
            try:
                task(*args)
            except SandboxError as error:
                if self._engine.open:
                    logging.warning("pool: %s: %s", name, error)
            finally:
                with self._engine.turn:
                    self._tasks.discard(name)

        if name not in self._tasks:
            self._tasks.add(name)
            self._helpers.submit(run)

    def _short(self) -> Stock | None:
        """A kind of which too few are ready or on their way."""
        for stock in self._ready if self._engine.open else ():
            on_hand = len(self._engine.stock(stock.kind)) + self._filling.count(stock.kind)
            if on_hand < stock.count:
                return stock
        return None

    def _refill(self) -> None:
        while True:
            with self._engine.turn:
                if (stock := self._short()) is None:
                    return
                kind = stock.kind
                lease = self._engine.ask(kind)
                self._filling.append(kind)
            try:
                self._engine.start(lease, kind, stock.command)
            except SandboxLost:
                raise  # it was ended while it started, which need not happen again
            except SandboxError:
                if lease.reason == "failed":  # it will not get better; owners' creates say why
                    self.keep_ready(kind, 0, ())
                raise
            finally:
                with self._engine.turn:
                    self._filling.remove(kind)
