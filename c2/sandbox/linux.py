"""The few system calls of Linux that Python 3.11 has no function for."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV = 2, 4
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2


def unshare(flags: int) -> None:
    """Moves the calling process into new namespaces; raises OSError."""
    _call("unshare", ctypes.c_int(flags))


def enter(process: int, flags: int) -> None:
    """Moves the calling thread into namespaces of the process of a descriptor; raises OSError."""
    _call("setns", ctypes.c_int(process), ctypes.c_int(flags))


def mount(source: str, target: Path | str, kind: str | None, flags: int, data: str = "") -> None:
    """Mounts a file system; raises OSError."""
    kind_bytes = None if kind is None else kind.encode()
    _call(
        "mount", os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags),
        data.encode(),
    )  # fmt: skip


def bind(source: Path | str, target: Path) -> None:
    """Shows a folder at a second place as well, which other users can reach if the first is not."""
    mount(os.fspath(source), target, None, MS_BIND | MS_REC)


def unmount(target: Path | str) -> None:
    """Takes a mount out of the tree of folders; it goes when its last user does."""
    _call("umount2", os.fsencode(target), ctypes.c_int(MNT_DETACH))


def private_mounts() -> None:
    """Gives the calling process mounts of its own, which end with it.

    Root keeps its identity; another user becomes root of a user namespace, which may mount too.
    """
    user, group = os.getuid(), os.getgid()
    if user:
        unshare(CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    else:
        unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)


@contextlib.contextmanager
def as_user(ids: tuple[int, int] | None) -> Iterator[None]:
    """Programs that are started meanwhile run as this user and group, for good.

    For root only, or with None, which changes nothing. `subprocess` can do the same, but then forks
    instead of sharing memory with the child, which takes several times as long.
    """
    if ids is None:
        yield
        return
    os.setresgid(ids[1], ids[1], 0)
    os.setresuid(ids[0], ids[0], 0)  # the saved 0, which a new program does not get, leads back
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it is gone or only a zombie is left.

    A process id together with it is never used again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    if getattr(_libc(), name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
