"""One connection of a sandbox: requests are read, judged and written anew, and so are the answers.

Nothing of what a sandbox sends is passed on as it came: what h11 has understood of it is what a
server gets, on a connection of its own for each request. So no server can find a second request
in what was judged as one, and no answer can be taken for that of another request.
"""

import contextlib
import itertools
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import h11

from c2.sandbox.egress import headers, origin
from c2.sandbox.egress.config import GateConfig
from c2.sandbox.egress.judge import Call, check_size, judge
from c2.sandbox.egress.log import SandboxLog
from c2.sandbox.egress.peer import Peer, Streams
from c2.sandbox.egress.policy import Denied, Failed, Policy, at_host, decide

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Shared:
    """What all connections of a gate have in common: settings, secrets, trust in servers."""

    config: GateConfig
    secrets: dict[str, str]
    outward: ssl.SSLContext


class Owner(Protocol):
    """The sandbox of a connection: its log, and its policy, which may change at any time."""

    policy: Policy
    log: SandboxLog


class Exchange:
    """A connection that stands, and is encrypted if it should be.

    Attributes:
      port: which was connected to.
      host: the name given for encryption; None without.
      call: what is being answered, and the rule that allows it; None between requests.
    """

    def __init__(
        self, shared: Shared, owner: Owner, streams: Streams, port: int, host: str | None
    ) -> None:
        self.port, self.host = port, host
        self.call: Call | None = None
        self._shared, self._owner = shared, owner
        self._client = Peer(h11.SERVER, streams, shared.config.idle_s)

    def is_legal(self) -> bool:
        """Whether the policy, as it is now, allows what is going on."""
        scheme = "http" if self.host is None else "https"
        if self._owner.policy.ports().get(self.port) != scheme:
            return False
        try:
            if self.call is not None:
                return decide(self._owner.policy, self.call.request).covers(self.call.rule)
            if self.host is not None:
                at_host(self._owner.policy, self.port, self.host)
        except Denied:
            return False
        return True

    def abort(self) -> None:
        """Cuts it off; whoever runs it must be cancelled too."""
        self._client.abort()

    async def run(self) -> None:
        """Answers requests until one of the sides has had enough."""
        try:
            while await self._one():
                self.call = None
        except OSError:
            pass  # the sandbox has gone away; whatever was sent on is in the log
        finally:
            self._client.close()

    async def _one(self) -> bool:
        """Handles a request; whether another one may follow."""
        about: dict[str, Any] = {"request": next(_numbers), "port": self.port}
        method, begun = b"", False
        try:
            head = await self._client.event()
            if not isinstance(head, h11.Request):
                return False
            method = head.method
            call = self.call = judge(
                head, self.port, self.host, self._owner.policy, self._shared.secrets, about
            )
            addresses = await origin.resolve(
                call.request.host, call.rule, self._shared.config.addresses
            )
            about["address"] = addresses[0]
            origin.check(addresses, call.rule)
            streams = await origin.connect(
                call.request.host, addresses, call.rule, self._shared.outward
            )
            server = Peer(h11.CLIENT, streams, self._shared.config.idle_s)
            about["address"] = streams[1].get_extra_info("peername")[0]
            self._owner.log.allow("request", **about)
            begun = True
            try:
                await self._relay(call, server, about["request"])
            finally:
                server.abort()
        except Denied as denied:
            if not begun:
                self._owner.log.deny("request", denied.reason, decision=denied.decision, **about)
            await self._refuse(denied, method)
            return False
        except h11.RemoteProtocolError as error:
            self._owner.log.deny("request", f"it is not proper HTTP/1.1: {error}", **about)
            await self._refuse(Denied("the request is not proper HTTP/1.1", 400), method)
            return False
        return self._client.next()

    async def _relay(self, call: Call, server: Peer, number: int) -> None:
        """Sends a request on and the answer back; every end of it gets a line in the log.

        Raises:
          Denied: if it did not come to its end.
        """
        count, began = _Count(), time.monotonic()
        # Until it is known better: by a new policy, or the end of the sandbox.
        outcome = {"decision": "deny", "reason": "it was cut off"}
        try:
            with _as_denied(server):
                await server.send(call.head)
                await self._upload(call, server, count)
                await self._download(call, server, count)
            outcome = {}
        except Denied as denied:
            outcome = {"decision": denied.decision, "reason": denied.reason}
            raise
        finally:
            self._owner.log.tell(
                "response", request=number, status=count.status, uploaded=count.up,
                downloaded=count.down, seconds=round(time.monotonic() - began, 3), **outcome,
            )  # fmt: skip

    async def _upload(self, call: Call, server: Peer, count: "_Count") -> None:
        await self._client.go_on()
        while isinstance(event := await self._client.event(), h11.Data):
            count.up += len(event.data)
            check_size("request", count.up, call.rule.max_upload, 413)
            await server.send(h11.Data(data=event.data))
        if not isinstance(event, h11.EndOfMessage):
            raise Denied("the request has no end", 400)
        await server.send(h11.EndOfMessage())

    async def _download(self, call: Call, server: Peer, count: "_Count") -> None:
        while isinstance(event := await server.event(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise Failed("the server does not answer")
        length = headers.values(event.headers, b"content-length")
        if length and call.request.method != "HEAD":
            check_size("answer", int(length[0]), call.rule.max_download, 502)
        if call.hidden and headers.values(event.headers, b"content-encoding"):
            raise Denied("the answer is encoded, and might contain a secret of the gate", 502)
        kept = headers.response(event.headers)
        guard = _Guard(call.hidden)
        guard.check(b"\n".join([event.reason, *(part for pair in kept for part in pair)]))
        if length and event.status_code != 204:
            kept.append((b"content-length", length[0]))
        count.status = event.status_code
        await self._client.send(
            h11.Response(status_code=event.status_code, reason=event.reason, headers=kept)
        )
        guard = _Guard(call.hidden)
        while isinstance(event := await server.event(), h11.Data):
            count.down += len(event.data)
            check_size("answer", count.down, call.rule.max_download, 502)
            guard.check(event.data)
            await self._client.send(h11.Data(data=event.data))
        await self._client.send(h11.EndOfMessage())

    async def _refuse(self, denied: Denied, method: bytes) -> None:
        """Tells the sandbox why, if no answer has begun; what has begun is cut off."""
        if not await self._client.answer(denied.status, f"egress gate: {denied}\n", method):
            self.abort()


@dataclass
class _Count:
    """What has happened so far."""

    status: int | None = None
    up: int = 0
    down: int = 0


class _Guard:
    """Looks for secrets in what a server sends back, also across the pieces that it comes in."""

    def __init__(self, hidden: tuple[bytes, ...]) -> None:
        self._hidden, self._seen = hidden, b""
        self._keep = max((len(secret) - 1 for secret in hidden), default=0)

    def check(self, data: bytes) -> None:
        """Raises `Denied` if a secret ends here."""
        if not self._hidden:
            return
        seen = self._seen + data
        if any(secret in seen for secret in self._hidden):
            raise Denied("the answer contains a secret of the gate", 502)
        self._seen = seen[-self._keep :] if self._keep else b""


@contextlib.contextmanager
def _as_denied(server: Peer) -> Iterator[None]:
    """Errors of two connections, as reasons to give up."""
    try:
        yield
    except h11.RemoteProtocolError as error:
        if server.failed:
            raise Failed("the server's answer is not proper HTTP/1.1") from error
        raise Denied(f"the body is not proper HTTP/1.1: {error}", 400) from error
    except OSError as error:
        raise Failed("the connection to the server or the sandbox broke off") from error
