"""Talks to the tool server inside a sandbox and believes nothing that it says.

Code inside may have taken over the server. So every frame is bounded and checked, every wait ends,
and what is wrong ends the connection: `SandboxLost` for all who wait.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from c2.sandbox.protocol import Chunk, SandboxLost, ToolError
from c2.sandbox.toolserver.frames import Decoder, FrameError, encode, unpack

CHUNK = 1 << 16
PATIENCE_S = 15.0  # beyond what a call itself may take

T = TypeVar("T")


class Client:
    """A connection that many threads may use at once.

    There is no thread behind it: of those that wait for an answer, one reads for all.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = Decoder()
        self._turn = threading.Condition()
        self._sending = threading.RLock()
        self._reading = False
        self._inboxes: dict[int, _Inbox] = {}
        self._last = 0
        self._lost: str | None = None

    def call(
        self, method: str, parse: Callable[[dict[str, Any]], T], *, wait_s: float = 0.0, **params
    ) -> T:
        """Sends a request and returns its result.

        Args:
          method: its name.
          parse: makes of the result what is wanted; a KeyError, TypeError or ValueError that it
            raises says that the server sent nonsense.
          wait_s: how long the call itself may take.
          **params: its parameters.

        Raises:
          ToolError: if the server refuses it.
          SandboxLost: if there is no answer, or none that makes sense.
        """
        (result,) = self._exchange(method, parse, wait_s, 0, params)
        return result

    def stream(
        self, parse: Callable[[dict[str, Any]], T], *, wait_s: float, cap: int, **params: Any
    ) -> Iterator[Chunk | T]:
        """Runs a command; yields up to `cap` bytes of each output as they come, the result last."""
        params |= {"cap": cap, "stream": True}
        return self._exchange("exec", parse, wait_s, 2 * cap, params)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile nothing is on its way in either direction, and the server only waits."""
        with self._sending:
            self.call("hold", dict)
            try:
                yield
            finally:
                self.call("resume", dict, restored=False)

    def close(self) -> None:
        """Ends the connection."""
        self._fail("the connection was closed")

    def _exchange(
        self, method: str, parse: Callable, wait_s: float, budget: int, params: dict[str, Any]
    ) -> Iterator[Any]:
        end = time.monotonic() + wait_s + PATIENCE_S
        with self._turn:
            self._last += 1
            number = self._last
            inbox = self._inboxes[number] = _Inbox(budget)
        try:
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            try:
                frame = encode(message)
            except FrameError as error:
                raise ToolError(f"{method}: {error}") from error
            self._send(frame, end)
            while isinstance(answer := self._next(inbox, end), Chunk):
                yield answer
            if "result" not in answer:
                raise ToolError(self._parsed(_error_line, answer))
            yield self._parsed(parse, answer["result"])
        finally:
            with self._turn:
                del self._inboxes[number]

    def _parsed(self, parse: Callable[[Any], T], value: Any) -> T:
        try:
            return parse(value)
        except (KeyError, TypeError, ValueError) as error:
            raise self._fail(f"the tool server sent nonsense: {error}") from error

    def _send(self, frame: bytes, end: float) -> None:
        with self._sending:
            try:
                while frame:
                    self._wait(select.POLLOUT, end)
                    frame = frame[self._socket.send(frame) :]
            except (OSError, ValueError) as error:  # ValueError: closed meanwhile
                raise self._fail(f"the tool server takes no request: {error}") from error

    def _next(self, inbox: "_Inbox", end: float) -> Chunk | dict[str, Any]:
        """What comes next for one caller; reads for all others until it does."""
        while True:
            with self._turn:
                while self._reading and not inbox and self._lost is None:
                    if not self._turn.wait(end - time.monotonic()):
                        break
                if inbox.chunks:
                    stream, data = inbox.chunks.popleft()
                    return Chunk(stream, bytes(data))
                if inbox.answer is not None:
                    return inbox.answer
                if self._lost is not None:
                    raise SandboxLost(self._lost, "exited")
                if time.monotonic() >= end:
                    raise self._fail("the tool server does not answer")
                self._reading = True
            try:
                self._read(end)
            finally:
                with self._turn:
                    self._reading = False
                    if self._lost is not None:
                        self._socket.close()
                    self._turn.notify_all()

    def _read(self, end: float) -> None:
        try:
            self._wait(select.POLLIN, end)
            data = self._socket.recv(CHUNK)
            if not data:
                self._fail("the tool server has ended")
            with self._turn:
                for message in self._decoder.feed(data):
                    self._deliver(message)
        except BlockingIOError:
            pass
        except TimeoutError:
            self._fail("the tool server does not answer")
        except FrameError as error:
            self._fail(f"the tool server sent nonsense: {error}")
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            self._fail(f"the connection to the tool server broke: {error}")

    def _deliver(self, message: dict[str, Any]) -> None:
        output = "method" in message
        params = message.get("params") if output else message
        if not isinstance(params, dict):
            raise FrameError("output without parameters")
        number = params.get("id")
        # What nobody waits for any more, or ever did, is dropped.
        inbox = self._inboxes.get(number) if isinstance(number, int) else None
        if inbox is not None and inbox.answer is None:
            if output:
                inbox.add(params)
            else:
                inbox.answer = message

    def _wait(self, event: int, end: float) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError("timed out")

    def _fail(self, why: str) -> SandboxLost:
        with self._turn:
            self._lost = self._lost or why
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            if not self._reading:
                self._socket.close()
            self._turn.notify_all()
        return SandboxLost(self._lost, "exited")


class _Inbox:
    """What has come for one caller: output, tiny pieces merged, and the answer."""

    def __init__(self, budget: int) -> None:
        self.chunks: deque[tuple[str, bytearray]] = deque()
        self.answer: dict[str, Any] | None = None
        self._budget = budget

    def __bool__(self) -> bool:
        return bool(self.chunks) or self.answer is not None

    def add(self, params: dict[str, Any]) -> None:
        stream, data = params.get("stream"), unpack(params.get("data"))
        self._budget -= len(data)
        if stream not in ("stdout", "stderr") or self._budget < 0:
            raise FrameError("output that was not asked for")
        if self.chunks and self.chunks[-1][0] == stream:
            self.chunks[-1][1].extend(data)
        elif data:
            self.chunks.append((stream, bytearray(data)))


def _error_line(message: dict[str, Any]) -> str:
    text = message["error"]["message"]
    if not isinstance(text, str):
        raise TypeError("an error without a message")
    return " ".join(text[:500].split())
