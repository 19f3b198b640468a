"""The default backend: bubblewrap, with every wall that an ordinary Linux can put up."""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import c2
from c2.config import ConfigError, to_dict
from c2.sandbox import battery
from c2.sandbox import root as roots
from c2.sandbox.client import Client
from c2.sandbox.egress import trust
from c2.sandbox.egress.config import GateConfig, check_packages
from c2.sandbox.egress.policy import Policy
from c2.sandbox.node import sweep
from c2.sandbox.protocol import (
    WORKDIR,
    Handle,
    Network,
    SandboxError,
    SandboxLost,
    Spec,
    Status,
    Unsupported,
    require,
)
from c2.sandbox.served import Served

START_S = 30.0
WAIT_S = 120.0
MAX_PACKET = 1 << 17
NODE = ("-m", "c2.sandbox.node")


class Bwrap(Served):
    """Sandboxes of one node process on this machine.

    The constructor starts the node and tries to break out of a sandbox in every way it knows; if
    one works, it raises and nothing is left running.

    Args:
      ended: is told, by a thread that must not be held up, which sandbox has ended without being
        closed, and the reason; None stands for the node and all that it had.
      egress: settings of the gate, through which sandboxes reach what their policy allows; None
        for no gate and no network. Needs the extra `egress`.
    """

    name = "bwrap"
    capabilities = frozenset({"jobs", "layers", "fork"})
    tested, terms = battery.SPEC, battery.TERMS

    def __init__(
        self,
        ended: Callable[[str | None, str], None] = lambda *_: None,
        *,
        egress: GateConfig | None = None,
    ) -> None:
        if egress is not None:
            check_packages()
        self._egress = egress
        self._node = _Node(self._program(), ended)
        self._sandboxes: dict[str, _Sandbox] = {}
        try:
            battery.check(self, self.tested, self.terms)
            if egress is not None:
                self._node.ask("egress", config=to_dict(egress))
                self.capabilities = self.capabilities | {"network_policy"}
                spec = dataclasses.replace(self.tested, network=Policy())
                battery.check(self, spec, dataclasses.replace(self.terms, walls=("network",)))
        except BaseException:
            self.shutdown()
            raise

    @property
    def pid(self) -> int:
        """Of the node process."""
        return self._node.pid

    def __enter__(self) -> "Bwrap":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def create(self, spec: Spec) -> Handle:
        """As `protocol.Backend.create`."""
        return self._make("create", spec)

    def _make(self, method: str, spec: Spec, **more: object) -> Handle:
        if isinstance(spec.network, Policy):
            policy = self._policy(spec.network)
            more["network"] = {"policy": to_dict(policy), "labels": spec.labels}
        answer, fds = self._node.ask(
            method, image=spec.image, layers=spec.layers, resources=vars(spec.resources),
            deadline_s=spec.deadline_s, ttl_s=spec.ttl_s, **more,
        )  # fmt: skip
        client = Client(socket.socket(fileno=fds[0]))
        self._sandboxes[answer["sandbox"]] = _Sandbox(spec, client)
        return Handle(self.name, answer["sandbox"])

    def fork(self, handle: Handle, count: int = 1) -> list[Handle]:
        """As `protocol.SupportsFork.fork`."""
        spec = self._sandbox(handle).spec
        layer = self.snapshot(handle)
        spec = dataclasses.replace(spec, layers=(*spec.layers, layer))
        made: list[Handle] = []
        try:
            for _ in range(count):
                made.append(self.create(spec))
        except BaseException:
            for other in made:
                self.close(other)
            raise
        finally:
            self.drop_layer(layer)  # goes with the last of them
        return made

    def snapshot(self, handle: Handle) -> str:
        """As `protocol.SupportsLayers.snapshot`; goes on top of the layers of the sandbox."""
        self._sandbox(handle)
        return self._node.ask("snapshot", sandbox=handle.id)[0]["layer"]

    def add_layer(self, source: str, *, at: str = WORKDIR) -> str:
        """As `protocol.SupportsLayers.add_layer`."""
        return self._node.ask("add_layer", source=os.path.abspath(source), at=at)[0]["layer"]

    def layer_folder(self, name: str) -> str:
        """Where a layer is, for processes of this machine that may look into those of this user."""
        folder = self._node.ask("layer_folder", layer=name)[0]["folder"]
        return f"/proc/{self._node.pid}/root{folder}"

    def drop_layer(self, name: str) -> None:
        """As `protocol.SupportsLayers.drop_layer`."""
        self._node.ask("drop_layer", layer=name)

    def status(self, handle: Handle) -> Status:
        """As `protocol.Backend.status`."""
        try:
            raw, _ = self._node.ask("status", sandbox=handle.id)
        except SandboxLost:
            return Status(False, "backend", 0.0, None)
        return Status(raw["reason"] is None, raw["reason"], raw.get("age", 0.0), raw.get("memory"))

    def renew(self, handle: Handle) -> None:
        """As `protocol.Backend.renew`."""
        self._sandbox(handle)
        self._node.ask("renew", sandbox=handle.id)

    def adopt(self, handle: Handle, spec: Spec) -> None:
        """Hands a sandbox over: variables, deadline and lease are those of `spec` from now on."""
        sandbox = self._sandbox(handle)
        sandbox.spec = dataclasses.replace(
            sandbox.spec, env=spec.env, deadline_s=spec.deadline_s, ttl_s=spec.ttl_s
        )
        self._node.ask("adopt", sandbox=handle.id, deadline_s=spec.deadline_s, ttl_s=spec.ttl_s)

    def set_network_policy(self, handle: Handle, policy: Network) -> None:
        """As `protocol.SupportsNetworkPolicy.set_network_policy`."""
        sandbox = self._sandbox(handle)
        wanted = self._policy(policy if isinstance(policy, Policy) else Policy())
        if sandbox.spec.network == "none":
            raise Unsupported(f"sandbox {handle.id} was made without network and cannot get one")
        self._node.ask("set_network_policy", sandbox=handle.id, policy=to_dict(wanted))
        sandbox.spec = dataclasses.replace(sandbox.spec, network=wanted)

    def close(self, handle: Handle) -> None:
        """As `protocol.Backend.close`."""
        if sandbox := self._sandboxes.pop(handle.id, None):
            try:
                self._node.ask("close", sandbox=handle.id)
            finally:
                sandbox.client.close()  # not before, or its server would wake up to end itself

    def shutdown(self) -> None:
        """As `protocol.Backend.shutdown`."""
        for sandbox in self._sandboxes.values():
            sandbox.client.close()
        self._sandboxes.clear()
        self._node.end()

    def _program(self) -> tuple[str, ...]:
        """What the interpreter runs as a node, and the name of its walls."""
        return (*NODE, self.name)

    def _policy(self, policy: Policy) -> Policy:
        require(self, "network_policy")
        if missing := policy.needs() - self._egress.secrets.keys():
            legal = ", ".join(sorted(self._egress.secrets)) or "none"
            raise ConfigError(f"network: the gate has no secret {min(missing)!r}; it has: {legal}")
        return policy

    def _sandbox(self, handle: Handle) -> "_Sandbox":
        if sandbox := self._sandboxes.get(handle.id):
            return sandbox
        raise SandboxLost(f"sandbox {handle.id} was closed", "closed")

    def _client(self, handle: Handle) -> Client:
        return self._sandbox(handle).client

    def _env(self, handle: Handle) -> dict[str, str]:
        spec = self._sandbox(handle).spec
        path = roots.search_path(image=spec.image is not None)
        found = {"HOME": roots.HOME, "PATH": path, "LANG": "C.UTF-8"}
        if isinstance(spec.network, Policy):
            found |= trust.VARIABLES
        return found | spec.env

    def _new_oom_kills(self, handle: Handle) -> int:
        raw, _ = self._node.ask("status", sandbox=handle.id)
        sandbox = self._sandbox(handle)
        seen, sandbox.oom_kills = sandbox.oom_kills, raw.get("oom_kills", sandbox.oom_kills)
        return sandbox.oom_kills - seen

    def _lost(self, handle: Handle, error: SandboxLost) -> SandboxLost:
        if error.reason != "exited" or handle.id not in self._sandboxes:
            return error
        try:
            # It may run on without its server. A reason that it has been ended for already stands.
            self._node.ask("close", sandbox=handle.id, reason=error.reason)
            raw, _ = self._node.ask("status", sandbox=handle.id)
        except SandboxLost as lost:
            return lost
        words = f"; its last words: {raw['words']}" if raw["words"] else ""
        text = f"sandbox {handle.id} ended ({raw['reason']}): {error}{words}"
        return SandboxLost(text, raw["reason"])


