"""The walls that gVisor puts up: a kernel in user space for each sandbox, started by `runsc`."""

import contextlib
import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from c2.sandbox import linux
from c2.sandbox.gvisor_bundle import config
from c2.sandbox.protocol import SandboxError
from c2.sandbox.toolserver import walls as inside
from c2.sandbox.toolserver.frames import encode
from c2.sandbox.walls import FOLDERS, Parts

MIB = 1 << 20
OPTIONS = (
    "--platform=systrap", "--network=none", "--host-uds=none", "--host-fifo=none",
    "--ignore-cgroups",  # they are ours
    "--directfs=false",  # only the process beside it, which serves files, may open any
    "--overlay2=none",  # the layers are those of the machine's kernel
    "--file-access-mounts=exclusive",  # nobody but the sandbox changes what it sees
    "--oci-seccomp",
)  # fmt: skip


class Runsc:
    """A gVisor for each sandbox, on a file system that the machine's kernel lays in layers.

    Attributes:
      news: as of `walls.Walls`.
      overhead: likewise; gVisor needs memory and threads for itself and for every thread inside.
    """

    news = None
    overhead = (96 * MIB, 512)

    def __init__(self, runsc: Path, place: Path, owner: tuple[int, int]) -> None:
        self._place, self._owner = place, owner
        self._state = place / "runsc"
        (place / "empty").touch()
        self._command = [str(runsc), f"--root={self._state}", *OPTIONS]
        self._saved: Path | None = None

    def restoring(self, saved: Path) -> "Runsc":
        """The same, with sandboxes that go on from where one was saved."""
        other = copy.copy(self)
        other._saved = saved
        return other

    def start(self, parts: Parts) -> "RunscStart":
        """As `walls.Walls.start`."""
        lower = ":".join(str(path) for path in (*reversed(parts.layers), parts.root.base))
        options = f"lowerdir={lower},upperdir={parts.upper},workdir={parts.work},userxattr"
        linux.mount("overlay", parts.place, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
        folders = FOLDERS | dict.fromkeys((shown for _, shown in parts.root.binds), 0o755)
        for path, mode in folders.items():
            _make_folder(Path(parts.place, path[1:]), mode, self._owner)
        bundle = Path(parts.upper).parent / "bundle"
        bundle.mkdir()
        settings = config(parts, self._place / "empty")
        (bundle / "config.json").write_text(json.dumps(settings))
        # Nobody knows when the server is up but itself. Its answer has a number that no client
        # waits for.
        method, params = ("resume", {"restored": True}) if self._saved else ("ping", {})
        hello = {"jsonrpc": "2.0", "id": 0, "method": method, "params": params}
        parts.client.sendall(encode(hello))
        name = f"{self._place.name}-{bundle.parent.name}"
        verb = ["restore", f"--image-path={self._saved}"] if self._saved else ["run"]
        doors = parts.group.doors()
        try:
            process = subprocess.Popen(
                [*self._command, *verb, f"--bundle={bundle}", name], cwd="/", env={},
                stdin=parts.server, stdout=subprocess.DEVNULL, stderr=parts.errors,
                preexec_fn=lambda: _enter(doors),
            )  # fmt: skip
        finally:
            for fd in doors:
                os.close(fd)
        return RunscStart(process, name, parts.client, self._state)

    def save(self, start: "RunscStart", folder: Path) -> subprocess.Popen:
        """Begins to stop a sandbox and to write all of its state; `resume` must follow."""
        script = (
            'name=$0; folder=$1; shift; "$@" pause "$name" && '
            'exec "$@" checkpoint --leave-running --image-path="$folder" "$name"'
        )
        return subprocess.Popen(
            ["/bin/sh", "-c", script, start.name, str(folder), *self._command], cwd="/", env={},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: _enter([]),
        )  # fmt: skip

    def resume(self, start: "RunscStart") -> None:
        """Lets a sandbox go on after `save`; raises SandboxError."""
        command = [*self._command, "resume", start.name]
        run = subprocess.run(command, cwd="/", env={}, capture_output=True, text=True)
        if run.returncode:
            raise SandboxError(f"it does not go on: {run.stderr.strip()}")

    def hear(self) -> None:
        """As `walls.Walls.hear`."""

    def close(self) -> None:
        """As `walls.Walls.close`."""


class RunscStart:
    """As `walls.Start`.

    Attributes:
      name: what runsc calls the sandbox.
    """

    def __init__(self, process: subprocess.Popen, name: str, client: socket.socket, state: Path):
        self.name = name
        self.process = -1  # it has namespaces that nobody from outside enters
        self.ended, self.info = os.pidfd_open(process.pid), os.dup(client.fileno())
        self._process, self._client, self._state = process, client, state

    def release(self) -> None:
        """As `walls.Start.release`: the tool server has answered, or gVisor is gone."""
        try:
            answered = self._client.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            answered = b""
        if not answered:
            raise SandboxError("it did not come up")

    def kill(self) -> None:
        """As `walls.Start.kill`; the rest of gVisor dies with the process that started it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.ended, signal.SIGKILL)

    def free(self) -> None:
        """As `walls.Start.free`."""
        self._process.wait()
        os.close(self.ended)
        os.close(self.info)
        for path in self._state.glob(f"{self.name}_*"):
            path.unlink()


def find_runsc() -> Path:
    """The runsc beside this interpreter, else that of the system.

    Raises:
      SandboxError: if there is neither.
    """
    beside = Path(sys.executable).with_name("runsc")
    found = str(beside) if beside.exists() else shutil.which("runsc")
    if not found:
        raise SandboxError("there is no runsc; Debian 13 and newer have it as the package runsc")
    return Path(found)


def _enter(doors: Sequence[int]) -> None:
    """In the new process: dies with the node, and lives under the limits of its group."""
    inside.prctl(inside.PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd in doors:
        os.write(fd, b"0")


def _make_folder(path: Path, mode: int, owner: tuple[int, int]) -> None:
    """Makes one that an image need not have; that it is no link somewhere has been checked."""
    if not path.is_dir():
        _make_folder(path.parent, 0o755, owner)
        path.mkdir()
        path.chmod(mode)
        os.chown(path, *owner)
