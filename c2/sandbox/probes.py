"""Tries to get out of the sandbox that it runs in: standard library only, Python 3.8 or newer.

Read by `c2.sandbox.battery`, which feeds it to an interpreter inside with its arguments, one JSON
object, in front. It prints one JSON object: for each wall what went through it, or null.
"""

import ctypes
import errno
import json
import os
import platform
import signal
import socket
import stat

MIB = 1 << 20
CALLS = {  # name -> number on x86_64, number on aarch64
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "io_uring_setup": (425, 425),
    "process_vm_readv": (310, 270), "open_tree": (428, 428), "fsopen": (430, 430),
}  # fmt: skip
PLAIN_DEVICES = {
    "null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "console", "core",
    "fd", "stdin", "stdout", "stderr",
}  # fmt: skip
PR_GET_NO_NEW_PRIVS = 39
libc = ctypes.CDLL(None, use_errno=True)


def works(call, *args):
    """Whether a call of the C library succeeds."""
    return getattr(libc, call)(*args) >= 0


def opens(path, flags):
    """Whether a file can be opened."""
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def is_covered(path):
    """Whether there is only an empty file or folder."""
    info = os.lstat(path)
    if stat.S_ISDIR(info.st_mode):
        return not os.listdir(path)
    return stat.S_ISREG(info.st_mode) and not info.st_size


