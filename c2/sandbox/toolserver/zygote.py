"""A process that has everything loaded that tool servers need, and becomes one whenever asked.

A fork shares its memory with this process until it changes it, and starts in a fraction of the time
of an interpreter. All tool servers of a node therefore have the same memory layout. This process
never sees what comes from a sandbox: it reads requests of its node, and is nobody on the machine.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import warnings

from . import files, job, processes, python, server, walls

CLONE_NEW = 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
MAX_PACKET = 1 << 17
RUNNER = "runner.py"  # what sandboxes run most; copied here from `c2.sandbox.tasks`
LOADED = (files, job, processes, warnings)  # what is imported later on; inside it is not found

# Looked up here, or every fork would do it again. Unlike CDLL, it holds the interpreter's lock.
_c = ctypes.PyDLL(None, use_errno=True)
_syscall, _before = _c.syscall, _c.PyOS_BeforeFork
_in_child, _in_parent = _c.PyOS_AfterFork_Child, _c.PyOS_AfterFork_Parent
_syscall.restype = ctypes.c_long


def main(fd, rules, outside, inside, host, prefix):
    """Serves its node on the socket `fd` until that closes it.

    For each packet it sends one with two descriptors: a new process, and the socket on which that
    waits for its sandbox. What is sent there is the request of `walls.enter` with descriptors: the
    tool server's socket, its standard error, a pipe that takes b"ready" when the walls stand, and
    those of control groups.

    Args:
      fd: a socket of packets.
      rules: file with the filter of system calls, which is applied to the tool servers.
      outside: as in `walls.prepare`, like the others.
      inside: user and group.
      host: name.
      prefix: where this interpreter's folder is shown in sandboxes of this machine's programs.
    """
    walls.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL)
    # Who ends is gone at once. Forks see to this signal when they start their first command.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=fd)
    with open(rules, "rb") as file:
        program = file.read()
    with open(os.path.join(os.path.dirname(__file__), RUNNER), encoding="utf-8") as file:
        python.compile_early(file.read())
    path = python.move(sys.base_prefix, prefix)[1:]  # without the tool server's
    gc.collect()
    gc.freeze()  # the collector would write to every page
    while _wanted(control):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = _clone()
        if not pid:
            control.close()
            ours.close()
            _serve(theirs, program, (outside, inside, host), path)
        process = os.pidfd_open(pid)
        with contextlib.suppress(ConnectionError):  # the node has ended, as `_wanted` will see
            socket.send_fds(control, [b"new"], [process, ours.fileno()])
        os.close(process)
        ours.close()
        theirs.close()


def _wanted(control):
    try:
        return control.recv(1)
    except ConnectionResetError:  # the node has ended, and not read everything
        return b""


def _clone():
    """As `os.fork`, into new namespaces; one process less than a fork that moves and forks again.

    The three calls around it are those with which the interpreter lets extensions fork.
    """
    number = ctypes.c_long(SYS_CLONE[os.uname().machine])
    _before()
    pid = _syscall(number, ctypes.c_ulong(CLONE_NEW | signal.SIGCHLD), None, None, None, None)
    (_in_parent if pid else _in_child)()
    if pid < 0:
        error = ctypes.get_errno()
        raise OSError(error, "clone: " + os.strerror(error))
    return pid


def _serve(requests, program, who, path):
    """Never returns."""
    failure = None
    try:
        try:
            walls.prepare(*who)
        except OSError as error:
            failure = error  # to be told to those who will wait for the sandbox
        packet, fds, _, _ = socket.recv_fds(requests, MAX_PACKET, 16)
        if packet:
            sock, errors, ready, *groups = fds
            os.dup2(errors, 2)
            if failure is not None:
                raise failure
            request = json.loads(packet)
            walls.enter(request, groups, program)
            sys.path.clear()  # what lies there now is not ours
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.write(ready, b"ready")
            processes.close_all_but([0, 1, 2, sock])
            server.main(sock, request["python"], path)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    finally:
        os._exit(1)
