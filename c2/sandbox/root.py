"""The read-only root that sandboxes get: the programs of this machine, and nothing else of it."""

import importlib.resources
import os
import py_compile
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from c2.sandbox import linux
from c2.sandbox.protocol import WORKDIR
from c2.sandbox.toolserver import walls

USER, GROUP = 1000, 1000  # inside
HOME, HOST = "/home/user", "sandbox"
IMAGE_PYTHON = "/usr/bin/python3"
SERVER = "/run/c2"  # where the tool server is inside
PASSWD = f"root:x:0:0::/root:/bin/sh\nuser:x:{USER}:{GROUP}::{HOME}:/bin/sh\n"
GROUPS = f"root:x:0:\nuser:x:{GROUP}:\n"
# What programs look up and what tells nothing about the machine.
ETC = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "services", "protocols",
    "mime.types", "bash.bashrc", "inputrc", "gitattributes",
)  # fmt: skip
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEV_LINKS = {
    "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
    "fd": "/proc/self/fd", "core": "/proc/kcore", "ptmx": "pts/ptmx",
}  # fmt: skip


@dataclass(frozen=True)
class Root:
    """A root for many sandboxes.

    Attributes:
      base: the lowest layer of the overlay: folders, links and a small /etc.
      binds: folders of this machine that are shown read-only, as (folder here, folder inside).
      python: the interpreter, as seen inside.
    """

    base: Path
    binds: tuple[tuple[str, str], ...]
    python: str


def make(folder: Path, owner: tuple[int, int] | None) -> Root:
    """Prepares the root of this machine in a folder, in mounts of one's own.

    Args:
      folder: where; it must stay there as long as a sandbox runs.
      owner: user and group, on this machine, that the sandboxes run as; None for the caller.
    """
    base, server = folder / "base", folder / "server"
    own = ("proc", "dev", "run/c2", "usr", "etc", "var/tmp", "tmp", "root", WORKDIR[1:], HOME[1:])
    for name in own:
        (base / name).mkdir(parents=True)
    binds = [("/usr", "/usr")]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        original = Path("/", name)
        if original.is_symlink():
            (base / name).symlink_to(original.readlink())
        elif original.is_dir():
            (base / name).mkdir()
            binds.append((str(original), str(original)))
    for name in ETC:
        original = Path("/etc", name)
        if original.is_dir():
            shutil.copytree(original, base / "etc" / name, symlinks=True)
        elif original.exists():
            shutil.copy(original, base / "etc" / name)
    (base / "etc/passwd").write_text(PASSWD)
    (base / "etc/group").write_text(GROUPS)
    (base / "etc/hosts").write_text("127.0.0.1 localhost sandbox\n")
    (base / "etc/resolv.conf").write_text("")
    (base / "etc/nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
    prefix = os.path.realpath(sys.base_prefix)
    if not f"{prefix}/".startswith("/usr/"):
        (base / prefix[1:]).mkdir(parents=True, exist_ok=True)
        binds.append((prefix, prefix))
    _copy_server(server)
    binds.append((str(server), SERVER))
    reachable = []
    for number, (here, inside) in enumerate(binds):
        place = folder / "binds" / str(number)
        place.mkdir(parents=True)
        linux.bind(here, place)
        reachable.append((str(place), inside))
    for name in ("tmp", "var/tmp"):
        (base / name).chmod(0o1777)
    if owner:
        # An overlay can change only what belongs to someone who exists inside.
        for path in (base, *base.rglob("*")):
            os.chown(path, *owner, follow_symlinks=False)
    return Root(base, tuple(reachable), os.path.realpath(sys.executable))


def mount_points(root: Root) -> tuple[str, ...]:
    """Where something is mounted, or a folder made, before a sandbox is closed off."""
    return ("/proc", "/dev", "/tmp", WORKDIR, HOME, *(inside for _, inside in root.binds))


def of_image(root: Root, image: Path) -> Root:
    """The same with all programs taken from an image; only the tool server is ours."""
    server = tuple(bind for bind in root.binds if bind[1] == SERVER)
    return Root(image, server, IMAGE_PYTHON)


def search_path(image: bool) -> str:
    """The PATH of commands inside; on this machine's root, this interpreter before others."""
    own = "" if image else f"{os.path.realpath(sys.base_prefix)}/bin:"
    return f"{own}/usr/local/bin:/usr/bin:/bin"


def command(root: Root, fd: int) -> list[str]:
    """Starts the tool server on the inherited socket `fd`."""
    start = f"import sys; sys.path.insert(0, {SERVER!r}); from toolserver.server import main; "
    return [root.python, "-I", "-S", "-c", f"{start}main({fd}, sys.executable, sys.path[1:])"]


def zygote(
    root: Root, fd: int, rules: Path, outside: tuple[int, int]
) -> tuple[list[str], dict[str, str]]:
    """Starts, on this machine, the process that becomes tool servers: command and environment."""
    places = {inside: here for here, inside in root.binds}
    prefix = next(inside for inside in places if root.python.startswith(f"{inside}/"))
    python = places[prefix] + root.python[len(prefix) :]
    given = (fd, str(rules), outside, (USER, GROUP), HOST, prefix)
    start = f"import sys; sys.path.insert(0, {places[SERVER]!r}); "
    start += f"from toolserver.zygote import main; main{given!r}"
    env = {
        # Its own library, should it have one, and not that of another interpreter.
        "LD_LIBRARY_PATH": f"{places[prefix]}/lib",
        "LD_BIND_NOW": "1",  # or every fork would look up again what it calls
    }
    return [python, "-I", "-S", "-c", start], env


def make_dev(folder: Path) -> Path:
    """A /dev without terminals and shared memory, in mounts of one's own."""
    folder.mkdir()
    linux.mount("dev", folder, "tmpfs", linux.MS_NOSUID, "mode=755")
    for name in DEVICES:
        (folder / name).touch()
        linux.bind(Path("/dev", name), folder / name)
    for name, target in DEV_LINKS.items():
        (folder / name).symlink_to(target)
    for name in ("pts", "shm"):
        (folder / name).mkdir()
    walls.restrict(folder, walls.MS_RDONLY | walls.MS_NOSUID | walls.MS_NOEXEC)
    return folder


def _copy_server(folder: Path) -> None:
    target = folder / "toolserver"
    target.mkdir(parents=True)
    here = importlib.resources.files("c2.sandbox")
    for file in (*(here / "toolserver").iterdir(), here / "tasks" / "runner.py"):
        if file.name.endswith(".py"):
            copy = target / file.name
            copy.write_bytes(file.read_bytes())
            # Its folder is read-only inside, so it is compiled here.
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(copy), invalidation_mode=unchecked, doraise=True)
