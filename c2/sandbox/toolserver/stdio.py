"""The tool server on standard input and output, for who reaches it as a command of a container."""

import os
import resource
import socket
import sys
import threading

from . import processes, server

CHUNK = 1 << 16


def main(pids):
    """Serves until standard input ends. Not more than `pids` processes may run from now on."""
    processes.protect()
    resource.setrlimit(resource.RLIMIT_NPROC, (pids, pids))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ours, theirs = socket.socketpair()
    if not os.fork():
        try:
            ours.close()
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            server.main(theirs.fileno(), sys.executable, sys.path[1:])
        finally:
            os._exit(0)
    theirs.close()
    threading.Thread(target=_forward, args=(ours,), daemon=True).start()
    while True:
        data = ours.recv(CHUNK)
        if not data:
            os._exit(0)
        while data:
            data = data[os.write(1, data) :]


def _forward(ours):
    while True:
        data = os.read(0, CHUNK)
        if not data:
            break
        ours.sendall(data)
    ours.shutdown(socket.SHUT_WR)
