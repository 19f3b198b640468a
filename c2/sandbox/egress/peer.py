"""HTTP/1.1 on a stream: bytes from asyncio, events of h11."""

import asyncio
import contextlib
import http

import h11

MAX_HEAD = 1 << 15  # bytes of what comes before a body
CHUNK = 1 << 16
LINGER_S = 1.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PLAIN = (b"content-type", b"text/plain; charset=utf-8")


class Peer:
    """One end of a connection.

    Attributes:
      failed: whether it has sent what is not HTTP.
    """

    def __init__(self, role: type[h11.CLIENT] | type[h11.SERVER], streams: Streams, idle_s: float):
        self.failed = False
        self._state = h11.Connection(role, max_incomplete_event_size=MAX_HEAD)
        self._reader, self._writer = streams
        self._idle_s = idle_s

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        """What comes next.

        Raises:
          h11.RemoteProtocolError: if it is not HTTP.
          OSError: if nothing comes.
        """
        while True:
            try:
                event = self._state.next_event()
            except h11.RemoteProtocolError:
                self.failed = True
                raise
            if event is not h11.NEED_DATA:
                return event
            async with asyncio.timeout(self._idle_s):
                self._state.receive_data(await self._reader.read(CHUNK))

    async def send(self, event: h11.Event) -> None:
        """Sends something; raises OSError."""
        self._writer.write(self._state.send(event))
        async with asyncio.timeout(self._idle_s):
            await self._writer.drain()

    async def go_on(self) -> None:
        """Tells a client that waits for it to send its body."""
        if self._state.they_are_waiting_for_100_continue:
            await self.send(h11.InformationalResponse(status_code=100, headers=[]))

    async def answer(self, status: int, text: str, method: bytes) -> bool:
        """Answers by itself, if anyone wants to know; False if an answer has begun."""
        if self._state.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        body = text.encode()
        fields = [PLAIN, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        with contextlib.suppress(OSError, h11.RemoteProtocolError):
            reason = http.HTTPStatus(status).phrase.encode()
            await self.send(h11.Response(status_code=status, reason=reason, headers=fields))
            if method != b"HEAD":
                await self.send(h11.Data(data=body))
            await self.send(h11.EndOfMessage())
            # Closing with data unread would take the answer away from it.
            async with asyncio.timeout(LINGER_S):
                while self._state.their_state is h11.SEND_BODY:
                    await self.event()
        return True

    def next(self) -> bool:
        """Gets ready for another request, if that is possible."""
        if (self._state.our_state, self._state.their_state) != (h11.DONE, h11.DONE):
            return False
        self._state.start_next_cycle()
        return True

    def close(self) -> None:
        """Closes it once all is sent."""
        self._writer.close()

    def abort(self) -> None:
        """Closes it at once."""
        self._writer.transport.abort()
