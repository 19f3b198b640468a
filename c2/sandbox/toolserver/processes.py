"""Starting commands and killing everything that they started.

A command runs below a supervisor: a fork of the server that is a "child subreaper", so whatever the
command starts stays below it in the tree of processes, also after `setsid` or a double fork. The
supervisor lives until the last of them is gone. A command may kill its own supervisor; what it
leaves then becomes the server's own child, and `kill_strays` ends it.
"""

import contextlib
import ctypes
import json
import os
import signal

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SYS_CLOSE_RANGE, LAST = 436, (1 << 32) - 1  # the same everywhere

_libc = ctypes.CDLL(None, use_errno=True)


def protect():
    """Makes this process and its forks unreadable to the commands, which run as the same user.

    Without it a command could rewrite the server's memory through /proc and forge its answers. What
    commands leave behind becomes this process's child even if it is not process 1. Nor does it end
    when asked to, as process 1 of Linux would not, but of gVisor's kernel would.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_DUMPABLE, 0)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def wake_at_ends():
    """A descriptor that becomes readable whenever a child of this process ends."""
    wake, end = os.pipe()
    for fd in (wake, end):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    return wake


def start(argv, cwd, env, files, status, run=None):
    """Forks a supervisor that runs `argv` and returns its process id.

    Args:
      argv: program and arguments; the program is looked up in the PATH of `env`.
      cwd: working directory.
      env: all environment variables.
      files: descriptors that become standard input, output and error.
      status: descriptor to which the supervisor writes one JSON object when the command has ended:
        {"code": int}, {"signal": int} or {"error": why it could not be started}, the first two with
        "left": whether it left processes behind.
      run: called in the place of the program, with `env`, and never returns; or None.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        _supervise(argv, cwd, env, files, status, run)
    finally:
        os._exit(0)


def descendants(root):
    """Process ids of everything below the process `root`."""
    children = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, open_ends = [], [root]
    while open_ends:
        below = children.get(open_ends.pop(), ())
        found += below
        open_ends += below
    return found


def announce_copy():
    """Tells all processes that what they have drawn random numbers from is in other copies, too.

    Those that have no handler for this signal do not notice it. See `reseed`.
    """
    send([-1], signal.SIGURG)


def send(pids, number):
    """Sends a signal to those that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_below(root):
    """One round of killing; returns how many processes it found.

    They are stopped first: a stopped process cannot fork away from the signal that follows.
    """
    found = descendants(root)
    send(found, signal.SIGSTOP)
    send(found, signal.SIGKILL)
    return len(found)


def kill_strays(supervisors):
    """Kills all children of this process but its supervisors, and what is below them."""
    me = os.getpid()
    for pid, parent in list(_parents()):
        if parent == me and pid not in supervisors:
            kill_below(pid)
            send([pid], signal.SIGKILL)


def _supervise(argv, cwd, env, files, status, run):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Above the standard three, so that none of them is overwritten while they are put in place.
    keep = [os.dup2(fd, 100 + i, inheritable=False) for i, fd in enumerate((*files, status))]
    close_all_but(keep)
    status = keep[3]
    try:
        command = os.fork()
    except OSError as error:
        _report(status, {"error": f"cannot start a process: {error}"})
        return
    if not command:
        _run(argv, cwd, env, keep[:3], status, run)
    for fd in keep[:3]:
        os.close(fd)
    while True:
        try:
            pid, how = os.wait()
        except ChildProcessError:
            return
        if pid == command:
            _report(status, dict(_ending(how), left=_has_children()))
            os.close(status)


def _run(argv, cwd, env, files, status, run):
    try:
        os.setsid()
        _prctl(PR_SET_DUMPABLE, 1)  # or it could not write to its own folder in /proc
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the command goes first when memory runs out, not the server
        _prctl(PR_SET_DUMPABLE, 0)
        os.chdir(cwd)
        for target, fd in enumerate(files):
            os.dup2(fd, target)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if run is not None:
            close_all_but((0, 1, 2))
            run(env)
        os.execvpe(argv[0], argv, env)
    except Exception as error:
        _report(status, {"error": f"{argv[0]:.200}: {error!s:.200}"})
    finally:
        os._exit(127)


def _report(status, ending):
    with contextlib.suppress(OSError):  # the server does not listen any more
        os.write(status, json.dumps(ending).encode("ascii") + b"\n")


def _ending(how):
    if os.WIFSIGNALED(how):
        return {"signal": os.WTERMSIG(how)}
    return {"code": os.WEXITSTATUS(how)}


def _has_children():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def close_all_but(keep):
    """Closes all descriptors but these."""
    low = 0
    for fd in (*sorted(keep), LAST + 1):
        if low < fd and _close_range(low, fd - 1):
            _close_listed(keep)
            return
        low = fd + 1


def _close_range(low, high):
    """All of a range at once; -1 before Linux 5.9."""
    number, flags = ctypes.c_long(SYS_CLOSE_RANGE), ctypes.c_uint(0)
    return _libc.syscall(number, ctypes.c_uint(low), ctypes.c_uint(high), flags)


def _close_listed(keep):
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(int(name))


def _parents():
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # the name of the program, in parentheses, may hold anything
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                yield int(name), int(fields[1])


def _prctl(option, value):
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")
