"""Commands as ordinary processes of this user: for code that you trust, when debugging."""

import contextlib
import importlib.resources
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from c2.sandbox.client import Client
from c2.sandbox.jobs import end_all
from c2.sandbox.protocol import (
    WORKDIR,
    Handle,
    SandboxError,
    SandboxLost,
    Spec,
    Status,
    require,
)
from c2.sandbox.served import Served

WARNING = "backend 'plain' has NO walls: commands can do to this machine whatever you can"
END_S = 10.0
GIVEN = "sys.executable, sys.path[1:]"  # what the tool server knows of its interpreter


class Plain(Served):
    """The tool server on a temporary folder, which stands for /repo in all calls.

    Commands run with this user's rights, network and files; limits, deadline and lease of a spec
    are not enforced. A warning says so whenever a backend of this kind is made.
    """

    name = "plain"
    capabilities = frozenset({"jobs"})

    def __init__(self) -> None:
        warnings.warn(WARNING, stacklevel=2)
        self._sandboxes: dict[str, _Process] = {}
        self._count = 0

    def __enter__(self) -> "Plain":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def create(self, spec: Spec) -> Handle:
        """As `protocol.Backend.create`."""
        for asked, name in (
            (spec.layers or spec.image, "layers"),
            (spec.network != "none", "network_policy"),
        ):
            if asked:
                require(self, name)
        folder = Path(tempfile.mkdtemp(prefix="c2-plain-"))
        ours, theirs = socket.socketpair()
        source = str(importlib.resources.files("c2.sandbox"))
        start = f"import sys; sys.path.insert(0, {source!r}); from toolserver.server import main; "
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", f"{start}main({theirs.fileno()}, {GIVEN})"],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._count += 1
        handle = Handle(self.name, str(self._count))
        self._sandboxes[handle.id] = _Process(spec, folder, process, Client(ours))
        return handle

    def status(self, handle: Handle) -> Status:
        """As `protocol.Backend.status`."""
        found = self._sandboxes.get(handle.id)
        if found is None:
            return Status(False, "closed", 0.0, None)
        alive = found.process.poll() is None
        return Status(alive, None if alive else "exited", time.monotonic() - found.born, None)

    def renew(self, handle: Handle) -> None:
        """As `protocol.Backend.renew`; there is no lease."""
        self._sandbox(handle)

    def close(self, handle: Handle) -> None:
        """As `protocol.Backend.close`."""
        if found := self._sandboxes.get(handle.id):
            with contextlib.suppress(SandboxError):  # its server has ended
                end_all(self, handle)
            del self._sandboxes[handle.id]
            found.client.close()
            found.process.wait(END_S)
            shutil.rmtree(found.folder, ignore_errors=True)

    def shutdown(self) -> None:
        """As `protocol.Backend.shutdown`."""
        for name in list(self._sandboxes):
            self.close(Handle(self.name, name))

    def _sandbox(self, handle: Handle) -> "_Process":
        if found := self._sandboxes.get(handle.id):
            return found
        raise SandboxLost(f"sandbox {handle.id} was closed", "closed")

    def _client(self, handle: Handle) -> Client:
        return self._sandbox(handle).client

    def _path(self, handle: Handle, path: str) -> str:
        if path == WORKDIR or path.startswith(WORKDIR + "/"):
            return str(self._sandbox(handle).folder) + path[len(WORKDIR) :]
        return path

    def _env(self, handle: Handle) -> dict[str, str]:
        return {**os.environ, **self._sandbox(handle).spec.env}

    def _new_oom_kills(self, handle: Handle) -> int:
        return 0

    def _lost(self, handle: Handle, error: SandboxLost) -> SandboxLost:
        return error


@dataclass
class _Process:
    spec: Spec
    folder: Path
    process: subprocess.Popen
    client: Client
    born: float = field(default_factory=time.monotonic)
