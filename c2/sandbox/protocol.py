"""What every sandbox backend can do, what some can, and the records that go in and out.

A backend declares its capabilities; a request for another one is refused with one line, never
served in a weaker way. Whatever comes out of a sandbox is untrusted data.

Errors say who is to blame. `ToolError`: the call cannot be done, which the agent that asked for it
should see. `SandboxLost`: the sandbox is gone; `reason` tells whether code inside used up what it
was given or the machinery failed. `Unsupported`: the backend cannot do this at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

from c2.config import ConfigError
from c2.sandbox.egress.policy import Policy

MIN_OUTPUT, MAX_OUTPUT = 256, 1 << 18
MAX_READ = 1 << 26
WORKDIR = "/repo"

Reason = Literal["closed", "deadline", "lease", "exited", "backend"]
Network = Literal["none"] | Policy


class SandboxError(Exception):
    """Any failure of a sandbox or backend; the message is one line."""


class Unsupported(SandboxError):
    """The backend has no such capability."""


class ToolError(SandboxError):
    """A call that cannot be done, such as reading a file that does not exist."""


class SandboxLost(SandboxError):
    """The sandbox does not exist any more.

    Attributes:
      reason: "closed" (by its owner), "deadline" (older than `Spec.deadline_s`), "lease" (not
        renewed for `Spec.ttl_s`), "exited" (its first process ended or stopped answering), or
        "backend" (what runs the sandboxes has failed).
    """

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Hard limits of a sandbox.

    Attributes:
      memory_mb: memory of all processes, MiB.
      disk_mb: what they write to files, MiB; kept in memory, beyond `memory_mb`.
      pids: processes and threads.
      cpus: processor cores' worth of time.
    """

    memory_mb: int = 512
    disk_mb: int = 256
    pids: int = 256
    cpus: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("memory_mb", 32), ("disk_mb", 1), ("pids", 16), ("cpus", 0.01)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal are {least} and more")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a sandbox is made of.

    Attributes:
      image: name of a layer that is a whole root, with Python 3.8 or newer as /usr/bin/python3;
        None takes the programs of this machine, read-only.
      layers: names of file layers of the backend on top of that, the lowest first.
      resources: hard limits.
      env: environment variables of all commands, beside HOME, PATH and LANG.
      deadline_s: seconds after which the sandbox is ended in any case.
      ttl_s: seconds without a renewal after which it is ended.
      network: "none": there is no network, not even for the name service; or what may be reached,
        on backends with "network_policy".
      labels: for people and accounting; nothing acts on them.
    """

    image: str | None = None
    layers: tuple[str, ...] = ()
    resources: Resources = Resources()
    env: dict[str, str] = field(default_factory=dict)
    deadline_s: float = 3600.0
    ttl_s: float = 600.0
    network: Network = "none"
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("deadline_s", "ttl_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: {getattr(self, name)}; legal are finite numbers > 0")
        if self.network != "none" and not isinstance(self.network, Policy):
            raise ConfigError(f"network: {self.network!r}; legal are 'none' and a Policy")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ConfigError(f"env.{name!r}: a name has no '=', and neither has a zero byte")


@dataclass(frozen=True)
class Handle:
    """Names a sandbox of a backend."""

    backend: str
    id: str


@dataclass(frozen=True)
class ExecResult:
    """How a command ended.

    Attributes:
      code: exit status, or None if a signal ended it.
      signal: number of that signal, or None.
      stdout: what it wrote, at most as many bytes as asked for: the beginning and the end around
        a line that says how much is missing, not cut inside a UTF-8 character.
      stderr: likewise.
      truncated: whether anything is missing from the two.
      killed: why it was killed: "timeout", "output" (it wrote far too much), "asked", or
        "supervisor" (it killed the process that looks after it); else None.
      oom: whether processes of the sandbox were killed meanwhile because its memory was used up.
      error: why it could not be started, or None.
      duration_s: seconds from its start to its end.
      job: its number in the sandbox.
      left: whether processes that it started are still running.
    """

    code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    killed: str | None
    oom: bool
    error: str | None
    duration_s: float
    job: int
    left: bool

    @property
    def timed_out(self) -> bool:
        """Whether it was killed at its deadline."""
        return self.killed == "timeout"

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.code == 0 and self.killed is None


@dataclass(frozen=True)
class Chunk:
    """A piece of output of a running command."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True)
class FileStat:
    """What is at a path; `kind` is None where nothing is, and links are not followed."""

    kind: Literal["file", "folder", "link", "other"] | None
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class Status:
    """Of a sandbox: whether it runs, why not, its age in seconds, and its memory in bytes."""

    alive: bool
    reason: Reason | None
    age_s: float
    memory: int | None


