"""Services as processes of this machine: the launcher that needs nothing but Python.

Each service is a process with a socket in a folder that only this user can enter. Calls are
pickles with their length in front; a connection carries any number of calls at the same time. A
process whose launcher dies, however it dies, ends itself.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from c2.rl.calls import LostError, use_threads

START_S = 300.0  # until a service answers; the first compilation of a model takes its time
_LENGTH = struct.Struct(">Q")


class LocalHandle:
    """A `c2.rl.calls.Handle` of a process; for one event loop at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._peer: _Peer | None = None

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self.__init__(path)

    async def call(self, method: str, *args: Any) -> Any:
        """As `c2.rl.calls.Handle.call`."""
        if self._peer is None or self._peer.closed:
            try:
                streams = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                raise LostError(f"{Path(self._path).name}: {error.strerror}") from None
            if self._peer is None or self._peer.closed:  # else another call was faster
                self._peer = _Peer(Path(self._path).name, *streams)
            else:
                streams[1].close()
        return await self._peer.call(method, *args)


class _Peer:
    """The calling end of a connection."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.closed = False
        self._name, self._writer = name, writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future] = {}
        self._listener = asyncio.create_task(self._listen(reader))

    async def call(self, method: str, *args: Any) -> Any:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        message = pickle.dumps((number, method, args))
        self._waiting[number] = answer
        try:
            _write(self._writer, message)
            return await answer
        except asyncio.CancelledError:
            if not self.closed:
                _write(self._writer, pickle.dumps((number, None, ())))
            raise
        finally:
            self._waiting.pop(number, None)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (message := await _read(reader)) is not None:
            number, good, value = pickle.loads(message)
            answer = self._waiting.get(number)
            if answer is not None and not answer.done():
                answer.set_result(value) if good else answer.set_exception(value)
        self.closed = True
        self._writer.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(LostError(f"{self._name}: it died during a call"))


class LocalLauncher:
    """A `c2.rl.calls.Launcher` of processes.

    Args:
      environment: variables of the processes beside this one's.
      logs: folder for what they print, a file per service; none: this process's standard error.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        self._environment, self._logs = environment or {}, logs
        self._folder = Path(tempfile.mkdtemp(prefix="c2-"))
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, make: Callable[[], Any]) -> LocalHandle:
        """As `c2.rl.calls.Launcher.start`."""
        await self.stop(name)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / name
        with contextlib.ExitStack() as stack:
            output = None
            if self._logs:
                self._logs.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(open(self._logs / f"{name}.log", "ab"))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "launch.local", str(path),
                stdin=asyncio.subprocess.PIPE, stdout=output or 2, stderr=output,
                env={**os.environ, **self._environment},
            )  # fmt: skip
        self._processes[name] = process
        _write(process.stdin, pickle.dumps(make))  # the pipe stays open: its end is our end
        handle = LocalHandle(str(path))
        try:
            async with asyncio.timeout(START_S):
                while not path.exists():
                    if process.returncode is not None:
                        said = self._last_line(name)
                        raise LostError(f"{name}: it ended with status {process.returncode}{said}")
                    await asyncio.sleep(0.01)
        except TimeoutError:
            await self.stop(name)
            raise LostError(f"{name}: it has not come up in {START_S:.0f} s") from None
        return handle

    def _last_line(self, name: str) -> str:
        """The end of what a service has printed: most often the error that ended it."""
        if self._logs is None:
            return ""
        path = self._logs / f"{name}.log"
        lines = path.read_text(errors="replace").strip().splitlines() or ["nothing"]
        return f"; it printed: {lines[-1]} (all of it: {path})"

    async def died(self, name: str) -> str:
        """As `c2.rl.calls.Launcher.died`."""
        process = self._processes[name]
        status = await process.wait()
        return f"{name}: " + (f"killed by signal {-status}" if status < 0 else f"status {status}")

    def pid(self, name: str) -> int:
        """Process id of a service."""
        return self._processes[name].pid

    async def stop(self, name: str) -> None:
        """As `c2.rl.calls.Launcher.stop`; kills it if that takes long."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.stdin.close()
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        (self._folder / name).unlink(missing_ok=True)

    async def close(self) -> None:
        """As `c2.rl.calls.Launcher.close`."""
        for name in list(self._processes):
            await self.stop(name)
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(path: str) -> None:
    """Is a service until the launcher goes; its maker comes on standard input."""
    (length,) = _LENGTH.unpack(sys.stdin.buffer.read(_LENGTH.size))
    service = pickle.loads(sys.stdin.buffer.read(length))()
    asyncio.run(_serve(service, path))


async def _serve(service: Any, path: str) -> None:
    use_threads()
    gone, loop = asyncio.Event(), asyncio.get_running_loop()

    def watch() -> None:
        sys.stdin.buffer.read(1)  # nothing comes but the end
        loop.call_soon_threadsafe(gone.set)
        threading.Event().wait(5)
        os._exit(1)  # something does not let go

    threading.Thread(target=watch, daemon=True).start()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # at the end, or asyncio tells of it
            await _answer(service, reader, writer)

    # bound under another name first: whoever sees the path can connect
    server = await asyncio.start_unix_server(accept, f"{path}.new")
    os.rename(f"{path}.new", path)
    await gone.wait()
    server.close()
    if close := getattr(service, "close", None):
        await close()
    with contextlib.suppress(OSError):  # a launcher that was killed has not cleared up
        os.unlink(path)
        os.rmdir(os.path.dirname(path))  # by whoever is the last


async def _answer(service: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the calls of one connection."""
    tasks: dict[int, asyncio.Task] = {}

    async def run(number: int, method: str, args: tuple) -> None:
        try:
            answer = (number, True, await getattr(service, method)(*args))
        except Exception as error:  # the caller is told, whatever it is
            answer = (number, False, error)
        _write(writer, _dumps(answer))

    while (message := await _read(reader)) is not None:
        number, method, args = pickle.loads(message)
        if method is None:
            if number in tasks:
                tasks[number].cancel()
            continue
        task = tasks[number] = asyncio.create_task(run(number, method, args))
        task.add_done_callback(lambda _, number=number: tasks.pop(number))
    for task in list(tasks.values()):  # nobody waits for them any more
        task.cancel()
    writer.close()


def _dumps(answer: tuple) -> bytes:
    number, good, value = answer
    try:
        data = pickle.dumps(answer)
        if not good:
            pickle.loads(data)  # some exceptions can be written and not read
        return data
    except Exception as error:
        text = f"{type(value).__name__}: {value} (cannot be sent: {error})"
        return pickle.dumps((number, False, RuntimeError(text)))


def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(_LENGTH.pack(len(message)) + message)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


if __name__ == "__main__":
    serve(sys.argv[1])
