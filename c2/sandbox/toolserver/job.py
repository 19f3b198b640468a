"""One command: its pipes, what it wrote, and how it ends."""

import os
import signal
import time

from . import processes
from .capture import Capture

CHUNK = 1 << 16
FLOOD = 1 << 26  # bytes of output after which a command is killed: nobody will read them
GRACE = 0.5  # seconds between SIGTERM and SIGKILL
PATIENCE = 2.0  # seconds of SIGKILL rounds, after which everything in the sandbox is killed
ROUND = 0.01  # seconds between two rounds


class Job:
    """A command that runs, or ran, below a supervisor.

    Attributes:
      number: its name in calls.
      request: id of the call that waits for its end, or None.
      background: whether no call waits for it, nor did.
      stream: whether that call wants the output while it comes.
      supervisor: process id, or None when all processes of the job are gone.
      ending: how the command itself ended, or None while it runs.
      reason: why it was killed ("timeout", "output", "asked"), or None.
    """

    def __init__(self, number, request, argv, cwd, env, stdin, timeout, cap, stream, run=None):
        self.number, self.request, self.stream = number, request, stream
        self.background = request is None
        self.reason, self.ending, self.duration = None, None, None
        self.started = time.monotonic()
        self.deadline = None if timeout is None else self.started + timeout
        self.captures = {"stdout": Capture(cap), "stderr": Capture(cap)}
        self._unsent = {"stdout": cap, "stderr": cap}
        self._signalled = None
        self._stdin = stdin  # what is left to be given to it; None until `give`
        self._status = b""
        give_in, stdin_end = os.pipe()
        out_end, give_out = os.pipe()
        err_end, give_err = os.pipe()
        status_end, give_status = os.pipe()
        self.pipes = {"stdout": out_end, "stderr": err_end, "status": status_end}
        self.stdin_pipe = stdin_end
        for fd in (*self.pipes.values(), stdin_end):
            os.set_blocking(fd, False)
        given = (give_in, give_out, give_err)
        try:
            self.supervisor = processes.start(argv, cwd, env, given, give_status, run)
        except OSError:
            self.close()
            raise
        finally:
            for fd in (*given, give_status):
                os.close(fd)
        if stdin is not None:
            self.feed()

    @property
    def runs(self):
        """Whether a process of it is left; its supervisor takes a moment longer to go."""
        left = self.ending is None or self.ending.get("left", False)
        return self.supervisor is not None and left

    @property
    def waits(self):
        """Whether it waits for its standard input."""
        return self._stdin is None

    @property
    def takes(self):
        """Whether its standard input is on the way."""
        return self.stdin_pipe is not None and not self.waits

    def give(self, stdin, timeout):
        """Gives it its standard input and a deadline from now on."""
        self._stdin, self.deadline = stdin, time.monotonic() + timeout
        if self.stdin_pipe is not None:
            self.feed()

    def feed(self):
        """Writes as much of standard input as its pipe takes, and closes it after the last."""
        try:
            while self._stdin:
                self._stdin = self._stdin[os.write(self.stdin_pipe, self._stdin[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            self._stdin = b""  # it closed its input
        os.close(self.stdin_pipe)
        self.stdin_pipe = None

    def receive(self, name):
        """Reads one chunk from a pipe; returns what of it is to be streamed."""
        try:
            data = os.read(self.pipes[name], CHUNK)
        except BlockingIOError:
            return b""
        if not data:
            os.close(self.pipes.pop(name))
            return b""
        if name == "status":
            self._status += data
            return b""
        self.captures[name].feed(data)
        if self.captures[name].total > FLOOD:
            self.kill("output")
        if not self.stream or self.request is None:
            return b""
        sent = data[: self._unsent[name]]
        self._unsent[name] -= len(sent)
        return sent

    def take_status(self):
        """The line that the supervisor wrote when the command ended, or b""."""
        line, newline, _ = self._status.partition(b"\n")
        return line if newline else b""

    def kill(self, reason):
        """Asks everything of the job to end; `advance` sees to it that it does."""
        if self.reason is None and self.supervisor is not None:
            self.reason, self._signalled = reason, time.monotonic()
            below = processes.descendants(self.supervisor)
            processes.send(below, signal.SIGTERM)
            processes.send(below, signal.SIGCONT)  # a stopped process does not see SIGTERM

    def advance(self, now):
        """Does what is due and returns the seconds until this must be called again, or None."""
        if self.supervisor is None:
            return None
        if self.reason is None:
            if self.deadline is None or self.ending is not None:
                return None
            if now < self.deadline:
                return self.deadline - now
            self.kill("timeout")
        late = now - self._signalled - GRACE
        if late < 0:
            return min(ROUND, -late)
        if processes.kill_below(self.supervisor) and late > PATIENCE and os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # in one step, so that no fork escapes
        return ROUND

    def close(self):
        """Closes the pipes."""
        for fd in (*self.pipes.values(), self.stdin_pipe):
            if fd is not None:
                os.close(fd)
        self.pipes, self.stdin_pipe = {}, None
