"""Where versions lie: a folder, or anything that fsspec knows.

Names are relative, with one folder in them. An object appears whole or not at all, and `create`
never replaces one: both hold on folders by links and renames, and on S3 because uploads are atomic
and conditional (``If-None-Match``).
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Store(Protocol):
    """Objects by name. Failures of the store itself are OSErrors of any kind."""

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes [start, stop) of an object; FileNotFoundError if there is none."""

    def write(self, name: str, data: bytes) -> None:
        """Stores an object; replaces one of this name."""

    def create(self, name: str, data: bytes) -> None:
        """Stores an object; FileExistsError if there is one of this name."""

    def names(self, folder: str) -> list[str]:
        """The objects in a folder without its name, sorted."""

    def remove(self, name: str) -> None:
        """Removes an object if it is there."""

    def sweep(self) -> None:
        """Removes what killed writers left unfinished; for the only writer, before it writes."""


def open_store(url: str, **options: Any) -> Store:
    """The store of an address.

    Args:
      url: a path, or what fsspec understands: ``s3://bucket/run``, ``memory://run``.
      **options: of the file system, e.g. ``endpoint_url`` or ``key`` of S3.
    """
    system, path = fsspec.core.url_to_fs(url, **options)
    if isinstance(system, LocalFileSystem):
        return Folder(path)
    return ObjectStore(system, path)


class Folder:
    """A store in a folder of a local or network file system."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """See `Store`."""
        with open(self._path / name, "rb") as file:
            file.seek(start or 0)
            return file.read(-1 if stop is None else stop - (start or 0))

    def write(self, name: str, data: bytes) -> None:
        """See `Store`."""
        with self._written(name, data) as temporary:
            os.replace(temporary, self._path / name)

    def create(self, name: str, data: bytes) -> None:
        """See `Store`."""
        with self._written(name, data) as temporary:
            os.link(temporary, self._path / name)  # unlike a rename, never onto another

    def names(self, folder: str) -> list[str]:
        """See `Store`."""
        try:
            found = os.listdir(self._path / folder)
        except FileNotFoundError:
            return []
        return sorted(name for name in found if not name.startswith("."))

    def remove(self, name: str) -> None:
        """See `Store`."""
        (self._path / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """See `Store`."""
        shutil.rmtree(self._unfinished, ignore_errors=True)

    @property
    def _unfinished(self) -> Path:
        return self._path / ".unfinished"

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        """A file with this content that the caller moves or links to its place."""
        place = self._path / name
        for folder in (place.parent, self._unfinished):
            folder.mkdir(parents=True, exist_ok=True)
        temporary = self._unfinished / secrets.token_hex(8)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name itself
        finally:
            os.close(folder)


class ObjectStore:
    """A store in a file system of fsspec whose uploads are atomic.

    A bucket should have a lifecycle rule that removes unfinished uploads of killed writers.
    """

    def __init__(self, system: fsspec.AbstractFileSystem, path: str) -> None:
        self._system, self._path = system, path.rstrip("/")

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """See `Store`."""
        with self._place(name) as path:
            return self._system.cat_file(path, start=start, end=stop)

    def write(self, name: str, data: bytes) -> None:
        """See `Store`."""
        with self._place(name) as path:
            self._system.pipe_file(path, data)

    def create(self, name: str, data: bytes) -> None:
        """See `Store`."""
        with self._place(name) as path:
            try:
                self._system.pipe_file(path, data, mode="create")
            except OSError as error:
                # not every server says which condition it was that did not hold
                if error.errno == errno.EINVAL and self._system.exists(path):
                    raise FileExistsError(f"{name} exists") from error
                raise

    def names(self, folder: str) -> list[str]:
        """See `Store`."""
        with self._place(folder) as path:
            try:
                found = self._system.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(name.rsplit("/", 1)[-1] for name in found)

    def remove(self, name: str) -> None:
        """See `Store`."""
        with self._place(name) as path, contextlib.suppress(FileNotFoundError):
            self._system.rm_file(path)

    def sweep(self) -> None:
        """See `Store`; unfinished uploads do not appear, and what they cost is the bucket's."""

    @contextlib.contextmanager
    def _place(self, name: str) -> Iterator[str]:
        """The path of an object; what a file system raises in its own words becomes an OSError."""
        self._system.invalidate_cache()  # others write here too
        try:
            yield f"{self._path}/{name}"
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self._path}/{name}: {type(error).__name__}: {error}") from error
