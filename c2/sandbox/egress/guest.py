"""One sandbox as the gate sees it: what it may do, and what it is doing."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable

from c2.config import to_dict
from c2.sandbox.egress import names, packets, tls
from c2.sandbox.egress.exchange import Exchange, Shared
from c2.sandbox.egress.log import SandboxLog
from c2.sandbox.egress.peer import Streams
from c2.sandbox.egress.policy import NAMES_PORT, Denied, Policy, at_host

HANDSHAKE_S = 10.0
NAME_S = 10.0
BATCH = 32  # packets or connections taken before other sandboxes get their turn
PAUSE_S = 0.05


class Guest:
    """A sandbox.

    Attributes:
      policy: in force for it.
      log: its lines.
    """

    def __init__(
        self,
        shared: Shared,
        authority: tls.Authority,
        log: SandboxLog,
        policy: Policy,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Takes what is needed.

        Args:
          shared: what all sandboxes have in common.
          authority: makes certificates.
          log: takes its lines.
          policy: the first one.
          failed: is told what happened to a connection that nobody has foreseen.
        """
        self.policy, self.log = policy, log
        self._shared, self._authority, self._failed = shared, authority, failed
        self._loop = asyncio.get_running_loop()
        self._services: list[socket.socket] = []
        self._listeners: dict[int, socket.socket] = {}
        self._tasks: dict[asyncio.Task, Exchange | None] = {}

    def begin(self, sockets: list[socket.socket]) -> None:
        """Serves what `namespace.open_sockets` has opened."""
        datagrams, streams, stray, *listeners = sockets
        self._services = [datagrams, streams, stray]
        self._watch(datagrams, self._take_queries)
        self._watch(streams, lambda sock: self._accept(sock, self._answer_queries))
        self._watch(stray, self._take_stray)
        self._listen(listeners)

    def change(self, policy: Policy, listeners: list[socket.socket]) -> None:
        """Puts a policy into force; what goes on against it is cut off before this returns."""
        self.policy = policy
        self.log.tell("policy", policy=to_dict(policy))
        for port in self._listeners.keys() - policy.ports().keys():
            self._drop(self._listeners.pop(port))
        self._listen(listeners)
        for task, exchange in list(self._tasks.items()):
            if exchange is None or not exchange.is_legal():
                self._cut(task, exchange, "the policy has changed")

    def close(self) -> None:
        """Cuts everything off."""
        for sock in (*self._services, *self._listeners.values()):
            self._drop(sock)
        for task, exchange in list(self._tasks.items()):
            self._cut(task, exchange, "the sandbox has ended")
        self.log.flush()
        self.log.tell("close")

    def _listen(self, listeners: Iterable[socket.socket]) -> None:
        for sock in listeners:
            self._listeners[sock.getsockname()[1]] = sock
            self._watch(sock, lambda sock: self._accept(sock, self._serve))

    def _watch(self, sock: socket.socket, take: Callable[[socket.socket], bool]) -> None:
        """Calls `take` whenever something is there; after True, only when others had their turn."""

        def ready() -> None:
            if take(sock):
                self._loop.remove_reader(sock)
                self._loop.call_later(PAUSE_S, again)

        def again() -> None:
            if sock.fileno() >= 0:
                self._loop.add_reader(sock, ready)

        sock.setblocking(False)
        again()

    def _drop(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        sock.close()

    def _cut(self, task: asyncio.Task, exchange: Exchange | None, why: str) -> None:
        if exchange is not None:
            self.log.deny("connection", why, port=exchange.port, host=exchange.host)
            exchange.abort()
        task.cancel()

    def _take_queries(self, sock: socket.socket) -> bool:
        return names.serve_datagrams(sock, self.policy, self.log, BATCH)

    def _take_stray(self, sock: socket.socket) -> bool:
        self.log.skip(packets.missed(sock))
        for _ in range(BATCH):
            try:
                packet = packets.parse(sock.recv(packets.SNAP))
            except BlockingIOError:
                return False
            # A listener has seen, and told of, what came to its port.
            served = packet and packet.port in (NAMES_PORT, *self._listeners)
            if packet and not (served and packet.protocol == "tcp" and ":" not in packet.address):
                self.log.deny("packet", "nothing can be reached there", **vars(packet))
        return True

    def _accept(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket, int], Awaitable[None]],
    ) -> bool:
        for _ in range(BATCH):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return False
            except OSError:  # of this connection, which has gone away
                continue
            port = sock.getsockname()[1]
            if len(self._tasks) >= self._shared.config.connections:
                self.log.deny("connection", "too many are open", port=port)
                sock.close()
                continue
            task = self._loop.create_task(serve(sock, port))
            self._tasks[task] = None
            task.add_done_callback(self._done)
        return True

    def _done(self, task: asyncio.Task) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()):
            self._failed(error)

    async def _serve(self, sock: socket.socket, port: int) -> None:
        """A connection, as what speaks HTTP in the end."""
        about = {"address": sock.getsockname()[0], "port": port}
        context, told = None, False

        def choose(name: str | None) -> tls.Named | None:
            nonlocal told
            told = True
            return self._certificate(name, about)

        if self.policy.ports().get(port) == "https":
            context = tls.entrance(choose)
        try:
            streams = await _streams(sock, context)
        except OSError as error:
            if not told or not isinstance(error, ssl.SSLError) or error.reason != REFUSED:
                why = getattr(error, "reason", None) or type(error).__name__
                self.log.deny("tls", f"no encryption: {why}", decision="fail", **about)
            return
        try:
            host = streams[1].get_extra_info("ssl_object").context.host if context else None
            exchange = Exchange(self._shared, self, streams, port, host)
            self._tasks[asyncio.current_task()] = exchange
            await exchange.run()
        finally:
            streams[1].close()

    def _certificate(self, name: str | None, about: dict) -> tls.Named | None:
        if name is None:
            self.log.deny("tls", "the client names no host", **about)
            return None
        try:
            at_host(self.policy, about["port"], name)
        except Denied as denied:
            self.log.deny("tls", denied.reason, host=name, **about)
            return None
        return self._authority.context(name)

    async def _answer_queries(self, sock: socket.socket, _: int) -> None:
        reader, writer = await _streams(sock, None)
        try:
            async with asyncio.timeout(NAME_S):
                while size := await reader.read(2):
                    size += await reader.readexactly(2 - len(size))
                    query = await reader.readexactly(int.from_bytes(size))
                    reply = names.answer(query, self.policy, self.log)
                    if reply is None:
                        break
                    writer.write(len(reply).to_bytes(2) + reply)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # nothing that has been asked is left without an answer
        finally:
            writer.close()


REFUSED = "CALLBACK_FAILED"  # by `_certificate`, which has told why


async def _streams(sock: socket.socket, context: ssl.SSLContext | None) -> Streams:
    """Streams over an accepted connection; raises OSError if there are none."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    try:
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, sock, ssl=context,
            ssl_handshake_timeout=HANDSHAKE_S if context else None,
        )  # fmt: skip
    except BaseException:
        sock.close()
        raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
