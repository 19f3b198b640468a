"""Evaluations of Inspect AI in these sandboxes; needs its package `inspect_ai`.

  import c2.sandbox.inspect_sandbox
  Task(..., sandbox=SandboxEnvironmentSpec("c2", Config(backend="zygote")))

Importing this module registers the type "c2". Every sample gets a sandbox of its own, without
network. What Inspect's contract asks for and is refused: other users than the one inside, and more
than 256 KiB of an output, which ends in its `OutputLimitExceededError`.
"""

import functools
import posixpath
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import anyio
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel

from c2.sandbox import protocol
from c2.sandbox import root as roots
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.gvisor import GVisor
from c2.sandbox.plain import Plain
from c2.sandbox.protocol import MAX_OUTPUT, WORKDIR, Backend, Handle, Resources, Spec, ToolError
from c2.sandbox.toolserver.frames import MAX_DATA
from c2.sandbox.zygote import Zygote

BACKENDS = {"bwrap": Bwrap, "zygote": Zygote, "gvisor": GVisor, "plain": Plain}
DAY_S = 86400.0
# Reads standard input from a file, for what does not fit into one message.
FROM_FILE = 'file=$0; exec <"$file"; rm "$file"; exec "$@"'

T = TypeVar("T")


class Config(BaseModel, frozen=True):
    """Settings of a task's sandboxes.

    Attributes:
      backend: what they run on.
      memory_mb: as `Resources`, like the others.
      disk_mb: MiB of files.
      pids: processes and threads.
      cpus: cores.
    """

    backend: Literal["bwrap", "zygote", "gvisor", "plain"] = "bwrap"
    memory_mb: int = 512
    disk_mb: int = 256
    pids: int = 256
    cpus: float = 1.0


@sandboxenv(name="c2")
class Sandbox(SandboxEnvironment):
    """A sandbox as Inspect sees it."""

    _backends: ClassVar[dict[str, Backend]] = {}
    _tasks: ClassVar[dict[str, int]] = {}

    def __init__(self, backend: Backend, handle: Handle) -> None:
        super().__init__()
        self._backend, self._handle = backend, handle

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        """Starts the backend, which tasks with the same one share."""
        kind = _config(config).backend
        cls._tasks[kind] = cls._tasks.get(kind, 0) + 1
        if kind not in cls._backends:
            cls._backends[kind] = await anyio.to_thread.run_sync(BACKENDS[kind])

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        """Ends the backend after the last task; there is nothing that could be kept."""
        kind = _config(config).backend
        cls._tasks[kind] -= 1
        if not cls._tasks[kind] and (backend := cls._backends.pop(kind, None)):
            await anyio.to_thread.run_sync(backend.shutdown)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """A sandbox for one sample."""
        settings = _config(config)
        backend = cls._backends[settings.backend]
        resources = Resources(**settings.model_dump(exclude={"backend"}))
        spec = Spec(resources=resources, deadline_s=DAY_S, ttl_s=DAY_S)
        handle = await anyio.to_thread.run_sync(backend.create, spec)
        return {"default": cls(backend, handle)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Ends the sandboxes of a sample."""
        for environment in environments.values():
            sandbox = environment.as_type(cls)
            await anyio.to_thread.run_sync(sandbox._backend.close, sandbox._handle)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """The settings in a log."""
        return Config(**config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """As `SandboxEnvironment.exec`."""
        if user not in (None, "user", str(roots.USER)):
            raise SandboxUserUnsupportedError(f"user {user!r}: inside is only the user 'user'")
        data = input.encode() if isinstance(input, str) else input or b""
        if len(data) > MAX_DATA:
            file = f"/tmp/inspect-input-{id(data)}"
            await self._call(self._backend.write, file, data)
            cmd, data = ["sh", "-c", FROM_FILE, file, *cmd], b""
        result = await self._call(
            self._backend.exec, cmd, cwd=_absolute(cwd or WORKDIR), env=env, stdin=data,
            timeout_s=timeout or DAY_S, max_output=MAX_OUTPUT,
        )  # fmt: skip
        stdout, stderr = (
            text.decode("utf-8", "replace") for text in (result.stdout, result.stderr)
        )
        if result.timed_out:
            raise TimeoutError(f"{cmd[0]}: it took more than {timeout} seconds")
        if result.truncated:
            raise OutputLimitExceededError(f"{MAX_OUTPUT >> 10} KiB", stdout + stderr)
        if result.error is not None:
            if "Permission denied" in result.error:
                raise PermissionError(result.error)
            return ExecResult(False, 127, stdout, stderr + result.error)
        code = 128 + result.signal if result.code is None else result.code
        return ExecResult(code == 0, code, stdout, stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """As `SandboxEnvironment.write_file`."""
        path, data = _absolute(file), contents.encode() if isinstance(contents, str) else contents
        if (await self._call(self._backend.stat, path)).kind == "folder":
            raise IsADirectoryError(f"{path} is a directory")
        await self._call(self._backend.write, path, data)

    async def read_file(self, file: str, text: bool = True) -> Any:
        """As `SandboxEnvironment.read_file`."""
        path, limit = _absolute(file), SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        kind = (await self._call(self._backend.stat, path)).kind
        if kind is None:
            raise FileNotFoundError(f"{path}: No such file or directory")
        if kind == "folder":
            raise IsADirectoryError(f"{path} is a directory")
        data = await self._call(self._backend.read, path, limit=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def _call(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            call = functools.partial(method, self._handle, *args, **kwargs)
            return await anyio.to_thread.run_sync(call)
        except ToolError as error:
            if "Permission denied" in str(error):
                raise PermissionError(str(error)) from error
            raise


def _absolute(path: str) -> str:
    return posixpath.join(WORKDIR, path)


def _config(config: Any) -> Config:
    if config is None:
        return Config()
    if not isinstance(config, Config):
        raise protocol.SandboxError(f"config: {config!r}; legal is a {Config.__name__} or nothing")
    return config
