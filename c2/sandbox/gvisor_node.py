"""A node whose sandboxes are gVisors, which can be saved with their memory and restored."""

import functools
import os
import selectors
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from c2.sandbox import node
from c2.sandbox import root as roots
from c2.sandbox.box import Box
from c2.sandbox.gvisor_runsc import Runsc, find_runsc
from c2.sandbox.layers import CopyError
from c2.sandbox.protocol import SandboxError

WORDS = 300  # characters of a complaint


class Node(node.Node):
    """As `node.Node`, with the calls `checkpoint`, `restore` and `drop_checkpoint`."""

    # The file system of a sandbox is reached by gVisor, which knows nobody but those inside.
    ids = (roots.USER, roots.GROUP)
    later = node.Node.later | {"checkpoint", "restore"}

    def __init__(self, owner: socket.socket, name: str, walls: str) -> None:
        if os.getuid():
            raise SandboxError("gVisor needs root here, to give every sandbox a user of its own")
        super().__init__(owner, name, walls)
        self._saved: dict[str, Path] = {}
        self._saves = 0

    def _walls_of(self, name: str) -> Runsc:
        return Runsc(find_runsc(), self._place, self.ids)

    def _calls(self) -> dict[str, Callable[..., dict | None]]:
        return super()._calls() | {
            "checkpoint": self._checkpoint, "restore": self._restore,
            "drop_checkpoint": self._drop_checkpoint,
        }  # fmt: skip

    def _checkpoint(self, number: int, sandbox: str) -> None:
        box = self._boxes.get(sandbox)
        if box is None or sandbox in self._starting:
            raise SandboxError(f"sandbox {sandbox} is gone")
        self._saves += 1
        folder = self._place / "saved" / str(self._saves)
        folder.mkdir(parents=True)
        process = self._walls.save(box.start, folder)
        fd = os.pidfd_open(process.pid)
        done = functools.partial(self._stopped, number, box, folder, process, fd)
        self._events.register(fd, selectors.EVENT_READ, done)

    def _stopped(
        self, number: int, box: Box, folder: Path, process: subprocess.Popen, fd: int
    ) -> None:
        """Its memory is written and it stands still: now its files belong to that memory."""
        self._events.unregister(fd)
        os.close(fd)
        words = process.communicate()[1].decode("utf-8", "replace")
        try:
            if self._boxes.get(box.name) is not box:
                raise SandboxError(f"sandbox {box.name} is gone")
            if process.returncode:
                why = " ".join(words.partition("goroutine")[0].split())[:WORDS]
                raise SandboxError(why or "runsc gave no reason")
            layer = self._store.add(box.upper, "/")["layer"]
        except (SandboxError, CopyError, OSError) as error:
            shutil.rmtree(folder)
            self._reply(number, error=f"checkpoint: {error}")
        else:
            self._saved[folder.name] = folder
            self._reply(number, checkpoint=folder.name, layer=layer)
        if self._boxes.get(box.name) is box:
            try:
                self._walls.resume(box.start)
            except SandboxError:
                box.kill("backend")

    def _restore(self, number: int, checkpoint: str, **fields: object) -> None:
        if checkpoint not in self._saved:
            raise SandboxError(f"there is no checkpoint {checkpoint!r}")
        walls = self._walls.restoring(self._saved[checkpoint])
        self._create(number, walls=walls, **fields)

    def _drop_checkpoint(self, checkpoint: str) -> dict:
        """Sandboxes that are being restored have opened it already."""
        if folder := self._saved.pop(checkpoint, None):
            shutil.rmtree(folder)
        return {}


if __name__ == "__main__":
    node.main(Node)
