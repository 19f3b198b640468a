"""The loop of the tool server: one thread, one socket, any number of commands."""

import json
import os
import select
import sys
import time

from . import files
from .frames import Decoder, FrameError, encode, pack, unpack

CHUNK = 1 << 16
BACKLOG = 1 << 22  # bytes of unsent answers above which no more output is read from commands
KEPT = 16  # finished background jobs that can still be asked for
MAX_LINE = 500  # characters of a refusal


def main(fd, program, path):
    """Serves the socket `fd` until the other side closes it.

    Args:
      fd: the socket.
      program: the file of this interpreter as commands find it, or None if they cannot.
      path: of its own modules, there.
    """
    Server(fd, program, path).run()


class Server:
    """The state of a tool server."""

    def __init__(self, fd, program, path):
        self._socket = fd
        os.set_blocking(fd, False)
        self._decoder = Decoder()
        self._out = bytearray()
        self._jobs = {}
        self._last = 0
        self._wake = None
        self._python = program, path
        self._held = False
        self._calls = {
            "ping": self._ping, "exec": self._exec, "start": self._start, "jobs": self._list_jobs,
            "prepare": self._prepare, "finish": self._finish, "job": self._job, "kill": self._kill,
            "read": files.read, "write": files.write, "stat": files.stat_path,
            "list": files.list_folder, "hold": self._hold, "resume": self._resume,
        }  # fmt: skip

    def run(self):
        """Serves until the other side closes the connection or sends what is no frame."""
        while True:
            readers = self._poll()
            if self._wake in readers:
                os.read(self._wake, CHUNK)
            if self._socket in readers and not self._receive():
                return
            if not self._held:
                self._move_output(readers)
                self._reap()
            if not self._flush():
                return

    def _poll(self):
        """Waits until something is to be done; returns the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        if self._held:
            return {fd for fd, _ in poll.poll()}
        if self._wake is not None:
            poll.register(self._wake, select.POLLIN)
        now = time.monotonic()
        waits = [job.advance(now) for job in self._jobs.values()]
        for job in self._jobs.values():
            if job.takes:
                poll.register(job.stdin_pipe, select.POLLOUT)
            for name, fd in job.pipes.items():
                if name == "status" or len(self._out) < BACKLOG:
                    poll.register(fd, select.POLLIN)
        due = min((wait for wait in waits if wait is not None), default=None)
        ready = poll.poll(None if due is None else due * 1000)
        return {fd for fd, _ in ready}

    def _receive(self):
        try:
            data = os.read(self._socket, CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            messages = self._decoder.feed(data)
        except FrameError:
            return False
        for message in messages:
            self._handle(message)
        return bool(data)

    def _handle(self, message):
        number, method, params = (message.get(name) for name in ("id", "method", "params"))
        call = self._calls.get(method)
        if call is None:
            self._fail(number, -32601, f"no such call: {method}")
            return
        try:
            if call in (self._exec, self._start, self._finish):
                params = dict(params, request=number)
            result = call(**params or {})
        except files.Refused as error:
            self._fail(number, -32000, str(error))
        except (TypeError, FrameError) as error:
            self._fail(number, -32602, f"bad parameters: {error}")
        except OSError as error:
            self._fail(number, -32000, f"out of processes, files or memory: {error.strerror}")
        else:
            if result is not None:
                self._send({"jsonrpc": "2.0", "id": number, "result": result})

    def _fail(self, number, code, text):
        error = {"code": code, "message": text[:MAX_LINE]}
        self._send({"jsonrpc": "2.0", "id": number, "error": error})

    def _send(self, message):
        self._out += encode(message)

    def _flush(self):
        try:
            while self._out:
                del self._out[: os.write(self._socket, self._out[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _move_output(self, readers):
        for job in list(self._jobs.values()):
            if job.stdin_pipe in readers:
                job.feed()
            for name in [name for name, fd in job.pipes.items() if fd in readers]:
                self._pass_on(job, name)
            if job.ending is None and job.take_status():
                self._ended(job, json.loads(job.take_status().decode("ascii")))

    def _pass_on(self, job, name):
        before = job.captures[name].total if name in job.captures else 0
        data = job.receive(name)
        if data:
            params = {"id": job.request, "stream": name, "data": pack(data)}
            self._send({"jsonrpc": "2.0", "method": "output", "params": params})
        return name in job.captures and job.captures[name].total > before

    def _ended(self, job, ending):
        """The command itself has ended; others that it started may still run."""
        job.ending, job.duration = ending, time.monotonic() - job.started
        for name in ("stdout", "stderr"):
            # What it wrote is in the pipe. A background process may add to it forever, so stop.
            for _ in range(16):
                if name not in job.pipes or not self._pass_on(job, name):
                    break
        if job.reason is None:
            self._answer(job)

    def _answer(self, job):
        if job.request is not None:
            result = self._describe(job)
            self._send({"jsonrpc": "2.0", "id": job.request, "result": result})
            job.request = None

    def _reap(self):
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            job = next((job for job in self._jobs.values() if job.supervisor == pid), None)
            if job is not None:
                self._gone(job)

    def _gone(self, job):
        """Nothing of the job runs any more, or its supervisor was killed."""
        from . import processes

        self._move_output(set(job.pipes.values()))
        job.supervisor = None
        if job.ending is None:
            job.reason = job.reason or "supervisor"
            self._ended(job, {"signal": 9})
        others = {other.supervisor for other in self._jobs.values()}
        processes.kill_strays(others - {None})
        self._answer(job)
        job.close()
        if not job.background:
            del self._jobs[job.number]
        finished = [other for other in self._jobs.values() if other.supervisor is None]
        for old in finished[:-KEPT]:
            del self._jobs[old.number]

    def _ping(self):
        return {"python": sys.version.split()[0], "pid": os.getpid()}

    def _hold(self):
        """Sends nothing after the answer to this, until `resume`: what a checkpoint can save.

        The client sends nothing in the meantime either, so no frame is cut in two.
        """
        self._held = True
        return {}

    def _resume(self, restored):
        """Goes on: as before, or, `restored`, as a copy, whose client knows of no earlier call."""
        self._held = False
        if restored:
            for job in self._jobs.values():
                job.request, job.background = None, True
            from . import processes

            processes.announce_copy()
        return {}

    def _exec(self, request, argv, cwd, env, stdin, timeout, cap, stream=False):
        self._launch(request, argv, cwd, env, unpack(stdin), timeout, cap, stream)

    def _start(self, request, argv, cwd, env, stdin, timeout, cap):
        job = self._launch(None, argv, cwd, env, unpack(stdin), timeout, cap, False)
        return {"job": job.number}

    def _prepare(self, argv, cwd, env, cap):
        """Starts a command that will wait for its standard input."""
        from .python import Interpreter

        python = Interpreter(*self._python)
        source = python.source(argv, env)
        run = None if source is None else lambda env: python.run(source, env)
        return {"job": self._launch(None, argv, cwd, env, None, None, cap, False, run).number}

    def _finish(self, request, job, stdin, timeout):
        """Gives it that; the answer comes when it has ended."""
        found = self._find(job)
        if not found.waits:
            raise files.Refused(f"job {job} does not wait for its input")
        found.give(unpack(stdin), timeout)
        found.request, found.background = request, False
        if found.supervisor is None:
            del self._jobs[job]
        if found.ending is not None and (found.reason is None or found.supervisor is None):
            self._answer(found)

    def _launch(self, request, argv, cwd, env, stdin, timeout, cap, stream, run=None):
        # Imported with the first command: together they take as long as the start of the server.
        from . import processes
        from .job import Job

        if not self._last:
            processes.protect()
            self._wake = processes.wake_at_ends()
        self._last += 1
        job = Job(self._last, request, argv, cwd, env, stdin, timeout, cap, stream, run)
        self._jobs[job.number] = job
        return job

    def _list_jobs(self):
        return {"jobs": [job.number for job in self._jobs.values() if job.runs]}

    def _job(self, job):
        return self._describe(self._find(job))

    def _kill(self, job):
        self._find(job).kill("asked")
        return {}

    def _find(self, number):
        if number not in self._jobs:
            raise files.Refused(f"no job {number}")
        return self._jobs[number]

    def _describe(self, job):
        out, err = job.captures["stdout"], job.captures["stderr"]
        ending = job.ending or {}
        lasted = time.monotonic() - job.started if job.duration is None else job.duration
        return {
            "job": job.number,
            "done": job.ending is not None,
            "left": job.ending is not None and job.runs,
            "code": ending.get("code"),
            "signal": ending.get("signal"),
            "error": ending.get("error"),
            "stdout": pack(out.value()),
            "stderr": pack(err.value()),
            "truncated": out.truncated or err.truncated,
            "killed": job.reason,
            "duration": lasted,
        }
