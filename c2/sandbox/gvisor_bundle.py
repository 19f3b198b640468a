"""What gVisor is told about a sandbox: the config of an OCI bundle."""

import errno
from pathlib import Path
from typing import Any

from c2.sandbox import root as roots
from c2.sandbox import seccomp
from c2.sandbox.walls import Parts

MOUNT = ("destination", "type", "source", "options")
SERVER = 0  # descriptor of the tool server's socket: only the standard ones outlive a checkpoint
CAPABILITIES = ("bounding", "effective", "inheritable", "permitted", "ambient")
NAMESPACES = ("pid", "network", "ipc", "uts", "mount")


def config(parts: Parts, empty: Path) -> dict[str, Any]:
    """The content of config.json.

    The first process is the tool server, an ordinary user without capabilities, as are all that it
    starts. How many there may be is limited by gVisor's kernel, their memory by the control group.

    Args:
      parts: of the sandbox; its file system is mounted at `parts.place`.
      empty: a file that covers what gVisor adds to /dev.
    """
    mounts = [
        ("/proc", "proc", "proc", ["nosuid", "nodev", "noexec"]),
        ("/sys", "tmpfs", "tmpfs", ["ro", "size=4096"]),
        ("/dev", "tmpfs", "tmpfs", ["nosuid", "noexec"]),
        ("/dev/net", "tmpfs", "tmpfs", ["ro", "size=4096"]),
        ("/dev/fuse", "bind", str(empty), ["ro"]),
        ("/dev/shm", "tmpfs", "tmpfs", ["nosuid", "nodev", f"size={parts.shm_bytes}", "mode=1777"]),
        # Named, because gVisor would put a file system without a limit there.
        ("/tmp", "bind", f"{parts.place}/tmp", ["rw"]),
        *((inside, "bind", here, ["ro", "rbind"]) for here, inside in parts.root.binds),
    ]
    limits = {"RLIMIT_CORE": 0, "RLIMIT_NPROC": int(parts.resources["pids"])}
    return {
        "ociVersion": "1.0.0",
        "hostname": roots.HOST,
        "root": {"path": parts.place, "readonly": False},
        "mounts": [dict(zip(MOUNT, mount, strict=True)) for mount in mounts],
        "process": {
            "user": {"uid": roots.USER, "gid": roots.GROUP},
            "args": roots.command(parts.root, SERVER),
            "env": [],
            "cwd": "/",
            "capabilities": {kind: [] for kind in CAPABILITIES},
            "noNewPrivileges": True,
            "rlimits": [{"type": kind, "hard": n, "soft": n} for kind, n in limits.items()],
        },
        "linux": {
            "namespaces": [{"type": kind} for kind in NAMESPACES],
            "seccomp": _filter(),
        },
    }


def _filter() -> dict[str, Any]:
    """`seccomp.program` in the words of OCI; gVisor's kernel does not know all of the calls."""
    denied: dict[str, Any] = {"action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM}
    flags = [1 << bit for bit in range(32) if seccomp.NAMESPACES >> bit & 1]
    known = range(max(seccomp.FAMILIES) + 1)
    families = [
        *(_argument(0, "SCMP_CMP_EQ", f) for f in known if f not in seccomp.FAMILIES),
        _argument(0, "SCMP_CMP_GT", max(seccomp.FAMILIES)),
    ]
    requests = (seccomp.TIOCSTI, seccomp.TIOCLINUX)
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            {"names": list(seccomp.DENIED), **denied},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
            *(_rule("clone", _argument(0, "SCMP_CMP_MASKED_EQ", bit, bit)) for bit in flags),
            *(_rule("socket", argument) for argument in families),
            *(_rule("ioctl", _argument(1, "SCMP_CMP_MASKED_EQ", 0xFFFFFFFF, n)) for n in requests),
        ],
    }


def _rule(call: str, argument: dict[str, Any]) -> dict[str, Any]:
    return {
        "names": [call], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM, "args": [argument],
    }  # fmt: skip


def _argument(index: int, op: str, value: int, second: int = 0) -> dict[str, Any]:
    return {"index": index, "op": op, "value": value, "valueTwo": second}
