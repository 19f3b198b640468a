"""The process of the gate: everything that sandboxes of a node send to the outside ends here.

It takes its settings and the sockets of sandboxes from the node, over a socket of packets, and ends
when that is closed. It becomes a user who has nothing else on the machine. When it dies its sockets
are closed, so that sandboxes reach nothing at all.
"""

import asyncio
import ctypes
import encodings.idna
import json
import os
import resource
import signal
import socket
import ssl
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dns.rdtypes.IN.A

from c2.config import from_dict, to_dict
from c2.sandbox.egress import tls
from c2.sandbox.egress.config import GateConfig
from c2.sandbox.egress.exchange import Shared
from c2.sandbox.egress.guest import Guest
from c2.sandbox.egress.log import Log, LogFailed, SandboxLog
from c2.sandbox.egress.policy import Policy

MAX_PACKET = 1 << 18
MAX_FDS = 128
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
LOOKUPS = 256  # at a time, of all sandboxes; one that asks for slow names must not hold up others
LOADED = (encodings.idna, dns.rdtypes.IN.A)  # what is imported later on


def main() -> None:
    """Serves the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the node decides
    given = json.loads(control.recv(MAX_PACKET))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        gate = Gate(control, given)
        _give_up_rights(given["user"])
        control.send(json.dumps({"certificate": gate.certificate}).encode())
        asyncio.run(gate.serve())
    except (OSError, ValueError, LogFailed) as error:
        control.send(json.dumps({"error": str(error)}).encode())


class Gate:
    """The state of the process.

    Attributes:
      certificate: of its authority, as PEM.
    """

    def __init__(self, control: socket.socket, given: dict) -> None:
        """Opens all files that it needs; raises OSError, ValueError or LogFailed.

        Args:
          control: to the node.
          given: "config", a GateConfig; "node": its name; "folder": a place of its own, which it
            makes; "user": number of the user it is to become, or None.
        """
        config = from_dict(GateConfig, given["config"], where="egress")
        self._control = control
        self._log = Log(config.log, given["node"])
        folder = Path(given["folder"])
        folder.mkdir(mode=0o700)
        if given["user"] is not None:
            os.chown(folder, given["user"], given["user"])
        self._authority = tls.Authority(folder)
        self.certificate = self._authority.certificate
        secrets = {name: _secret(name, file) for name, file in config.secrets.items()}
        self._shared = Shared(config, secrets, tls.outward(config.authorities))
        self._guests: dict[str, Guest] = {}
        self._end: asyncio.Future[None] | None = None
        self._log.write("gate", state="started")

    async def serve(self) -> None:
        """Does what the node says until it is gone; raises LogFailed."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unforeseen)
        loop.set_default_executor(ThreadPoolExecutor(LOOKUPS))
        self._end = loop.create_future()
        self._control.setblocking(False)
        loop.add_reader(self._control, self._receive)
        await self._end
        for guest in self._guests.values():
            guest.close()
        self._log.write("gate", state="ended")

    def _receive(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET, MAX_FDS)
        except ConnectionError:
            packet, fds = b"", []
        if not packet:
            self._stop(None)
            return
        request, sockets = json.loads(packet), [socket.socket(fileno=fd) for fd in fds]
        name = request["sandbox"]
        if request["do"] == "close":
            if guest := self._guests.pop(name, None):
                guest.close()
            return
        policy = from_dict(Policy, request["policy"], where="policy")
        if request["do"] == "open":
            log = SandboxLog(self._log, name)
            log.tell("open", labels=request["labels"], policy=to_dict(policy))
            guest = Guest(self._shared, self._authority, log, policy, self._failed)
            self._guests[name] = guest
            guest.begin(sockets)
        else:
            self._guests[name].change(policy, sockets)
            self._control.send(json.dumps({"done": request["number"]}).encode())

    def _unforeseen(self, _: asyncio.AbstractEventLoop, context: dict) -> None:
        error = context.get("exception")
        if not isinstance(error, ssl.SSLError | ConnectionError):  # of connections that close
            self._failed(error or RuntimeError(context["message"]))

    def _failed(self, error: BaseException) -> None:
        """What was not foreseen ended a connection, and may not go on. Without log nothing may."""
        if isinstance(error, LogFailed):
            self._stop(error)
            return
        traceback.print_exception(error)
        try:
            self._log.write("gate", state="error", error=f"{type(error).__name__}: {error}")
        except LogFailed as failure:
            self._stop(failure)

    def _stop(self, error: LogFailed | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)


def _secret(name: str, file: str) -> str:
    text = Path(file).read_text().strip()
    if not text or not text.isprintable() or not text.isascii():
        raise ValueError(f"egress.secrets.{name}: {file} must hold one line of ASCII")
    return text


def _give_up_rights(user: int | None) -> None:
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), *[ctypes.c_ulong(0)] * 3)
    # After the change of user, which undoes it. The node may be gone already.
    prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3)
    # The new user may not be able to read any code; it is the same for all, so that tests see it.
    sys.meta_path.clear()


if __name__ == "__main__":
    main()