class _Sandbox:
    """What the owner knows about a sandbox."""

    def __init__(self, spec: Spec, client: Client) -> None:
        self.spec, self.client = spec, client
        self.oom_kills = 0


class _Node:
    """The owner's side of a node process."""

    def __init__(self, program: Sequence[str], ended: Callable[[str | None, str], None]) -> None:
        self._ended = ended
        # Packets, so that descriptors stay with their message.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(Path(c2.__file__).parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *program[:-1], str(theirs.fileno()), program[-1]],
                pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._waiting: dict[int, Future] | None = {}
        self._last = 0
        self._reader = threading.Thread(target=self._read, name="c2-sandbox-node", daemon=True)
        self._socket.settimeout(START_S)
        try:
            hello = json.loads(self._socket.recv(MAX_PACKET) or b"{}")
        except (OSError, ValueError) as error:
            hello = {"error": str(error)}
        self._socket.settimeout(None)
        self._reader.start()
        if "name" not in hello:
            self.end()
            why = hello.get("error", "the node process ended")
            raise SandboxError(f"backend {program[-1]!r} cannot run here: {why}")

    def ask(self, method: str, **params: object) -> tuple[dict, list[int]]:
        """Sends a request; returns the answer and the descriptors that came with it."""
        answer: Future = Future()
        with self._lock:
            if self._waiting is None:
                raise SandboxLost("the node process of the sandboxes is gone", "backend")
            self._last += 1
            number = self._last
            self._waiting[number] = answer
            request = {"id": number, "method": method, "params": params}
            try:
                self._socket.send(json.dumps(request).encode())
            except OSError as error:
                raise SandboxLost(
                    f"the node process takes no request: {error}", "backend"
                ) from error
        try:
            raw, fds = answer.result(WAIT_S)
        except TimeoutError as error:
            with self._lock:
                (self._waiting or {}).pop(number, None)
            raise SandboxLost("the node process does not answer", "backend") from error
        if "error" in raw:
            raise SandboxError(raw["error"])
        return raw, fds

    def end(self) -> None:
        """Closes the connection, upon which the node ends, and waits for that."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._process.wait():
            sweep()  # it could not do it itself
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET, 1)
            except OSError:
                packet = b""
            if not packet:
                break
            raw = json.loads(packet)
            if "warning" in raw:
                logging.getLogger(__name__).error("%s", raw["warning"])
                continue
            if "ended" in raw:
                self._ended(raw["ended"], raw["reason"])
                continue
            with self._lock:
                answer = self._waiting.pop(raw["id"], None)
            if answer is not None:
                answer.set_result((raw, fds))
            for fd in fds if answer is None else ():
                os.close(fd)
        with self._lock:
            waiting, self._waiting = self._waiting, None
        for answer in waiting.values():
            answer.set_exception(SandboxLost("the node process of the sandboxes died", "backend"))
        self._ended(None, "backend")
