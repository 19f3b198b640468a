"""Puts a process behind the walls of a sandbox, from inside: what bubblewrap does, by system calls.

The process has been cloned into new namespaces for users, processes, IPC, names and the network, in
which it may still do everything. `prepare` can be done long before anything is known of the
sandbox; `enter` gives it a file system and a control group of its own and takes all rights away,
for good. The order matters: what is taken is not needed below.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC = 0x1000, 0x4000
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWCGROUP = 0x00020000, 0x02000000
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442  # the same everywhere
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522
SIGKILL = 9
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
# Of /proc, what changes the machine. An ordinary user may not write there anyway.
COVERED = ("sys", "irq", "bus", "sysrq-trigger")

libc = ctypes.CDLL(None, use_errno=True)
# Looked up here, or every fork would do it again.
libc.mount.argtypes = (*(ctypes.c_char_p,) * 3, ctypes.c_ulong, ctypes.c_char_p)
libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
libc.unshare.argtypes = (ctypes.c_int,)
libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
libc.capset.argtypes = (ctypes.c_void_p,) * 2
libc.syscall.restype = ctypes.c_long


class Program(ctypes.Structure):
    """A filter of system calls."""

    _fields_ = (("length", ctypes.c_ushort), ("start", ctypes.c_void_p))


def prepare(outside, inside, host):
    """What is the same for all sandboxes; raises OSError.

    Args:
      outside: user and group of this process on the machine.
      inside: the same, in the sandbox.
      host: its name.
    """
    prctl(PR_SET_PDEATHSIG, SIGKILL)
    (user, group), (as_user, as_group) = outside, inside
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{as_user} {user} 1")
    _write("/proc/self/gid_map", f"{as_group} {group} 1")
    os.setsid()
    socket.sethostname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    _bound_rights()


def enter(request, groups, rules):
    """Puts up the walls; raises OSError if one cannot stand.

    Args:
      request: "overlay": options of the root's overlay; "place": an empty folder for it; "folders":
        those that are made in it, path -> mode; "binds": folders shown in it, as (folder here,
        folder inside), read-only already; "covered": what of `COVERED` there is; "shm": bytes of
        /dev/shm.
      groups: descriptors to write this process into its control groups.
      rules: the filter of system calls, as BPF.
    """
    for fd in groups:
        os.write(fd, b"0")
    call("unshare", CLONE_NEWNS | CLONE_NEWCGROUP)  # with the mounts that there are by now
    os.umask(0)
    _take_files(request)
    os.umask(0o022)
    _give_up_rights(rules)


def prctl(option, *values):
    """Raises OSError."""
    call("prctl", option, *values, *(0,) * (4 - len(values)))


def call(name, *args):
    """A call of the C library; raises OSError."""
    if getattr(libc, name)(*args) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def restrict(path, flags):
    """Adds flags to a mount and all below it."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    call(
        "syscall", ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_long(AT_FDCWD), os.fsencode(path),
        ctypes.c_ulong(AT_RECURSIVE), attributes,
        ctypes.c_ulong(ctypes.sizeof(attributes)),
    )  # fmt: skip


def _take_files(request):
    new = request["place"]
    _mount("overlay", new, "overlay", MS_NOSUID | MS_NODEV, request["overlay"])
    for path, mode in request["folders"].items():
        if not os.path.isdir(new + path):
            os.makedirs(new + path)
            os.chmod(new + path, mode)
    for here, inside in request["binds"]:
        if not os.path.isdir(new + inside):
            os.makedirs(new + inside)
        _mount(here, new + inside, None, MS_BIND | MS_REC)
    proc = new + "/proc"
    _mount("proc", proc, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _write(proc + "/sys/user/max_user_namespaces", "0")  # for ever: it takes a right to change it
    for name in request["covered"]:
        _mount(proc + "/" + name, proc + "/" + name, None, MS_BIND | MS_REC)
        restrict(proc + "/" + name, MS_RDONLY)
    pts = "newinstance,ptmxmode=0666,mode=620"
    _mount("devpts", new + "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, pts)
    shm = "mode=1777,size={}".format(request["shm"])
    _mount("shm", new + "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, shm)
    os.chdir(new)
    # The old root comes to lie over the new one, at the same place, and is taken off.
    number = SYS_PIVOT_ROOT[os.uname().machine]
    call("syscall", ctypes.c_long(number), b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def _bound_rights():
    """No program gets a right any more; those of this process stay for now."""
    number = 0
    while not libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0):
        number += 1
    if ctypes.get_errno() != errno.EINVAL:  # which says that there is no such right
        call("prctl", PR_CAPBSET_DROP, number, 0, 0, 0)


def _give_up_rights(rules):
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())  # effective, permitted, inheritable: none
    instructions = ctypes.create_string_buffer(rules, len(rules))
    program = Program(len(rules) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _write(path, text):
    """With plain system calls, which touch less memory than a file object."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


def _mount(source, target, kind, flags, data=""):
    kind = kind and kind.encode()
    call("mount", os.fsencode(source), os.fsencode(target), kind, flags, data.encode())