def user(given):
    """An ordinary user without capabilities, who can get none."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd"):  # ambient ones are all in CapPrm
        if int(fields[name], 16):
            return f"{name} is {fields[name].strip()}"
    if libc.prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        return "programs can gain privileges"
    if os.getuid() == 0 or os.geteuid() == 0:
        return "the user is root"
    return "the user can become root" if works("setuid", 0) else None


def seccomp(given):
    """A filter on system calls, which fails those that it must."""
    with open("/proc/self/status") as file:
        if "Seccomp:\t2" not in file.read():
            return "there is no filter"
    column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    for name, numbers in CALLS.items():
        if column is not None:
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(numbers[column]), *[ctypes.c_long(0)] * 6)
            if ctypes.get_errno() != errno.EPERM:
                return f"{name} is allowed"
    return "ptrace is allowed" if works("ptrace", 16, 1, 0, 0) else None


def namespaces(given):
    """No further namespaces, no mounts, no other root."""
    for flag, name in ((0x10000000, "user"), (0x20000, "mount"), (0x40000000, "network")):
        if works("unshare", flag):
            return f"a new {name} namespace"
    if works("mount", b"none", b"/tmp", b"tmpfs", 0, b""):
        return "mounted a file system"
    if works("mount", b"none", b"/usr", None, ctypes.c_ulong(32 | 4096), b""):
        return "mounted /usr anew"
    if works("umount2", b"/usr", 2) or works("umount2", b"/proc", 2):
        return "took a mount away"
    return "chroot works" if works("chroot", b"/tmp") else None


def files(given):
    """Nothing of the machine can be written, or read but its programs."""
    for path in given["secrets"]:
        if os.path.exists(path):
            return f"{path} is visible"
    for path in ("/usr/c2-probe", "/run/c2/c2-probe", "/dev/c2-probe", "/proc/c2-probe"):
        if opens(path, os.O_WRONLY | os.O_CREAT):
            return f"{path} can be made"
    for path in ("kernel/core_pattern", "kernel/modprobe", "kernel/hostname", "vm/drop_caches"):
        if opens("/proc/sys/" + path, os.O_WRONLY):
            return f"/proc/sys/{path} can be written"
    if opens("/proc/sysrq-trigger", os.O_WRONLY):
        return "/proc/sysrq-trigger can be written"
    if os.path.exists("/sys/fs/cgroup"):
        return "/sys/fs/cgroup is visible"
    return None


def devices(given):
    """No devices but the harmless ones."""
    there = set(os.listdir("/dev")) - PLAIN_DEVICES
    if extra := {name for name in there if not is_covered("/dev/" + name)}:
        return f"/dev/{sorted(extra)[0]}"
    try:
        os.mknod("/tmp/c2-probe", stat.S_IFBLK | 0o600, os.makedev(8, 0))
    except OSError:
        pass
    else:
        return "a device can be made"
    return "there is a controlling terminal" if opens("/dev/tty", os.O_RDWR) else None


def processes(given):
    """No process of the machine, and no way into the tool server."""
    with open("/proc/1/cmdline", "rb") as file:
        if b"toolserver" not in file.read():
            return "process 1 is not the tool server"
    for pid in given["pids"]:
        if pid > 100 and os.path.exists(f"/proc/{pid}"):
            return f"process {pid} is visible"
    for name in given["hidden"]:
        if opens("/proc/1/" + name, os.O_RDONLY):
            return f"/proc/1/{name} can be opened"
    return None


def network(given):
    """No connection to anywhere outside, and no name service."""
    with open("/proc/net/dev") as file:
        found = {line.split(":")[0].strip() for line in file if ":" in line}
    if found - {"lo"}:
        return "interface {}".format(sorted(found - {"lo"})[0])
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", given["port"])),
        (socket.AF_UNIX, socket.SOCK_STREAM, "\0" + given["abstract"]),
        (socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 53)),
        (socket.AF_INET6, socket.SOCK_DGRAM, ("2001:db8::1", 53)),
    ):
        if given["gate"] and kind == socket.SOCK_DGRAM:
            continue  # it ends at the gate, or nowhere
        try:
            with socket.socket(family, kind) as sock:
                sock.settimeout(1)
                sock.connect(address)
        except OSError:
            continue
        return f"connected to {address!r}"
    for family, kind in ((40, socket.SOCK_STREAM), (17, socket.SOCK_RAW), (2, socket.SOCK_RAW)):
        try:
            socket.socket(family, kind).close()
        except OSError:
            continue
        return f"a socket of family {family}, kind {kind}"
    try:
        return "a name was resolved to {}".format(socket.gethostbyname("example.com"))
    except OSError:
        return None


def fork_bomb(given):
    """The number of processes is limited."""
    children = []
    try:
        while len(children) <= given["max_pids"]:
            pid = os.fork()
            if not pid:
                signal.pause()
            children.append(pid)
    except OSError:
        return None
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return f"{len(children)} processes"


def disk(given):
    """What can be written is limited, and room comes back."""
    for folder in ("/repo", "/tmp", "/dev/shm"):
        path, block, written = folder + "/c2-probe", b"x" * MIB, 0
        try:
            with open(path, "wb", buffering=0) as file:
                while written <= given["disk"]:
                    written += file.write(block)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                continue
            raise
        finally:
            if os.path.exists(path):
                os.unlink(path)
        return f"{written // MIB} MiB in {folder}"
    return None


def memory(given):
    """A process that takes too much memory is killed, and only that."""
    if not given["memory"]:
        return None  # seen to from outside
    pid = os.fork()
    if not pid:
        taken = bytearray(given["memory"])
        taken[::4096] = b"x" * len(taken[::4096])
        os._exit(0)
    _, how = os.waitpid(pid, 0)
    return f"{given['memory'] // MIB} MiB of memory" if how == 0 else None


WALLS = (
    user, seccomp, namespaces, files, devices, processes, network, fork_bomb, disk, memory,
)  # fmt: skip


def run(given):
    """What went through each wall, or None; a probe that fails in another way counts as a hole."""
    found = {}
    for wall in WALLS:
        if given["walls"] is not None and wall.__name__ not in given["walls"]:
            continue
        try:
            found[wall.__name__] = wall(given)
        except Exception as error:
            found[wall.__name__] = f"not known: {type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    print(json.dumps(run(GIVEN)))  # noqa: F821 - put in front
