"""How services call each other, whatever carries the call.

A service is a plain object with asynchronous methods. Who holds a `Handle` to it calls them from
another process or another machine; a `Launcher` has put it there and puts it there again when it
has died. `launch.local` does so with processes, `launch.on_ray` with actors.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

THREADS = 64  # in which services of a process wait for tools, disks and devices


class LostError(Exception):
    """The service has died, or cannot be reached; what was asked of it may or may not be done."""


def use_threads() -> None:
    """Gives the running event loop enough threads for its services; a launcher's first act."""
    executor = ThreadPoolExecutor(THREADS, thread_name_prefix="service")
    asyncio.get_running_loop().set_default_executor(executor)


class Handle(Protocol):
    """A service somewhere. Can be pickled, and so be given to other services."""

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a method; cancelling this cancels the call over there.

        Raises:
          LostError: if the service is not there, or dies before it has answered.
          Exception: what the method has raised.
        """


class Launcher(Protocol):
    """Starts services and sees them die."""

    async def start(self, name: str, make: Callable[[], Any]) -> Handle:
        """Makes a service somewhere by calling ``make``, which can be pickled, and waits for it.

        The same name again replaces it, dead or alive; handles to it lead to the new one.

        Raises:
          LostError: if it does not come up.
        """

    async def died(self, name: str) -> str:
        """Waits until the service under this name dies by itself; returns what is known of it."""

    async def stop(self, name: str) -> None:
        """Lets a service end itself."""

    async def close(self) -> None:
        """Ends all services."""
