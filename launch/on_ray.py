"""Services as actors of a Ray cluster: the launcher for many machines.

Ray places actors by the resources that a service asks for, carries calls and their data through its
object store, which spills to disk, and ends all actors when this program ends.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, TaskCancelledError

from c2.rl.calls import LostError, use_threads

CALLS = 4096  # that one actor works on at the same time


class _Actor:
    """The service inside an actor."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._service, self._threaded = make(), False

    async def call(self, method: str, args: tuple) -> Any:
        if not self._threaded:
            use_threads()
            self._threaded = True
        return await getattr(self._service, method)(*args)


class RayHandle:
    """A `c2.rl.calls.Handle` of the actor that has a name at the moment."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name, self._namespace = name, namespace
        self._actor: Any = None

    def __getstate__(self) -> tuple[str, str]:
        return self._name, self._namespace

    def __setstate__(self, state: tuple[str, str]) -> None:
        self.__init__(*state)

    async def call(self, method: str, *args: Any) -> Any:
        """As `c2.rl.calls.Handle.call`."""
        if self._actor is None:
            try:  # asks the cluster, which takes its time
                self._actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
            except (ValueError, RayError) as error:
                raise LostError(f"{self._name}: {error}") from None
        answer = self._actor.call.remote(method, args)
        try:
            return await answer
        except (RayActorError, ObjectLostError) as error:  # a long answer is lost with its node
            self._actor = None
            raise LostError(f"{self._name}: {_first_line(error)}") from None
        except TaskCancelledError:
            raise LostError(f"{self._name}: the call was cancelled") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise


class RayLauncher:
    """A `c2.rl.calls.Launcher` of actors; `ray.init` has been called.

    Args:
      namespace: tells the services of one run from those of others in the cluster.
      resources: by service, what `ray.remote` takes as options, for example
        ``{"training": {"num_gpus": 8}}``. A service ``NAME-3`` has those of ``NAME``.
    """

    def __init__(
        self, namespace: str, resources: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._namespace, self._resources = namespace, resources or {}
        self._actors: dict[str, Any] = {}

    async def start(self, name: str, make: Callable[[], Any]) -> RayHandle:
        """As `c2.rl.calls.Launcher.start`."""
        await self.stop(name)
        options = {"num_cpus": 0} | dict(self._resources.get(name.partition("-")[0], {}))
        actor = ray.remote(_Actor).options(
            name=name, namespace=self._namespace, max_concurrency=CALLS, **options
        )
        self._actors[name] = started = actor.remote(make)
        try:
            await started.call.remote("ping", ())
        except RayActorError as error:
            raise LostError(f"{name}: {_first_line(error)}") from None
        return RayHandle(name, self._namespace)

    async def died(self, name: str) -> str:
        """As `c2.rl.calls.Launcher.died`."""
        actor = self._actors[name]
        while True:
            try:
                await actor.__ray_ready__.remote()
            except RayActorError as error:
                return f"{name}: {_first_line(error)}"
            await asyncio.sleep(1)

    async def stop(self, name: str) -> None:
        """As `c2.rl.calls.Launcher.stop`."""
        actor = self._actors.pop(name, None)
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    async def close(self) -> None:
        """As `c2.rl.calls.Launcher.close`."""
        for name in list(self._actors):
            await self.stop(name)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
