"""Where the services of reinforcement learning run: the value of `--services`."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from c2.config import ConfigError
from c2.rl.calls import Launcher
from c2.rl.in_process import InProcess
from launch import jax_setup
from launch.local import LocalLauncher

KINDS = ("local", "ray", "inside")
LOGS = "logs"  # folder of a run with what services print


def launcher(kind: str, workdir: Path) -> Callable[[], Launcher]:
    """What `experiments.study.Run.services` is for a command line.

    Args:
      kind: one of `KINDS`: processes of this machine, actors of a Ray cluster (the one at
        RAY_ADDRESS, else one that is started here), or objects of this process.
      workdir: of the run.

    Raises:
      ConfigError: if Ray is not installed, or no cluster answers at RAY_ADDRESS.
    """
    if kind == "inside":
        return InProcess
    if kind == "local":
        cache = {"JAX_COMPILATION_CACHE_DIR": str(jax_setup.cache_dir() / "jax")}
        return lambda: LocalLauncher(cache, workdir / LOGS)
    try:
        import ray

        from launch.on_ray import RayLauncher
    except ImportError as error:
        raise ConfigError(f"--services=ray needs `pip install -e .[ray]`: {error}") from error

    _check_address(os.environ.get("RAY_ADDRESS", ""))

    def on_ray() -> Launcher:
        # else all that Ray finds in log files, also old ones of others, disturbs the progress
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        return RayLauncher(str(workdir.absolute()))

    return on_ray


def _check_address(address: str) -> None:
    """Sees at once what Ray would try for minutes, after the stages that need no services."""
    if address in ("", "auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"RAY_ADDRESS: no cluster answers at {address!r} ({error}); legal: HOST:PORT of one "
            "that runs, or unset to start one here"
        ) from error
