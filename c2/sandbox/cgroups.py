"""Control groups: what limits the memory, processes and cores of a sandbox.

Every machine has them in another shape: version 1 (a tree for each controller), version 2 (one
tree), or both ("hybrid"). A controller is taken from wherever it is.
"""

import contextlib
import dataclasses
import errno
import os
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000  # over which the share of the cores is measured


@dataclass(frozen=True)
class Limits:
    """Of one group: bytes of memory, number of processes and threads, number of cores."""

    memory: int
    pids: int
    cpus: float


@dataclass(frozen=True)
class Trees:
    """Where groups can be made.

    Attributes:
      v1: the folder for each controller of version 1, "freezer" among them.
      v2: the folder of version 2, if it has any of the controllers or the freezer is needed there.
    """

    v1: dict[str, Path]
    v2: Path | None
    v2_controllers: frozenset[str]

    def folders(self) -> list[Path]:
        """All folders in which a group gets a folder of its own."""
        return [*dict.fromkeys(self.v1.values()), *([self.v2] if self.v2 else [])]

    def missing(self) -> list[str]:
        """The controllers that are nowhere to be had; version 2 can always freeze."""
        there = self.v1.keys() | self.v2_controllers | ({"freezer"} if self.v2 else set())
        return [name for name in (*CONTROLLERS, "freezer") if name not in there]

    def below(self, name: str) -> "Trees":
        """The same, in a new folder `name` of each; makes the folders that are not there."""
        for folder in self.folders():
            (folder / name).mkdir(exist_ok=True)
        if self.v2 and self.v2_controllers:
            _delegate(self.v2 / name, self.v2_controllers)
        v1 = {controller: folder / name for controller, folder in self.v1.items()}
        return dataclasses.replace(self, v1=v1, v2=self.v2 and self.v2 / name)


def find(mounts: str | None = None, own: str | None = None) -> Trees:
    """The trees in which this process may make groups.

    Args:
      mounts: the text of /proc/self/mountinfo; None reads it.
      own: the text of /proc/self/cgroup; None reads it.
    """
    mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    paths = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)  # version 2 has the name ""
    v1: dict[str, Path] = {}
    v2: list[Path] = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        (root, place), (kind, _, options) = before.split()[3:5], after.split(" ", 2)
        if kind == "cgroup2":
            v2 += _writable(Path(place), root, paths.get("", "/"))
        elif kind == "cgroup":
            for name in {*CONTROLLERS, "freezer"} & set(options.split(",")):
                for folder in _writable(Path(place), root, paths.get(name, "/"))[:1]:
                    v1.setdefault(name, folder)
    wanted = frozenset(CONTROLLERS) - v1.keys()
    best: tuple[Path | None, frozenset[str]] = (None, frozenset())
    for folder in v2 if wanted else ():
        if len(works := _delegate(folder, wanted)) > len(best[1]):
            best = (folder, works)
        if works == wanted:
            break
    if best[0] is None and v2 and "freezer" not in v1:
        best = (v2[0], frozenset())  # version 2 needs no controller to stop processes
    return Trees(v1, *best)


@dataclass(frozen=True)
class Group:
    """The group of one sandbox.

    Attributes:
      v1, v2, v2_controllers: as those of `Trees`, but the folders as text: sandboxes start by the
        hundred, and this takes a fraction of the time.
    """

    v1: dict[str, str]
    v2: str | None
    v2_controllers: frozenset[str]

    @property
    def folders(self) -> list[str]:
        """All folders of it."""
        return [*dict.fromkeys(self.v1.values()), *([self.v2] if self.v2 else [])]

    def attach(self, pid: int) -> None:
        """Moves a process in; what it starts from then on is in the group too."""
        for folder in self.folders:
            _write(f"{folder}/cgroup.procs", pid)

    def doors(self) -> list[int]:
        """Descriptors through which a process of one thread moves itself in by writing "0".

        Its right to do so is that of the caller. In version 1 this takes much less time than
        `attach`, for which the kernel stops all forks.
        """
        files = [f"{folder}/tasks" for folder in dict.fromkeys(self.v1.values())]
        files += [f"{self.v2}/cgroup.procs"] if self.v2 else []
        return [os.open(file, os.O_WRONLY | os.O_CLOEXEC) for file in files]

    def oom_kills(self) -> int:
        """How many of its processes were killed because the memory was used up."""
        if folder := self.v1.get("memory"):
            return _entry(f"{folder}/memory.oom_control", "oom_kill")
        return _entry(f"{self.v2}/memory.events", "oom_kill")

    def freeze(self, frozen: bool) -> None:
        """Stops all processes where they are, or lets them go on."""
        if folder := self.v1.get("freezer"):
            _write(f"{folder}/freezer.state", "FROZEN" if frozen else "THAWED")
        elif self.v2:
            _write(f"{self.v2}/cgroup.freeze", int(frozen))

    def is_frozen(self) -> bool:
        """Whether all processes stand still."""
        if folder := self.v1.get("freezer"):
            return _read(f"{folder}/freezer.state").strip() == "FROZEN"
        return _entry(f"{self.v2}/cgroup.events", "frozen") == 1

    def memory(self) -> int:
        """Bytes that its processes and their files take."""
        if folder := self.v1.get("memory"):
            return int(_read(f"{folder}/memory.usage_in_bytes"))
        return int(_read(f"{self.v2}/memory.current"))

    def remove(self) -> bool:
        """Removes the folders; False if a process is still in one of them."""
        return all([remove(folder) for folder in self.folders])


