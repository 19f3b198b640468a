"""Copies of trees of files that untrusted programs made, or will change.

A layer is a folder that never changes again; sandboxes see it through an overlay. Copying follows
no links and opens nothing by a path that a program inside could have changed meanwhile: folders are
entered by descriptor.
"""

import os
import stat
from dataclasses import dataclass

CHUNK = 1 << 20
MAX_DEPTH = 100  # folders in folders; what is deeper was made to break programs like this
OPAQUE = "user.overlay.opaque"  # marks a folder that hides its namesakes in lower layers


class CopyError(ValueError):
    """A tree that is not copied; the message is one line."""


@dataclass
class Copied:
    """What a copy holds."""

    files: int = 0
    bytes: int = 0


def copy_tree(source: int, target: int, owner: tuple[int, int] | None, limit: int) -> Copied:
    """Copies what is in a folder: folders, files, links, and the marks of an overlay.

    Hard links become separate files, holes stay holes, pipes and sockets are left out, and special
    permission bits are dropped.

    Args:
      source: descriptor of the folder.
      target: descriptor of an empty folder.
      owner: user and group of everything in the copy; None leaves the caller.
      limit: bytes of content, above which the copy is refused.

    Raises:
      CopyError: for trees that are too deep or too large.
    """
    copied = Copied()
    _copy(source, target, owner, limit, copied, 0)
    return copied


def _copy(
    source: int, target: int, owner: tuple[int, int] | None, limit: int, copied: Copied, depth: int
) -> None:
    if depth > MAX_DEPTH:
        raise CopyError(f"folders more than {MAX_DEPTH} deep")
    for name in os.listdir(source):
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=source)
            try:
                os.mkdir(name, 0o700, dir_fd=target)
                made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=target)
                try:
                    _copy(inner, made, owner, limit, copied, depth + 1)
                    if _is_opaque(inner):
                        os.setxattr(made, OPAQUE, b"y")
                    _finish(made, info, owner)
                finally:
                    os.close(made)
            finally:
                os.close(inner)
        elif stat.S_ISREG(info.st_mode):
            _copy_file(source, target, name, owner, limit, copied)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            if owner:
                os.chown(name, *owner, dir_fd=target, follow_symlinks=False)
        elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)  # says that a lower file is deleted


def _copy_file(
    source: int, target: int, name: str, owner: tuple[int, int] | None, limit: int, copied: Copied
) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    give = os.open(name, flags, dir_fd=source)
    try:
        info = os.fstat(give)
        if not stat.S_ISREG(info.st_mode):
            raise CopyError(f"{name!r} changed while it was copied")
        take = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
        try:
            copied.files += 1
            sparse = info.st_blocks * 512 < info.st_size
            for start, end in _data(give, info.st_size) if sparse else [(0, info.st_size)]:
                copied.bytes += end - start
                if copied.bytes > limit:
                    raise CopyError(f"more than {limit} bytes")
                if start:
                    os.lseek(take, start, os.SEEK_SET)
                while start < end:
                    done = os.sendfile(take, give, start, min(CHUNK, end - start))
                    if not done:
                        break  # it became shorter
                    start += done
            if sparse:
                os.ftruncate(take, info.st_size)
            _finish(take, info, owner)
        finally:
            os.close(take)
    finally:
        os.close(give)


def _data(fd: int, size: int) -> list[tuple[int, int]]:
    """The parts of a file that are not holes."""
    parts, position = [], 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:
            break  # only a hole is left
        position = os.lseek(fd, start, os.SEEK_HOLE)
        parts.append((start, position))
    return parts


def _is_opaque(fd: int) -> bool:
    try:
        return os.getxattr(fd, OPAQUE) == b"y"
    except OSError:
        return False


def _finish(fd: int, info: os.stat_result, owner: tuple[int, int] | None) -> None:
    if owner:
        os.fchown(fd, *owner)
    os.fchmod(fd, info.st_mode & 0o777)
    os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