class Backend(Protocol):
    """What every backend can do. All calls block, and may come from any thread.

    Every call with a handle raises `SandboxLost` when that sandbox is gone.
    """

    name: str
    capabilities: frozenset[str]

    def create(self, spec: Spec) -> Handle:
        """Starts a sandbox; raises `SandboxError` if it does not come up."""

    def exec(
        self,
        handle: Handle,
        argv: Sequence[str],
        *,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output: int = 65536,
    ) -> ExecResult:
        """Runs a command to its end; what it leaves running in the background goes on.

        Args:
          handle: the sandbox.
          argv: program and arguments; no shell is involved.
          cwd: working directory.
          env: variables beside those of the sandbox.
          stdin: its standard input, at most 512 KiB.
          timeout_s: seconds after which it and all that it started get SIGTERM, then SIGKILL.
          max_output: bytes kept of each of its two outputs, 256 to 262144.
        """

    def stream(
        self,
        handle: Handle,
        argv: Sequence[str],
        *,
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output: int = 65536,
    ) -> Iterator[Chunk | ExecResult]:
        """As `exec`, but yields the first `max_output` bytes while they come, the result last."""

    def read(self, handle: Handle, path: str, *, offset: int = 0, limit: int = MAX_READ) -> bytes:
        """Up to `limit` bytes of a regular file."""

    def write(self, handle: Handle, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, making its folders."""

    def stat(self, handle: Handle, path: str) -> FileStat:
        """What is at a path."""

    def list_dir(self, handle: Handle, path: str) -> dict[str, FileStat]:
        """The entries of a folder, at most 2,000."""

    def status(self, handle: Handle) -> Status:
        """Whether the sandbox runs; does not raise `SandboxLost`."""

    def renew(self, handle: Handle) -> None:
        """Says that its owner is alive: it gets another `Spec.ttl_s`."""

    def close(self, handle: Handle) -> None:
        """Ends the sandbox and frees all that it holds; closing twice is harmless."""

    def shutdown(self) -> None:
        """Closes all sandboxes and the backend itself."""


@runtime_checkable
class SupportsJobs(Protocol):
    """Capability "jobs": commands in the background, and commands that wait for their input."""

    def start(self, handle: Handle, argv: Sequence[str], *, timeout_s: float | None = None) -> int:
        """Starts a command and returns the number of its job."""

    def prepare(self, handle: Handle, argv: Sequence[str]) -> int:
        """Starts a command without input yet, which can load meanwhile; the number of its job.

        An isolated interpreter (python3 -I -S -B -c SOURCE) may be a fork of the tool server, so it
        can find in its memory what earlier commands of this sandbox were given.
        """

    def finish(
        self, handle: Handle, number: int, stdin: bytes, *, timeout_s: float = 60.0
    ) -> ExecResult:
        """Gives a prepared command its input, at most 512 KiB, and waits for its end.

        Nothing that it has forked before can have seen the input. The deadline counts from now on;
        262144 bytes are kept of each output.
        """

    def jobs(self, handle: Handle) -> list[int]:
        """Jobs of which processes are running, those that `exec` left included."""

    def job(self, handle: Handle, number: int) -> ExecResult | None:
        """How the job's command ended; None while it runs."""

    def kill(self, handle: Handle, number: int) -> None:
        """Kills all processes of a job."""


@runtime_checkable
class SupportsLayers(Protocol):
    """Capability "layers": trees of files below many sandboxes, and snapshots that become such."""

    def add_layer(self, source: str, *, at: str = WORKDIR) -> str:
        """Copies a folder of this machine into a layer that shows it at `at`; returns its name."""

    def snapshot(self, handle: Handle) -> str:
        """A layer of all that the sandbox has changed so far; the sandbox goes on."""

    def drop_layer(self, name: str) -> None:
        """Frees a layer once no sandbox uses it."""


@runtime_checkable
class SupportsFork(Protocol):
    """Capability "fork": copies of a sandbox's files in new sandboxes; no processes."""

    def fork(self, handle: Handle, count: int = 1) -> list[Handle]:
        """New sandboxes that start with the files of this one; no change crosses over."""


@runtime_checkable
class SupportsMemorySnapshot(Protocol):
    """Capability "memory_snapshot": running processes are part of the snapshot."""

    def checkpoint(self, handle: Handle) -> str:
        """Saves files and processes; the sandbox goes on."""

    def restore(self, checkpoint: str) -> Handle:
        """A new sandbox that goes on from there."""

    def drop_checkpoint(self, checkpoint: str) -> None:
        """Frees a checkpoint; sandboxes that were made of it go on."""


@runtime_checkable
class SupportsPause(Protocol):
    """Capability "pause": processes can be stopped, and use no processor until resumed."""

    def pause(self, handle: Handle) -> None:
        """Stops all processes; calls wait until `resume`."""

    def resume(self, handle: Handle) -> None:
        """Lets them go on."""


@runtime_checkable
class SupportsNetworkPolicy(Protocol):
    """Capability "network_policy": what the sandbox may reach can be changed while it runs."""

    def set_network_policy(self, handle: Handle, policy: Network) -> None:
        """Puts a policy into force; what goes on against it is cut off before this returns."""


CAPABILITIES = {
    "jobs": SupportsJobs,
    "layers": SupportsLayers,
    "fork": SupportsFork,
    "memory_snapshot": SupportsMemorySnapshot,
    "pause": SupportsPause,
    "network_policy": SupportsNetworkPolicy,
}
B = TypeVar("B", bound=Backend)


def require(backend: B, *capabilities: str) -> B:
    """Returns the backend if it has declared all capabilities.

    Raises:
      Unsupported: otherwise, naming what is missing.
    """
    if missing := [name for name in capabilities if name not in backend.capabilities]:
        has = ", ".join(sorted(backend.capabilities)) or "none"
        raise Unsupported(f"backend {backend.name!r} has no {missing[0]!r}; it has: {has}")
    return backend
