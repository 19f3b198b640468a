"""One sandbox as its node sees it: a bubblewrap, a control group, and a file system in memory."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from c2.sandbox import cgroups, command, linux
from c2.sandbox import root as roots
from c2.sandbox.protocol import SandboxError

MIB = 1 << 20
FILES_PER_MIB = 128  # inodes of the file system, so that empty files fill it too
FREEZE_S = 2.0


class Box:
    """A sandbox from its start to the removal of its last trace.

    Attributes:
      name: unique in its node.
      upper: the folder that takes its changes.
      process: its bubblewrap.
      ended: descriptor that becomes readable when that has ended.
      info: descriptor that becomes readable when the sandbox is set up.
      client: the owner's end of the connection to its tool server.
      reason: why it was ended, or None.
      renewed: when its owner last said that it needs it.
    """

    def __init__(self, name: str, folder: Path, deadline_s: float, ttl_s: float) -> None:
        self.name = name
        self.upper = folder / "upper"
        self.process: subprocess.Popen | None = None
        self.ended = self.info = -1
        self.client: socket.socket | None = None
        self.reason: str | None = None
        self.renewed = self._born = time.monotonic()
        self._deadline_s, self._ttl_s = deadline_s, ttl_s
        self._folder = folder
        self._group: cgroups.Group | None = None
        self._first = self._block = -1
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the box

    def start(
        self,
        bwrap: Path,
        root: roots.Root,
        layers: Sequence[Path],
        rules: Path,
        trees: cgroups.Trees,
        resources: Mapping[str, float],
        ids: tuple[int, int] | None,
    ) -> None:
        """Starts bubblewrap, which will wait for `release`; on an error the caller must `free`."""
        memory, disk = int(resources["memory_mb"] * MIB), int(resources["disk_mb"] * MIB)
        limits = cgroups.Limits(memory + disk, int(resources["pids"]), resources["cpus"])
        self._group = cgroups.create(trees, self.name, limits)
        self._folder.mkdir(parents=True)
        options = f"size={disk},nr_inodes={max(1024, disk // MIB * FILES_PER_MIB)},mode=755"
        linux.mount("c2", self._folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
        work = self._folder / "work"
        for path in (self.upper, work):
            path.mkdir()
            if ids:
                os.chown(path, *ids)
        self.client, server = socket.socketpair()
        self.info, info = os.pipe()
        block, self._block = os.pipe()
        with server, open(rules, "rb") as filter_file:
            parts = command.Parts(
                root, layers, self.upper, work, disk, filter_file.fileno(), info, block
            )
            given = [server.fileno(), filter_file.fileno(), info, block]
            arguments = [str(bwrap), *command.arguments(parts), "--"]
            arguments += roots.command(root, server.fileno())
            try:
                with linux.as_user(ids):
                    self.process = subprocess.Popen(
                        arguments, pass_fds=given, stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL, stderr=self._errors, cwd="/", env={},
                    )  # fmt: skip
            finally:
                os.close(info)
                os.close(block)
        self.ended = os.pidfd_open(self.process.pid)

    def release(self) -> None:
        """Puts the sandbox under its limits and lets its first process go.

        Raises:
          SandboxError: if it has not come up.
        """
        with open(self.info, "rb") as file:
            self.info = -1
            text = file.read()
        try:
            first = json.loads(text)["child-pid"]
            self._first = os.pidfd_open(first)
            self._group.attach(first)
        except (ValueError, KeyError, OSError) as error:
            raise SandboxError(f"sandbox {self.name} did not come up") from error
        os.write(self._block, b"x")
        os.close(self._block)
        self._block = -1

    def kill(self, reason: str) -> None:
        """Ends all of its processes; `ended` tells when they are gone."""
        self.reason = self.reason or reason
        if self._first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        elif self.process:
            self.process.kill()

    def free(self) -> bool:
        """Frees what it held once `ended`; False if its control group cannot be removed yet."""
        if self.process:
            self.process.wait()
            self.process = None
        if self.client:
            self.client.close()
        self._errors.close()
        for fd in (self.ended, self.info, self._first, self._block):
            if fd >= 0:
                os.close(fd)
        self.ended = self.info = self._first = self._block = -1
        if self._folder.exists():
            with contextlib.suppress(OSError):  # not mounted yet
                linux.unmount(self._folder)
            self._folder.rmdir()
        return self._group is None or self._group.remove()

    def expiry(self) -> tuple[float, str]:
        """When it is to be ended, and why then."""
        deadline, lease = self._born + self._deadline_s, self.renewed + self._ttl_s
        return (deadline, "deadline") if deadline <= lease else (lease, "lease")

    def usage(self) -> dict[str, float]:
        """Age in seconds, memory in bytes, processes killed for want of memory."""
        memory, kills = self._group.memory(), self._group.oom_kills()
        return {"age": time.monotonic() - self._born, "memory": memory, "oom_kills": kills}

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Keeps all of its processes where they are."""
        patience = time.monotonic() + FREEZE_S
        self._group.freeze(True)
        try:
            while not self._group.is_frozen():
                if time.monotonic() > patience:
                    raise SandboxError("its processes do not stop")
                time.sleep(0.0005)
            yield
        finally:
            self._group.freeze(False)

    def last_words(self) -> str:
        """What bubblewrap or the tool server complained about, on one line."""
        self._errors.seek(0)
        text = self._errors.read()[-500:].decode("utf-8", "replace")
        return " ".join(text.split())
