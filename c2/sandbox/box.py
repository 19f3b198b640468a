"""One sandbox as its node sees it: processes, a control group, and a file system in memory."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from c2.sandbox import cgroups, linux
from c2.sandbox import root as roots
from c2.sandbox.protocol import SandboxError
from c2.sandbox.walls import Parts, Start, Walls

MIB = 1 << 20
FILES_PER_MIB = 128  # inodes of the file system, so that empty files fill it too
FREEZE_S = 2.0


class Box:
    """A sandbox from its start to the removal of its last trace.

    Attributes:
      name: unique in its node.
      upper: the folder that takes its changes.
      start: what is behind its walls, from `begin` on.
      client: the owner's end of the connection to its tool server.
      reason: why it was ended, or None.
      renewed: when its owner last said that it needs it.
      network: what goes to the gate: its first policy and its labels; empty without network.
    """

    def __init__(self, name: str, folder: str, deadline_s: float, ttl_s: float) -> None:
        self.name = name
        self.upper = f"{folder}/upper"
        self.start: Start | None = None
        self.client: socket.socket | None = None
        self.reason: str | None = None
        self.network: dict[str, dict] = {}
        self.limit(deadline_s, ttl_s)
        self._folder = folder
        self._group: cgroups.Group | None = None
        self._errors = os.fdopen(os.memfd_create("errors"), "w+b", buffering=0)

    def begin(
        self,
        walls: Walls,
        root: roots.Root,
        layers: Sequence[Path],
        trees: cgroups.Trees,
        resources: Mapping[str, float],
        ids: tuple[int, int] | None,
        files: Mapping[str, str],
    ) -> None:
        """Begins to start it with these files, path -> text; on an error the caller must `free`."""
        memory, disk = int(resources["memory_mb"] * MIB), int(resources["disk_mb"] * MIB)
        more_memory, more_pids = walls.overhead
        limits = cgroups.Limits(
            memory + disk + more_memory, int(resources["pids"]) + more_pids, resources["cpus"]
        )
        self._group = cgroups.create(trees, self.name, limits)
        os.mkdir(self._folder)
        options = f"size={disk},nr_inodes={max(1024, disk // MIB * FILES_PER_MIB)},mode=755"
        linux.mount("c2", self._folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
        work, place = f"{self._folder}/work", f"{self._folder}/place"
        for path in (self.upper, work, place):
            os.mkdir(path)
            if ids:
                os.chown(path, *ids)
        for path, text in files.items():
            self._put(path, text, ids)
        self.client, server = socket.socketpair()
        with server:
            self.start = walls.start(
                Parts(
                    root=root, layers=layers, place=place, upper=self.upper, work=work,
                    shm_bytes=disk, group=self._group, server=server, client=self.client,
                    errors=self._errors, resources=resources,
                )
            )  # fmt: skip

    def _put(self, path: str, text: str, ids: tuple[int, int] | None) -> None:
        place = Path(self.upper)
        for part in path.strip("/").split("/")[:-1]:
            place = place / part
            place.mkdir(exist_ok=True)
            if ids:
                os.chown(place, *ids)
        place = Path(self.upper, path.strip("/"))
        place.write_text(text)
        if ids:
            os.chown(place, *ids)

    def kill(self, reason: str) -> None:
        """Ends all of its processes; `start.ended` tells when they are gone."""
        self.reason = self.reason or reason
        if self.start:
            self.start.kill()

    def free(self) -> bool:
        """Frees what it held once it has ended; False if its group cannot be removed yet."""
        if self.start:
            self.start.free()
            self.start = None
        if self.client:
            self.client.close()
        self._errors.close()
        with contextlib.suppress(OSError):  # not mounted yet
            linux.unmount(self._folder)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self._folder)
        return self._group is None or self._group.remove()

    def limit(self, deadline_s: float, ttl_s: float) -> None:
        """Gives it a life that begins now."""
        self.renewed = self._born = time.monotonic()
        self._deadline_s, self._ttl_s = deadline_s, ttl_s

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
                time.sleep(0.0001)
            yield
        finally:
            self._group.freeze(False)

    def last_words(self) -> str:
        """What bubblewrap or the tool server complained about, on one line."""
        self._errors.seek(0)
        text = self._errors.read()[-500:].decode("utf-8", "replace")
        return " ".join(text.split())
