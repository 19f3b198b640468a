"""Checks the walls of a backend by trying to get through them, before anything else runs in it."""

import importlib.resources
import json
import os
import socket
import tempfile
import uuid
from pathlib import Path

from c2.sandbox.protocol import Backend, Resources, SandboxError, Spec

RESOURCES = Resources(memory_mb=64, disk_mb=16, pids=64, cpus=1.0)
TIMEOUT_S = 60.0


def holes(backend: Backend, spec: Spec | None = None) -> dict[str, str]:
    """What gets out of a new sandbox, by wall; empty if nothing does."""
    spec = spec or Spec(resources=RESOURCES, labels={"purpose": "battery"})
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
            "max_pids": spec.resources.pids,
            "disk": spec.resources.disk_mb << 20,
            "memory": (spec.resources.memory_mb + spec.resources.disk_mb) << 20,
        }
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
    return {wall: what for wall, what in found.items() if what is not None}


def check(backend: Backend) -> None:
    """Raises SandboxError if a wall of the backend is missing, and says which."""
    if found := holes(backend):
        walls = "; ".join(f"{wall}: {what}" for wall, what in found.items())
        raise SandboxError(f"backend {backend.name!r} refuses to run, walls are missing: {walls}")


def _verdicts(output: bytes) -> dict[str, str | None]:
    try:
        return dict(json.loads(output))
    except (ValueError, TypeError):
        return {}
