"""Checks the walls of a backend by trying to get through them, before anything else runs in it."""

import importlib.resources
import json
import os
import socket
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from c2.sandbox.protocol import Backend, Resources, SandboxError, SandboxLost, Spec

RESOURCES = Resources(memory_mb=64, disk_mb=16, pids=64, cpus=1.0)
SPEC = Spec(resources=RESOURCES, labels={"purpose": "battery"})
TIMEOUT_S = 60.0
FAR_TOO_MUCH = 4  # times the memory of a sandbox


@dataclass(frozen=True, kw_only=True)
class Terms:
    """In what backends differ.

    Attributes:
      hidden: files of the tool server in /proc that commands cannot open.
      memory_ends_all: whether the sandbox ends, and not only a process, when memory is used up.
      walls: those that are tried; None for all.
    """

    hidden: tuple[str, ...] = ("mem", "environ", "maps", "fd/0", "root/etc")
    memory_ends_all: bool = False
    walls: tuple[str, ...] | None = None


TERMS = Terms()


def holes(backend: Backend, spec: Spec = SPEC, terms: Terms = TERMS) -> dict[str, str]:
    """What gets out of a new sandbox, by wall; empty if nothing does."""
    source = importlib.resources.files("c2.sandbox").joinpath("probes.py").read_text()
    with (
        tempfile.NamedTemporaryFile() as secret,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        name = f"c2-{uuid.uuid4()}"
        abstract.bind("\0" + name)
        abstract.listen()
        given = {
            "secrets": [secret.name, str(Path.home() / ".ssh"), __file__],
            "pids": [os.getpid(), os.getppid()],
            "port": listener.getsockname()[1],
            "abstract": name,
            "gate": spec.network != "none",
            "max_pids": spec.resources.pids,
            "disk": spec.resources.disk_mb << 20,
            "memory": (spec.resources.memory_mb + spec.resources.disk_mb) << 20,
            "hidden": terms.hidden,
            "walls": terms.walls,
        }
        if terms.memory_ends_all:
            given["memory"] = 0
        handle = backend.create(spec)
        try:
            script = f"GIVEN = {given!r}\n{source}".encode()
            run = backend.exec(handle, ["python3", "-I", "-"], stdin=script, timeout_s=TIMEOUT_S)
            found = _verdicts(run.stdout)
        finally:
            backend.close(handle)
    if not found:
        why = " ".join((run.error or run.stderr.decode("utf-8", "replace"))[-300:].split())
        return {"battery": f"it did not run: {why}"}
    if terms.memory_ends_all:
        found["memory"] = _survives_memory(backend, spec)
    return {wall: what for wall, what in found.items() if what is not None}


def check(backend: Backend, spec: Spec = SPEC, terms: Terms = TERMS) -> None:
    """Raises SandboxError if a wall of the backend is missing, and says which."""
    if found := holes(backend, spec, terms):
        walls = "; ".join(f"{wall}: {what}" for wall, what in found.items())
        raise SandboxError(f"backend {backend.name!r} refuses to run, walls are missing: {walls}")


def _survives_memory(backend: Backend, spec: Spec) -> str | None:
    size = FAR_TOO_MUCH * (spec.resources.memory_mb + spec.resources.disk_mb) << 20
    hog = f"x = bytearray({size}); x[::4096] = b'x' * len(x[::4096])"
    handle = backend.create(spec)
    try:
        run = backend.exec(handle, ["python3", "-I", "-c", hog], timeout_s=TIMEOUT_S)
    except SandboxLost:
        return None
    finally:
        backend.close(handle)
    return f"{size >> 20} MiB of memory" if run.ok else None


def _verdicts(output: bytes) -> dict[str, str | None]:
    try:
        return dict(json.loads(output))
    except (ValueError, TypeError):
        return {}
