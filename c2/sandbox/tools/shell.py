"""Shell commands in a sandbox, in the foreground and in the background."""

import itertools

from c2.sandbox.protocol import Backend, ExecResult, Handle, ToolError
from c2.sandbox.tools import calls
from c2.sandbox.tools.toolset import Tool

# Both outputs in one, in the order of writing; bash where there is one, for what models write.
_RUN = 'exec 2>&1; exec "$(command -v bash || command -v sh)" -c "$1"'
_RUN_TO_FILE = f'exec >"$2"; {_RUN}'
_TAIL = 8192  # bytes of a background job's output in an answer


class Commands:
    """The tools `shell` and `job` of one sandbox.

    A command that ends at its deadline is killed with all that it has started. Background commands
    write to a file in /tmp, which other tools can read too.
    """

    def __init__(self, backend: Backend, handle: Handle, max_s: float, max_result: int) -> None:
        self._backend, self._handle = backend, handle
        self._max_s, self._max_output = max_s, max_result // 2
        self._logs: dict[int, str] = {}
        self._count = itertools.count(1)

    def tools(self) -> list[Tool]:
        """Both tools; `job` only where the backend has jobs."""
        job = [Tool(calls.Job, self.job)] if "jobs" in self._backend.capabilities else []
        return [Tool(calls.Shell, self.shell), *job]

    def shell(self, call: calls.Shell) -> str:
        """As `calls.Shell`."""
        if not 0 < call.timeout_s <= self._max_s:
            raise ToolError(f"timeout_s: {call.timeout_s}; legal are > 0 to {self._max_s:g}")
        if call.background:
            return self._start(call.command)
        result = self._backend.exec(
            self._handle, ["sh", "-c", _RUN, "sh", call.command],
            timeout_s=call.timeout_s, max_output=self._max_output,
        )  # fmt: skip
        return shown(result, call.timeout_s)

    def job(self, call: calls.Job) -> str:
        """As `calls.Job`."""
        log = self._logs.get(call.number)
        if log is None:
            there = ", ".join(map(str, self._logs)) or "none"
            raise ToolError(f"no job {call.number}; there are {there}")
        if call.kill:
            self._backend.kill(self._handle, call.number)
        size = self._backend.stat(self._handle, log).size
        tail = self._backend.read(self._handle, log, offset=max(size - _TAIL, 0), limit=_TAIL)
        left_out = [f"[{size - len(tail)} bytes before this are in {log}]"] * (size > len(tail))
        ending = self._backend.job(self._handle, call.number)
        state = "[it runs]" if ending is None else _ending(ending, None)
        return "\n".join([*left_out, tail.decode(errors="replace").rstrip("\n"), state]).lstrip(
            "\n"
        )

    def _start(self, command: str) -> str:
        if "jobs" not in self._backend.capabilities:
            raise ToolError("background: this environment has no background commands")
        log = f"/tmp/job-{next(self._count)}.log"
        self._backend.write(self._handle, log, b"")
        number = self._backend.start(
            self._handle, ["sh", "-c", _RUN_TO_FILE, "sh", command, log], timeout_s=None
        )
        self._logs[number] = log
        return f"[job {number} runs; its output goes to {log}]"


def shown(result: ExecResult, timeout_s: float) -> str:
    """What an agent sees of a command: its output and how it ended."""
    # Its own standard error is empty unless the shell itself failed.
    output = (result.stdout + result.stderr).decode(errors="replace").rstrip("\n")
    return "\n".join(filter(None, [output, _ending(result, timeout_s)]))


def _ending(result: ExecResult, timeout_s: float | None) -> str:
    if result.error is not None:
        raise ToolError(result.error)
    if result.killed is not None:
        reasons = {
            "timeout": f"it ran longer than {timeout_s:g} s" if timeout_s else "its deadline",
            "output": "it wrote far too much",
            "asked": "you asked for it",
        }
        how = f"killed: {reasons.get(result.killed, 'it attacked what looks after it')}"
    elif result.signal is not None:
        how = f"ended by signal {result.signal}"
    else:
        how = f"exit status {result.code}"
    memory = "; memory ran out" if result.oom else ""
    left = "; it left processes running" if result.left else ""
    return f"[{how}{memory}{left}]"
