"""The file layers of a node."""

import os
import shutil
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from c2.sandbox.layers import copy_tree
from c2.sandbox.protocol import SandboxError

MAX_BYTES = 4 << 30  # of one layer
MAX_LAYERS = 32  # of one sandbox
MAX_UNUSED = 8  # layers that wait to be deleted; more are not put off


class Store:
    """Layers by name, images among them, and which sandboxes use them.

    Attributes:
      unused: folders of layers that are gone, for `clear` to delete when nobody waits for it.
    """

    def __init__(
        self, place: Path, ids: tuple[int, int] | None, mount_points: Sequence[str]
    ) -> None:
        self._place, self._ids, self._mount_points = place, ids, mount_points
        place.mkdir()
        self._count = 0
        self._folders: dict[str, Path] = {}
        self._users: dict[str, list[str]] = {}  # sandbox -> its layers
        self._dropped: set[str] = set()
        self.unused: deque[Path] = deque()

    def add(self, source: str, at: str) -> dict:
        """Copies a folder into a new layer, where it appears at the absolute path `at`.

        Raises:
          SandboxError: if `at` is none, or the layer has something else than folders on the way
            to a mount point. A link there would lead bubblewrap, which follows it while it still
            sees the machine's files, out of the sandbox.
          layers.CopyError: for trees that are too deep or too large.
          OSError: if the folder cannot be read or there is no room.
        """
        parts = [part for part in at.split("/") if part]
        if not at.startswith("/") or ".." in parts or "." in parts:
            raise SandboxError(f"at: {at!r}; legal are absolute paths without dots")
        given = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        self._count += 1
        name = f"layer-{self._count}"
        target = top = self._place / name
        try:
            top.mkdir()
            for part in parts:
                target = target / part
                target.mkdir()
                if self._ids:
                    os.chown(target, *self._ids)
            taken = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
            try:
                copied = copy_tree(given, taken, self._ids, MAX_BYTES)
            finally:
                os.close(taken)
            for path in self._mount_points:
                _check_folders(top, path)
        except BaseException:
            shutil.rmtree(top, ignore_errors=True)
            raise
        finally:
            os.close(given)
        self._folders[name] = top
        return {"layer": name, "files": copied.files, "bytes": copied.bytes}

    def folder(self, layer: str) -> dict:
        """Where a layer is."""
        if layer not in self._folders:
            raise SandboxError(f"layers: there is no {layer!r}")
        return {"folder": str(self._folders[layer])}

    def use(self, sandbox: str, names: Sequence[str]) -> list[Path]:
        """The folders of layers, which stay until the sandbox releases them."""
        if len(names) > MAX_LAYERS:
            raise SandboxError(f"layers: {len(names)}; at most {MAX_LAYERS} are legal")
        for name in names:
            if name not in self._folders:
                raise SandboxError(f"layers: there is no {name!r}")
        self._users[sandbox] = list(names)
        return [self._folders[name] for name in names]

    def release(self, sandbox: str) -> None:
        """Says that a sandbox is gone."""
        self._users.pop(sandbox, None)
        self._free()

    def drop(self, layer: str) -> dict:
        """Removes a layer as soon as no sandbox uses it."""
        if layer in self._folders:
            self._dropped.add(layer)
            self._free()
        return {}

    def clear(self) -> None:
        """Deletes the files of the layer that is gone for longest."""
        shutil.rmtree(self.unused.popleft(), ignore_errors=True)

    def _free(self) -> None:
        if not self._dropped:
            return
        used = {name for names in self._users.values() for name in names}
        for name in self._dropped - used:
            self.unused.append(self._folders.pop(name))
        self._dropped &= used
        while len(self.unused) > MAX_UNUSED:
            self.clear()


def _check_folders(layer: Path, path: str) -> None:
    place = layer
    for part in path.split("/")[1:]:
        place = place / part
        try:
            mode = os.lstat(place).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISCHR(mode):  # deleted in this layer
            return
        if not stat.S_ISDIR(mode):
            shown = place.relative_to(layer)
            raise SandboxError(f"/{shown} is not a folder, but {path} is needed as a mount point")
