"""The node's end of a gate: starts it, hands it the sockets of sandboxes, sees it die."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from c2.config import from_dict
from c2.sandbox.egress import namespace, trust
from c2.sandbox.egress.policy import Policy
from c2.sandbox.protocol import SandboxError

GATE = ("-m", "c2.sandbox.egress.gate")
USER = 61001  # of the gate, on a machine where the node is root
START_S = 30.0
SEND_S = 5.0
END_S = 5.0
MAX_PACKET = 1 << 16


class Keeper:
    """A gate.

    Attributes:
      news: descriptor that becomes readable when `hear` is to be called.
      files: what sandboxes need to get through it.
      lost: why it is not there any more, or None. All calls fail then, and no sandbox of the node
        reaches anything.
    """

    def __init__(self, config: Mapping[str, object], node: str, place: Path, root: bool) -> None:
        """Starts it; raises SandboxError if that fails.

        Args:
          config: a `GateConfig` as plain data.
          node: name for the log.
          place: folder that it may make one in.
          root: whether this process is root on the machine, so that the gate can be someone else.
        """
        self.lost: str | None = None
        self._ports: dict[str, set[int]] = {}
        self._waiting: list[int] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *GATE, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        given = {
            "config": config, "node": node, "folder": str(place / f"gate-{self._process.pid}"),
            "user": USER if root else None,
        }  # fmt: skip
        self._socket.settimeout(START_S)
        try:
            self._socket.send(json.dumps(given).encode())
            hello = json.loads(self._socket.recv(MAX_PACKET) or b"{}")
        except (OSError, ValueError) as error:
            hello = {"error": str(error)}
        self._socket.settimeout(SEND_S)
        self.news = self._socket.fileno()
        if "certificate" not in hello:
            self.end()
            raise SandboxError(f"the gate cannot start: {hello.get('error', 'it ended')}")
        self.files = trust.files(hello["certificate"])

    def open(self, name: str, process: int, policy: dict, labels: dict) -> None:
        """Lets a sandbox, the first process of which is `process`, reach what a policy allows."""
        ports = from_dict(Policy, policy, where="policy").ports()
        sockets = namespace.open_sockets(process, ports)
        self._ports[name] = set(ports)
        self._send(sockets, do="open", sandbox=name, policy=policy, labels=labels)

    def change(self, name: str, process: int, policy: dict, number: int) -> None:
        """Changes a policy; `hear` will give the number once it is in force."""
        if name not in self._ports:
            raise SandboxError("its egress gate has ended; it has no network any more")
        ports = from_dict(Policy, policy, where="policy").ports()
        new = [port for port in ports if port not in self._ports[name]]
        sockets = namespace.open_listeners(process, new)
        self._ports[name] = set(ports)
        self._send(sockets, do="policy", sandbox=name, policy=policy, number=number)
        self._waiting.append(number)

    def close(self, name: str) -> None:
        """A sandbox has ended."""
        if self._ports.pop(name, None) is not None and self.lost is None:
            with contextlib.suppress(SandboxError):  # `hear` will tell
                self._send([], do="close", sandbox=name)

    def hear(self) -> list[int]:
        """Numbers of the changes that are in force; if it is lost, of those that never will be."""
        try:
            packet = self._socket.recv(MAX_PACKET)
        except OSError:
            packet = b""
        answer = json.loads(packet or b"{}")
        if "done" in answer:
            self._waiting.remove(answer["done"])
            return [answer["done"]]
        self.end()
        why = answer.get("error") or _status(self._process.returncode)
        self.lost = f"the egress gate has ended ({why})"
        done, self._waiting = self._waiting, []
        return done

    def end(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def _send(self, sockets: list[socket.socket], **request: object) -> None:
        try:
            if self.lost is not None:
                raise SandboxError(f"{self.lost}; no sandbox of this node has network any more")
            socket.send_fds(
                self._socket, [json.dumps(request).encode()], [sock.fileno() for sock in sockets]
            )
        except OSError as error:
            self._process.kill()  # it does not listen; `hear` will find it dead
            raise SandboxError(f"the egress gate takes no sandbox: {error}") from error
        finally:
            for sock in sockets:
                sock.close()


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
