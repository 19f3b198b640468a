"""Services as objects of this process: for notebooks, tests and simulations."""

import asyncio
from collections.abc import Callable
from typing import Any

from c2.rl.calls import LostError


class InProcess:
    """A `c2.rl.calls.Launcher` of objects in this process.

    Attributes:
      services: those that live, by name.
    """

    def __init__(self) -> None:
        self.services: dict[str, Any] = {}
        self._calls: dict[str, set[asyncio.Future]] = {}
        self._deaths: dict[str, asyncio.Event] = {}

    async def start(self, name: str, make: Callable[[], Any]) -> "InProcessHandle":
        """As `c2.rl.calls.Launcher.start`."""
        await self.stop(name)
        await asyncio.sleep(0)
        self._deaths[name] = asyncio.Event()
        self.services[name] = make()
        return InProcessHandle(self, name)

    async def died(self, name: str) -> str:
        """As `c2.rl.calls.Launcher.died`."""
        await self._deaths[name].wait()
        return f"{name}: killed"

    async def stop(self, name: str) -> None:
        """As `c2.rl.calls.Launcher.stop`."""
        service = self.services.get(name)
        self.kill(name)
        if close := getattr(service, "close", None):
            await close()

    async def close(self) -> None:
        """As `c2.rl.calls.Launcher.close`."""
        for name in list(self.services):
            await self.stop(name)

    def kill(self, name: str) -> None:
        """Lets a service die, with all calls to it."""
        if self.services.pop(name, None) is not None:
            for call in list(self._calls.get(name, ())):
                call.cancel()
            self._deaths[name].set()


class InProcessHandle:
    """A `c2.rl.calls.Handle` of such an object."""

    def __init__(self, launcher: InProcess, name: str) -> None:
        self._launcher, self._name = launcher, name

    async def call(self, method: str, *args: Any) -> Any:
        """As `c2.rl.calls.Handle.call`."""
        service = self._launcher.services.get(self._name)
        if service is None:
            raise LostError(self._name)
        call = asyncio.ensure_future(getattr(service, method)(*args))
        calls = self._launcher._calls.setdefault(self._name, set())
        calls.add(call)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():  # the service died, not the caller
                raise LostError(f"{self._name}: it died during a call") from None
            call.cancel()
            raise
        finally:
            calls.discard(call)
