"""Folders of Python packages that tests need, from pins with hashes."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from c2.sandbox.protocol import WORKDIR, SandboxError, SupportsLayers

SITE = "/opt/tests"  # where the folder is in sandboxes
# Variables by which an agent's own `python3 -m pytest` finds it, and the repository.
AGENT_ENV = {
    "PYTHONPATH": f"{SITE}:{WORKDIR}/src:{WORKDIR}",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def layer(backend: SupportsLayers, requires: Sequence[str], cache: Path) -> str:
    """A layer for sandboxes in which tests that need some packages can be run.

    Raises:
      SandboxError: if pip cannot get them.
    """
    return backend.add_layer(str(install(requires, cache)), at=SITE)


def install(requires: Sequence[str], cache: Path) -> Path:
    """A folder with packages, made once per set of pins.

    Args:
      requires: lines NAME==VERSION --hash=sha256:DIGEST of wheels, with all that they need.
      cache: where folders are kept.

    Raises:
      SandboxError: if pip cannot get them.
    """
    text = "\n".join(sorted(requires)) + "\n"
    folder = cache / "environments" / hashlib.sha256(text.encode()).hexdigest()[:16]
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
        pins, made = Path(parent, "requirements.txt"), Path(parent, "site")
        pins.write_text(text)
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes",
            "--only-binary=:all:", "--target", str(made), "--requirement", str(pins),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SandboxError(f"pip cannot install what tests need: {_reason(done.stderr)}")
        try:
            made.rename(folder)
        except OSError:
            if not os.path.isdir(folder):  # another process has made the same
                raise
    return folder


def _reason(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ") and "Exception:" not in line]
    return " ".join((errors or lines or ["it does not say why"])[-1].split())
