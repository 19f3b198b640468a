"""A backend whose sandboxes are pods of a cluster."""

import datetime
import threading
import time
import uuid
from dataclasses import dataclass

from c2.sandbox import battery
from c2.sandbox.client import Client
from c2.sandbox.kubernetes import template
from c2.sandbox.kubernetes.cluster import Cluster, condition
from c2.sandbox.kubernetes.config import KubernetesConfig
from c2.sandbox.kubernetes.tunnel import Tunnel
from c2.sandbox.protocol import (
    Handle,
    Reason,
    Resources,
    SandboxError,
    SandboxLost,
    Spec,
    Status,
    require,
)
from c2.sandbox.served import Served

SERVER = "/run/c2"  # where the template mounts the tool server
START = (
    f"import sys; sys.path.insert(0, {SERVER!r}); from toolserver.stdio import main; main({{pids}})"
)
HOME, PATH = "/tmp", "/usr/local/bin:/usr/bin:/bin"
RENEWALS = 10  # per `Spec.ttl_s`; more would only be traffic
# What policies against the network forget first: name service, cloud metadata, the internet.
REACH = """
import socket
for host, port in (("169.254.169.254", 80), ("1.1.1.1", 443), ("kubernetes.default.svc", 443)):
    try:
        socket.create_connection((host, port), 2).close()
    except OSError:
        continue
    print(host)
"""


