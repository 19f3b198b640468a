"""The system calls that a sandbox may not make."""

import errno
import os
import socket

# What reaches outside the sandbox, or has been the way out of one before: namespaces and mounts,
# other processes' memory, kernel modules, keys, and interfaces with a long list of past faults.
DENIED = (
    "unshare", "setns", "mount", "umount", "umount2", "pivot_root", "chroot", "open_tree",
    "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd",
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "keyctl", "add_key", "request_key", "lookup_dcookie",
    "open_by_handle_at", "name_to_handle_at", "fanotify_init", "quotactl",
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load",
    "reboot", "swapon", "swapoff", "acct", "syslog", "settimeofday", "clock_settime",
    "clock_adjtime", "adjtimex", "iopl", "ioperm", "personality", "vhangup",
)  # fmt: skip
# Families with a meaning inside a network namespace of one's own. Others, AF_VSOCK above all, are
# not confined by it.
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
NAMESPACES = 0x7E020080  # CLONE_NEW*, of which the flags of `clone` may hold none
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # typing into someone else's terminal


def program() -> bytes:
    """The filter as BPF for `bwrap --seccomp`: listed calls fail with EPERM, the rest is allowed.

    Raises:
      ImportError: if the library libseccomp is not installed.
    """
    # Here, because the import loads a shared library.
    from pyseccomp import ALLOW, EQ, ERRNO, GT, MASKED_EQ, Arg, SyscallFilter

    denied = ERRNO(errno.EPERM)
    rules = SyscallFilter(defaction=ALLOW)
    for name in DENIED:
        rules.add_rule(denied, name)
    bit = 1
    while bit <= NAMESPACES:
        if NAMESPACES & bit:
            rules.add_rule(denied, "clone", Arg(0, MASKED_EQ, bit, bit))
        bit <<= 1
    # Its flags are in memory, where a filter cannot look. The C library then uses `clone`.
    rules.add_rule(ERRNO(errno.ENOSYS), "clone3")
    for family in range(max(FAMILIES) + 1):
        if family not in FAMILIES:
            rules.add_rule(denied, "socket", Arg(0, EQ, family))
    rules.add_rule(denied, "socket", Arg(0, GT, max(FAMILIES)))
    for request in (TIOCSTI, TIOCLINUX):
        rules.add_rule(denied, "ioctl", Arg(1, MASKED_EQ, 0xFFFFFFFF, request))
    fd = os.memfd_create("seccomp")
    with os.fdopen(fd, "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