def create(trees: Trees, name: str, limits: Limits) -> Group:
    """Makes a group below `trees`."""
    group = Group(
        {controller: f"{folder}/{name}" for controller, folder in trees.v1.items()},
        trees.v2 and f"{trees.v2}/{name}",
        trees.v2_controllers,
    )
    for folder in group.folders:
        os.mkdir(folder)
    quota = max(1000, int(limits.cpus * PERIOD_US))
    if folder := group.v1.get("memory"):
        _write(f"{folder}/memory.limit_in_bytes", limits.memory)
        if os.path.exists(swap := f"{folder}/memory.memsw.limit_in_bytes"):
            _write(swap, limits.memory)
    if folder := group.v1.get("pids"):
        _write(f"{folder}/pids.max", limits.pids)
    if folder := group.v1.get("cpu"):
        _write(f"{folder}/cpu.cfs_quota_us", quota)  # of a period, which is 100 ms in a new group
    if "memory" in group.v2_controllers:
        _write(f"{group.v2}/memory.max", limits.memory)
        if os.path.exists(swap := f"{group.v2}/memory.swap.max"):
            _write(swap, 0)
    if "pids" in group.v2_controllers:
        _write(f"{group.v2}/pids.max", limits.pids)
    if "cpu" in group.v2_controllers:
        _write(f"{group.v2}/cpu.max", f"{quota} {PERIOD_US}")
    return group


def remove(folder: Path | str) -> bool:
    """Removes a group and all below it; False if one of them is still in use."""
    if _rmdir(folder):
        return True
    return all([_rmdir(path) for path, _, _ in os.walk(folder, topdown=False)])


def thaw(folder: Path) -> None:
    """Lets go on what was stopped in a group or below: in version 1 not even SIGKILL ends it."""
    for file in folder.rglob("freezer.state"):
        with contextlib.suppress(OSError):  # another process removes it
            _write(str(file), "THAWED")


def _rmdir(folder: Path | str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def _write(file: str, value: object) -> None:
    """With plain system calls, as sandboxes start by the hundred."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _writable(place: Path, root: str, own: str) -> list[Path]:
    """This process's own group, whose limits then hold as well, and those above, the nearest first.

    In version 2 a group with processes cannot be divided. A session of systemd lies in a slice of
    its user, which can.
    """
    inside = own == root or own.startswith(root.rstrip("/") + "/")
    folder = place / os.path.relpath(own, root) if inside else place
    folders = [folder, *(above for above in folder.parents if above.is_relative_to(place))]
    return [folder for folder in folders if os.access(folder, os.W_OK)]


def _delegate(folder: Path, wanted: frozenset[str]) -> frozenset[str]:
    """Hands controllers of version 2 down to the groups in `folder`; returns those that work."""
    try:
        there = wanted & frozenset((folder / "cgroup.controllers").read_text().split())
        words = " ".join(f"+{name}" for name in sorted(there))
        (folder / "cgroup.subtree_control").write_text(words)
    except OSError:
        return frozenset()  # processes in a group that is not the top one, or no permission
    return there


def _read(file: str) -> str:
    with open(file) as opened:
        return opened.read()


def _entry(file: str, name: str) -> int:
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
