"""The calls of the protocol that the tool server inside a sandbox answers."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from c2.config import ConfigError
from c2.sandbox.client import Client
from c2.sandbox.protocol import (
    MAX_OUTPUT,
    MAX_READ,
    MIN_OUTPUT,
    WORKDIR,
    Chunk,
    ExecResult,
    FileStat,
    Handle,
    SandboxLost,
    ToolError,
)
from c2.sandbox.toolserver.frames import MAX_DATA, pack, unpack

GRACE_S = 5.0  # how long the server may take to kill a command after its deadline


class Served:
    """Base of the backends that put a tool server into every sandbox."""

    def _client(self, handle: Handle) -> Client:
        """The connection to a sandbox; raises `SandboxLost` if it is gone."""
        raise NotImplementedError

    def _path(self, handle: Handle, path: str) -> str:
        """A path as the tool server knows it."""
        return path

    def _env(self, handle: Handle) -> dict[str, str]:
        """The environment of its commands."""
        raise NotImplementedError

    def _new_oom_kills(self, handle: Handle) -> int:
        """How many processes ran out of memory since this was last asked."""
        raise NotImplementedError

    def _lost(self, handle: Handle, error: SandboxLost) -> SandboxLost:
        """The error with what the backend knows about the reason."""
        raise NotImplementedError

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
        """As `protocol.Backend.exec`."""
        params = self._command(handle, argv, cwd, env, stdin, timeout_s, max_output)
        raw = self._call(handle, "exec", _as_dict, wait_s=timeout_s + GRACE_S, **params)
        return self._result(handle, raw, max_output)

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
        """As `protocol.Backend.stream`."""
        params = self._command(handle, argv, cwd, env, stdin, timeout_s, max_output)
        try:
            yield from (
                item if isinstance(item, Chunk) else self._result(handle, item, max_output)
                for item in self._client(handle).stream(
                    _as_dict, wait_s=timeout_s + GRACE_S, **params
                )
            )
        except SandboxLost as error:
            raise self._lost(handle, error) from error

    def read(self, handle: Handle, path: str, *, offset: int = 0, limit: int = MAX_READ) -> bytes:
        """As `protocol.Backend.read`."""
        data = bytearray()
        while len(data) < limit:
            part = min(MAX_DATA, limit - len(data))
            more = self._call(
                handle, "read", lambda raw, n=part: _data(raw, "data", n),
                path=self._path(handle, path), offset=offset + len(data), limit=part,
            )  # fmt: skip
            data += more
            if len(more) < part:
                break
        return bytes(data)

    def write(self, handle: Handle, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """As `protocol.Backend.write`."""
        path = self._path(handle, path)
        for offset in range(0, len(data) or 1, MAX_DATA):
            part = pack(data[offset : offset + MAX_DATA])
            self._call(
                handle, "write", _as_dict, path=path, data=part, offset=offset or None, mode=mode
            )

    def stat(self, handle: Handle, path: str) -> FileStat:
        """As `protocol.Backend.stat`."""
        return self._call(handle, "stat", _file_stat, path=self._path(handle, path))

    def list_dir(self, handle: Handle, path: str) -> dict[str, FileStat]:
        """As `protocol.Backend.list_dir`."""
        return self._call(handle, "list", _entries, path=self._path(handle, path))

    def start(self, handle: Handle, argv: Sequence[str], *, timeout_s: float | None = None) -> int:
        """As `protocol.SupportsJobs.start`."""
        params = self._command(handle, argv, WORKDIR, None, b"", timeout_s, 65536)
        return self._call(handle, "start", lambda raw: _of(raw, "job", int), **params)

    def prepare(self, handle: Handle, argv: Sequence[str]) -> int:
        """As `protocol.SupportsJobs.prepare`."""
        params = self._command(handle, argv, WORKDIR, None, b"", None, MAX_OUTPUT)
        del params["stdin"], params["timeout"]
        return self._call(handle, "prepare", lambda raw: _of(raw, "job", int), **params)

    def finish(
        self, handle: Handle, number: int, stdin: bytes, *, timeout_s: float = 60.0
    ) -> ExecResult:
        """As `protocol.SupportsJobs.finish`."""
        _check_command(stdin, timeout_s)
        raw = self._call(
            handle, "finish", _as_dict, wait_s=timeout_s + GRACE_S, job=number,
            stdin=pack(stdin), timeout=timeout_s,
        )  # fmt: skip
        return self._result(handle, raw, MAX_OUTPUT)

    def jobs(self, handle: Handle) -> list[int]:
        """As `protocol.SupportsJobs.jobs`."""
        return self._call(handle, "jobs", _numbers)

    def job(self, handle: Handle, number: int) -> ExecResult | None:
        """As `protocol.SupportsJobs.job`."""
        raw = self._call(handle, "job", _as_dict, job=number)
        return self._result(handle, raw, MAX_OUTPUT) if raw.get("done") is True else None

    def kill(self, handle: Handle, number: int) -> None:
        """As `protocol.SupportsJobs.kill`."""
        self._call(handle, "kill", _as_dict, job=number)

    def _call(self, handle: Handle, method: str, parse: Any, **params: Any) -> Any:
        try:
            return self._client(handle).call(method, parse, **params)
        except SandboxLost as error:
            raise self._lost(handle, error) from error

    def _command(
        self,
        handle: Handle,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str] | None,
        stdin: bytes,
        timeout_s: float | None,
        max_output: int,
    ) -> dict[str, Any]:
        if not MIN_OUTPUT <= max_output <= MAX_OUTPUT:
            raise ConfigError(f"max_output: {max_output}; legal are {MIN_OUTPUT} to {MAX_OUTPUT}")
        if isinstance(argv, str) or not argv:
            raise ConfigError(f"argv: {argv!r}; legal is a list of program and arguments")
        _check_command(stdin, timeout_s)
        env = self._env(handle) | dict(env or {})
        return {
            "argv": list(argv), "cwd": self._path(handle, cwd), "env": env, "stdin": pack(stdin),
            "timeout": timeout_s, "cap": max_output,
        }  # fmt: skip

    def _result(self, handle: Handle, raw: dict[str, Any], cap: int) -> ExecResult:
        try:
            result = _exec_result(raw, cap)
        except (KeyError, TypeError, ValueError) as error:
            self._client(handle).close()
            lost = SandboxLost(f"the tool server sent nonsense: {error}", "exited")
            raise self._lost(handle, lost) from error
        return dataclasses.replace(result, oom=self._new_oom_kills(handle) > 0)


def _check_command(stdin: bytes, timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s: {timeout_s}; legal are finite numbers > 0")
    if len(stdin) > MAX_DATA:
        raise ToolError(f"stdin: {len(stdin)} bytes; at most {MAX_DATA} are legal")


def _as_dict(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise TypeError(f"a {type(raw).__name__} as a result")
    return raw


def _of(raw: Any, key: str, *kinds: type | None) -> Any:
    value = _as_dict(raw)[key]
    if type(value) not in [type(None) if kind is None else kind for kind in kinds]:
        raise TypeError(f"{key} is a {type(value).__name__}")
    return value


def _data(raw: Any, key: str, limit: int) -> bytes:
    data = unpack(_of(raw, key, str))
    if len(data) > limit:
        raise ValueError(f"{key} has {len(data)} bytes, {limit} were asked for")
    return data


def _exec_result(raw: dict[str, Any], cap: int) -> ExecResult:
    return ExecResult(
        code=_of(raw, "code", int, None),
        signal=_of(raw, "signal", int, None),
        stdout=_data(raw, "stdout", cap),
        stderr=_data(raw, "stderr", cap),
        truncated=_of(raw, "truncated", bool),
        killed=_of(raw, "killed", str, None),
        oom=False,
        error=_of(raw, "error", str, None),
        duration_s=float(_of(raw, "duration", float, int)),
        job=_of(raw, "job", int),
        left=_of(raw, "left", bool),
    )


def _file_stat(raw: Any) -> FileStat:
    kind = _of(raw, "kind", str, None)
    if kind not in ("file", "folder", "link", "other", None):
        raise ValueError(f"kind {kind[:20]!r}")
    return FileStat(kind, _of(raw, "size", int), _of(raw, "mode", int), _of(raw, "mtime_ns", int))


def _entries(raw: Any) -> dict[str, FileStat]:
    listed = _of(raw, "entries", list)
    names = (unpack(_of(entry, "name", str)).decode("utf-8", "surrogateescape") for entry in listed)
    return {name: _file_stat(entry) for name, entry in zip(names, listed, strict=True)}


def _numbers(raw: Any) -> list[int]:
    return [int(number) for number in _of(raw, "jobs", list)]
