"""The two ways to put up the walls of a sandbox and to start the tool server behind them."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from c2.sandbox import cgroups, command, linux
from c2.sandbox import root as roots
from c2.sandbox.protocol import WORKDIR, SandboxError
from c2.sandbox.toolserver import walls

MAX_PACKET = 1 << 17
START_S = 20.0  # for a fork to be made
SPARE = 2  # forks that wait for a sandbox
FOLDERS = {WORKDIR: 0o755, roots.HOME: 0o755, "/tmp": 0o1777, "/proc": 0o755, "/dev": 0o755}


@dataclass(frozen=True)
class Parts:
    """What one sandbox is put together from.

    Attributes:
      root: its read-only root.
      layers: folders above the root, the lowest first.
      place: empty folder.
      upper: folder that takes all changes.
      work: empty folder on the same file system.
      shm_bytes: size of /dev/shm.
      group: its control group.
      server: the tool server's end of a connection.
      client: the other end, of which only what comes may be looked at.
      errors: takes complaints.
      resources: the fields of `protocol.Resources`.
    """

    root: roots.Root
    layers: Sequence[Path]
    place: str
    upper: str
    work: str
    shm_bytes: int
    group: cgroups.Group
    server: socket.socket
    client: socket.socket
    errors: IO[bytes]
    resources: Mapping[str, float]


class Start(Protocol):
    """A sandbox that is being started.

    Attributes:
      ended: descriptor that becomes readable when all of it has ended.
      info: descriptor that becomes readable when the walls stand, or cannot.
      process: descriptor of the first process, from `release` on.
    """

    ended: int
    info: int
    process: int

    def release(self) -> None:
        """Lets the tool server go, once `info` is readable; raises `SandboxError` if it cannot."""

    def kill(self) -> None:
        """Ends all of its processes."""

    def free(self) -> None:
        """Closes the descriptors, after the end."""


class Walls(Protocol):
    """A way to start sandboxes.

    Attributes:
      news: descriptor that becomes readable when `hear` is to be called, or None.
      overhead: what they take themselves of the limits of a sandbox: bytes of memory, processes.
    """

    news: int | None
    overhead: tuple[int, int]

    def start(self, parts: Parts) -> Start:
        """Begins to start one; raises OSError or SandboxError if that fails at once."""

    def hear(self) -> None:
        """Does what is to be done meanwhile."""

    def close(self) -> None:
        """After the end of all sandboxes."""


class Bubblewrap:
    """A bubblewrap for each, which starts an interpreter."""

    news = None
    overhead = (0, 0)

    def __init__(self, bwrap: Path, rules: Path, ids: tuple[int, int] | None) -> None:
        self._bwrap, self._rules, self._ids = bwrap, rules, ids

    def start(self, parts: Parts) -> "BubblewrapStart":
        """As `Walls.start`."""
        info, their_info = os.pipe()
        their_block, block = os.pipe()
        with open(self._rules, "rb") as rules:
            fds = [parts.server.fileno(), rules.fileno(), their_info, their_block]
            options = command.arguments(
                command.Parts(
                    parts.root, parts.layers, parts.upper, parts.work, parts.shm_bytes, *fds[1:]
                )
            )
            server = roots.command(parts.root, fds[0])
            try:
                with linux.as_user(self._ids):
                    process = subprocess.Popen(
                        [str(self._bwrap), *options, "--", *server], pass_fds=fds, cwd="/", env={},
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=parts.errors,
                    )  # fmt: skip
            except BaseException:
                os.close(info)
                os.close(block)
                raise
            finally:
                os.close(their_info)
                os.close(their_block)
        return BubblewrapStart(process, parts.group, info, block)

    def hear(self) -> None:
        """As `Walls.hear`."""

    def close(self) -> None:
        """As `Walls.close`."""


class BubblewrapStart:
    """As `Start`."""

    def __init__(
        self, process: subprocess.Popen, group: cgroups.Group, info: int, block: int
    ) -> None:
        self.ended, self.info, self.process = os.pidfd_open(process.pid), info, -1
        self._process, self._group, self._block = process, group, block

    def release(self) -> None:
        """Puts the first process under its limits before it starts anything."""
        text = os.read(self.info, MAX_PACKET)
        while more := os.read(self.info, MAX_PACKET):
            text += more
        try:
            first = json.loads(text)["child-pid"]
            self.process = os.pidfd_open(first)
            self._group.attach(first)
            os.write(self._block, b"x")
        except (ValueError, KeyError, OSError) as error:
            raise SandboxError("it did not come up") from error

    def kill(self) -> None:
        """As `Start.kill`."""
        if self.process < 0:
            self._process.kill()
        else:
            _kill(self.process)

    def free(self) -> None:
        """As `Start.free`."""
        self._process.wait()
        for fd in (self.ended, self.info, self._block, self.process):
            if fd >= 0:
                os.close(fd)


class Zygote:
    """A fork of one process for each, made ahead, which puts up its own walls.

    Attributes:
      news: as of `Walls`.
    """

    overhead = (0, 0)

    def __init__(
        self, root: roots.Root, place: Path, rules: Path, ids: tuple[int, int] | None
    ) -> None:
        self._root = root
        self._dev = str(roots.make_dev(place / "dev"))
        self._covered = [name for name in walls.COVERED if os.path.exists(f"/proc/{name}")]
        for here, _ in root.binds:
            walls.restrict(here, walls.MS_RDONLY | walls.MS_NOSUID | walls.MS_NODEV)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        outside = ids or (os.getuid(), os.getgid())
        start, env = roots.zygote(root, theirs.fileno(), rules, outside)
        with theirs, linux.as_user(ids):
            self._process = subprocess.Popen(
                start, pass_fds=[theirs.fileno()], cwd="/", env=env, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.news = self._socket.fileno()
        self._spare: list[tuple[int, socket.socket]] = []
        self._ordered = 0
        self._order(SPARE)

    def start(self, parts: Parts) -> "ZygoteStart":
        """As `Walls.start`."""
        lower = ":".join(str(path) for path in (*reversed(parts.layers), parts.root.base))
        request = {
            "overlay": f"lowerdir={lower},upperdir={parts.upper},workdir={parts.work},userxattr",
            "place": parts.place,
            "folders": FOLDERS,
            "binds": (*parts.root.binds, (self._dev, "/dev")),
            "covered": self._covered,
            "shm": parts.shm_bytes,
            "python": parts.root.python if parts.root is self._root else None,
        }
        info, theirs = os.pipe()
        groups = parts.group.doors()
        try:
            fds = [parts.server.fileno(), parts.errors.fileno(), theirs, *groups]
            process = self._send(json.dumps(request).encode(), fds)
        except BaseException:
            os.close(info)
            raise
        finally:
            for fd in (theirs, *groups):
                os.close(fd)
        return ZygoteStart(process, info, functools.partial(self._order, SPARE))

    def hear(self) -> None:
        """As `Walls.hear`: takes a new fork."""
        with contextlib.suppress(BlockingIOError):  # `start` was quicker
            self._take(0)

    def close(self) -> None:
        """As `Walls.close`."""
        self._socket.close()
        self._process.wait()
        for process, requests in self._spare:
            os.close(process)
            requests.close()

    def _send(self, request: bytes, fds: Sequence[int]) -> int:
        """Gives a request to the oldest fork that is alive."""
        while True:
            if not self._spare:
                self._order(1)
                self._take(START_S)
            process, requests = self._spare.pop(0)
            try:
                with requests:
                    socket.send_fds(requests, [request], fds)
                return process
            except OSError:  # somebody has killed it
                os.close(process)

    def _take(self, wait_s: float) -> None:
        self._socket.settimeout(wait_s)
        try:
            packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET, 2)
        except (ConnectionError, TimeoutError):
            packet = b""
        if not packet:
            raise SystemExit("the process that becomes tool servers does not answer")
        self._spare.append((fds[0], socket.socket(fileno=fds[1])))
        self._ordered -= 1

    def _order(self, count: int) -> None:
        """Lets forks be made until so many are there or on their way."""
        while len(self._spare) + self._ordered < count:
            self._ordered += 1
            with contextlib.suppress(OSError):  # `hear` will say why
                self._socket.send(b"x")


class ZygoteStart:
    """As `Start`."""

    def __init__(self, process: int, info: int, order: Callable[[], None]) -> None:
        self.ended, self.info, self.process = process, info, process
        self._order = order

    def release(self) -> None:
        """As `Start.release`; only now the next fork is made, which would have held this one up."""
        self._order()
        if os.read(self.info, MAX_PACKET) != b"ready":
            raise SandboxError("it did not come up")

    def kill(self) -> None:
        """As `Start.kill`."""
        _kill(self.ended)

    def free(self) -> None:
        """As `Start.free`."""
        self._order()
        os.close(self.ended)
        os.close(self.info)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
