"""What a run's numbers depend on besides its config: code revision, versions, machine."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def now() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def git_revision(folder: Path = _ROOT) -> dict[str, Any] | None:
    """The checked out commit and whether tracked files differ from it; None outside git."""
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": revision, "dirty": bool(changes)}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that can change numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """The machine in words, e.g. "Linux x86_64, 2 CPUs"."""
    # A container or `taskset` may grant fewer cores than the machine has.
    granted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {granted} CPUs"


def devices() -> str:
    """The accelerators of a run that has used jax, e.g. "1 x cpu"; "" if it has not."""
    if "jax" not in sys.modules:
        return ""
    found = sys.modules["jax"].devices()
    return f"{len(found)} x {found[0].device_kind}"


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