class Kubernetes(Served):
    """Sandboxes that a cluster keeps ready, of one SandboxTemplate.

    A sandbox is lost with its connection: nobody can know what became of the commands in it. The
    cluster itself ends a sandbox at its deadline, or when its lease is not renewed, by its own
    clock. Files cannot be put below a sandbox or copied between sandboxes, so there are no layers
    and no forks.

    The constructor refuses a template that lacks a wall, and then tries some of them in a sandbox.

    Args:
      config: which pool, and for whom.

    Attributes:
      resources: the limits of all sandboxes, which a spec must ask for.
    """

    name = "kubernetes"
    capabilities = frozenset({"jobs"})

    def __init__(self, config: KubernetesConfig) -> None:
        self._instance = uuid.uuid4().hex[:12]
        self._cluster = Cluster(config, self._instance)
        self._config = config
        self._lock = threading.Lock()
        self._count = 0
        self._sandboxes: dict[str, _Sandbox] = {}
        self._ended: dict[str, Reason] = {}
        found = self._cluster.template()
        template.check(found, config.runtime_classes)
        self.resources: Resources = template.resources(found)
        self._cluster.delete_all(of_others=True)
        try:
            self._try_walls()
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> "Kubernetes":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def create(self, spec: Spec) -> Handle:
        """As `protocol.Backend.create`.

        Raises:
          Unsupported: for layers, images and network policies.
          SandboxError: for other limits than those of the template.
        """
        for asked, capability in (
            (spec.layers or spec.image, "layers"),
            (spec.network != "none", "network_policy"),
        ):
            if asked:
                require(self, capability)
        if spec.resources != self.resources:
            raise SandboxError(f"resources: {spec.resources}; the template gives {self.resources}")
        with self._lock:
            self._count += 1
            name = f"{self._config.owner}-{self._instance}-{self._count}"
        sandbox = _Sandbox(spec)
        try:
            self._cluster.claim(name, sandbox.ends(), spec.labels)
            pod = self._cluster.wait(name)
            command = ["python3", "-I", "-S", "-c", START.format(pids=self.resources.pids)]
            sandbox.tunnel = Tunnel(self._cluster.execute(pod, template.CONTAINER, command))
            sandbox.client = Client(sandbox.tunnel.socket)
            sandbox.client.call("ping", dict)
        except SandboxLost as error:
            self._cluster.delete(name)
            words = sandbox.tunnel.words()
            raise SandboxError(f"claim {name}: no tool server: {words or error}") from error
        except BaseException:
            self._cluster.delete(name)
            raise
        self._sandboxes[name] = sandbox
        return Handle(self.name, name)

    def status(self, handle: Handle) -> Status:
        """As `protocol.Backend.status`; the cluster does not tell the memory."""
        sandbox = self._sandboxes.get(handle.id)
        if sandbox is None:
            return Status(False, self._ended.get(handle.id, "closed"), 0.0, None)
        reason = self._reason(handle.id, sandbox)
        return Status(reason is None, reason, sandbox.age(), None)

    def renew(self, handle: Handle) -> None:
        """As `protocol.Backend.renew`."""
        sandbox = self._sandbox(handle)
        if time.monotonic() - sandbox.renewed >= sandbox.spec.ttl_s / RENEWALS:
            sandbox.renewed = time.monotonic()
            self._cluster.renew(handle.id, sandbox.ends())

    def close(self, handle: Handle) -> None:
        """As `protocol.Backend.close`."""
        if sandbox := self._sandboxes.pop(handle.id, None):
            sandbox.client.close()
            self._cluster.delete(handle.id)

    def shutdown(self) -> None:
        """As `protocol.Backend.shutdown`."""
        for sandbox in self._sandboxes.values():
            sandbox.client.close()
        self._sandboxes.clear()
        self._cluster.delete_all(of_others=False)

    def _try_walls(self) -> None:
        spec = Spec(resources=self.resources, labels={"purpose": "battery"})
        battery.check(self, spec, battery.Terms(walls=("user", "namespaces")))
        handle = self.create(spec)
        try:
            reached = self.exec(handle, ["python3", "-I", "-c", REACH]).stdout.split()
        finally:
            self.close(handle)
        if reached:
            raise SandboxError(f"sandboxes of the cluster reach {reached[0].decode()}")

    def _sandbox(self, handle: Handle) -> "_Sandbox":
        if sandbox := self._sandboxes.get(handle.id):
            return sandbox
        reason = self._ended.get(handle.id, "closed")
        raise SandboxLost(f"sandbox {handle.id} was ended ({reason})", reason)

    def _client(self, handle: Handle) -> Client:
        return self._sandbox(handle).client

    def _env(self, handle: Handle) -> dict[str, str]:
        return {"HOME": HOME, "PATH": PATH, "LANG": "C.UTF-8"} | self._sandbox(handle).spec.env

    def _new_oom_kills(self, handle: Handle) -> int:
        return 0  # the cluster ends the whole sandbox

    def _lost(self, handle: Handle, error: SandboxLost) -> SandboxLost:
        sandbox = self._sandboxes.get(handle.id)
        if error.reason != "exited" or sandbox is None:
            return error
        reason = self._ended[handle.id] = self._reason(handle.id, sandbox) or "backend"
        words = sandbox.tunnel.words()
        self.close(handle)  # it may run on without its connection
        more = f"; its last words: {words}" if words else ""
        return SandboxLost(f"sandbox {handle.id} ended ({reason}): {error}{more}", reason)

    def _reason(self, name: str, sandbox: "_Sandbox") -> Reason | None:
        """Why a sandbox has ended; None if it has not, as far as the cluster knows."""
        claim = self._cluster.read(name)
        over = sandbox.over()
        if over and claim is None:
            return over
        if claim is None or "deletionTimestamp" in claim["metadata"]:
            return "backend"
        return "exited" if condition(claim, "Finished")[0] else None


@dataclass
class _Sandbox:
    """What the owner knows about a sandbox."""

    spec: Spec
    tunnel: Tunnel | None = None
    client: Client | None = None

    def __post_init__(self) -> None:
        self.born = self.renewed = time.monotonic()

    def age(self) -> float:
        return time.monotonic() - self.born

    def ends(self) -> datetime.datetime:
        """When the cluster is to end it, if it is not renewed."""
        left = min(self.spec.ttl_s, self.spec.deadline_s - self.age())
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=left)

    def over(self) -> Reason | None:
        """Which of its ends has come."""
        if self.age() >= self.spec.deadline_s:
            return "deadline"
        return "lease" if time.monotonic() - self.renewed >= self.spec.ttl_s else None
