"""An engine that keeps up with what a trainer publishes.

    subscriber = subscribe(store, cfg)
    subscriber.poll()                                    # if the chain has begun
    params = serving.restore(subscriber.current.tensors, models.spec(cfg))
    with (
        Engine(params, cfg, config, version=subscriber.current.version) as engine,
        Follower(engine, subscriber) as follower,
    ):
        ...                                              # `follower.wake` may be told of versions

The engine's policy versions are the chain's: they grow even if a trainer goes back to an older
step. Beside its decoding a version is read, decoded, checked and placed on the device; all that
the engine does itself is the swap, between two dispatches. The next version is not begun before
that, so that the device holds two at most.
"""

import contextlib
import threading
import time
from typing import Self

from c2 import models
from c2.models import ModelConfig
from c2.rollout.engine import Engine, EngineError
from c2.weights import serving
from c2.weights.store import Store
from c2.weights.subscriber import Snapshot, Subscriber


def subscribe(store: Store, cfg: ModelConfig, *, workers: int = 1) -> Subscriber:
    """A reader of all that is published of such a model.

    Args:
      store: of the chain.
      cfg: model configuration, the trainer's and the engine's.
      workers: threads that read and decode.
    """
    experts = serving.experts_for(cfg.moe.precision) if cfg.moe else "native"
    return Subscriber(store, serving.wanted(models.spec(cfg), cfg.dtype, experts), workers=workers)


class Follower:
    """A thread that stages new versions in an engine."""

    def __init__(self, engine: Engine, subscriber: Subscriber, *, seconds: float = 1.0) -> None:
        """Starts.

        Args:
          engine: of the model that the chain is of.
          subscriber: from `subscribe`; no other thread polls it from now on.
          seconds: between two looks into the store.
        """
        self._engine, self._subscriber, self._seconds = engine, subscriber, seconds
        self._specs = models.spec(engine.cfg)
        self._stop, self._wake = threading.Event(), threading.Event()
        self._newest: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="follow-weights", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Looks for a new version now: for whoever hears that there is one."""
        self._wake.set()

    def close(self) -> None:
        """Ends, after the version that is being staged; the engine goes on with what it has."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Whether it goes on, and what the newest version in the engine took.

        ``read`` bytes; seconds: ``read_s`` and ``decode_s`` as in `c2.weights.blob.Cost`,
        ``place_s`` until it was on the device, ``swap_s`` until the engine had changed to it. For
        how long that held sequences up is the engine's ``pause_s``.
        """
        return {"following": self._thread.is_alive(), **self._newest}

    def _run(self) -> None:
        with contextlib.suppress(EngineError):  # the engine has stopped: there is no one to follow
            self._subscriber.follow(
                self._deliver, stop=self._stop, wake=self._wake, seconds=self._seconds
            )

    def _deliver(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        params = serving.restore(snapshot.tensors, self._specs)
        swapped = self._engine.stage(params, snapshot.version)
        placed = time.perf_counter()
        swapped.result()
        self._newest = {
            "version": snapshot.version,
            "step": snapshot.step,
            **snapshot.cost._asdict(),
            "place_s": placed - began,
            "swap_s": time.perf_counter() - placed,
        }
