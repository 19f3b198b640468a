"""Bytes between the standard streams of a command in a pod and a socket here."""

import contextlib
import socket
import threading
from collections.abc import Callable

from kubernetes.stream.ws_client import STDERR_CHANNEL, STDIN_CHANNEL, STDOUT_CHANNEL
from websocket import ABNF, WebSocket, WebSocketException, WebSocketTimeoutException

CHUNK = 1 << 15
PING_S = 20.0  # of silence, after which something is sent so that nothing between closes it
WORDS = 500


class Tunnel:
    """Carries bytes until one side closes.

    Args:
      connection: to a command, as `Cluster.execute` returns it.

    Attributes:
      socket: the end for the client of the tool server.
    """

    def __init__(self, connection: WebSocket) -> None:
        self.socket, self._ours = socket.socketpair()
        self._connection = connection
        self._connection.settimeout(PING_S)
        self._words = b""
        threading.Thread(target=self._carry, name="c2-sandbox-tunnel", daemon=True).start()

    def words(self) -> str:
        """What the command wrote to its standard error last, on one line."""
        return " ".join(self._words.decode("utf-8", "replace").split())

    def _receive(self) -> None:
        while True:
            try:
                kind, message = self._connection.recv_data()
            except WebSocketTimeoutException:
                self._connection.ping()
                continue
            if kind == ABNF.OPCODE_CLOSE:
                return
            if message[:1] == bytes([STDOUT_CHANNEL]):
                self._ours.sendall(message[1:])
            elif message[:1] == bytes([STDERR_CHANNEL]):
                self._words = (self._words + message[1:])[-WORDS:]

    def _send(self) -> None:
        while data := self._ours.recv(CHUNK):
            self._connection.send_binary(bytes([STDIN_CHANNEL]) + data)

    def _carry(self) -> None:
        other = threading.Thread(target=self._until_end, args=(self._send,), daemon=True)
        other.start()
        self._until_end(self._receive)
        other.join()
        self._ours.close()
        self._connection.shutdown()

    def _until_end(self, direction: Callable[[], None]) -> None:
        """Carries in one direction, whose end is that of the other."""
        with contextlib.suppress(OSError, WebSocketException):
            direction()
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._connection.abort()
