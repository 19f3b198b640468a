"""Settings of jax that belong to a process, not to a library or a study."""

import contextlib
import ctypes
import os
from pathlib import Path


def quiet_logs() -> None:
    """Hides the informational lines of XLA's C++ code; to be called before jax is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def cache_dir() -> Path:
    """The folder for what can be computed again.

    `$C2_CACHE_DIR`, else `$XDG_CACHE_HOME/c2`, else `~/.cache/c2`.
    """
    if own := os.environ.get("C2_CACHE_DIR"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "c2"


def enable_compilation_cache() -> None:
    """Lets a second start of the same program skip XLA compilation.

    The user's own setting (`JAX_COMPILATION_CACHE_DIR`) has precedence. Where the folder cannot be
    made, jax compiles as usual.
    """
    import jax

    folder = cache_dir() / "jax"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if jax.config.jax_compilation_cache_dir is None:
            jax.config.update("jax_compilation_cache_dir", str(folder))
            # Small programs on a CPU compile in tenths of a second each; the default keeps none.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def split_cpu() -> None:
    """Makes every CPU core a jax device, so that data parallelism uses them all.

    Two cores each computing half a batch are faster than two threads inside every operation:
    most operations of a small model are too short to share. Accelerators are not affected. The
    user's own number (`JAX_NUM_CPU_DEVICES`) has precedence, and so have the devices of a process
    in which jax already works, such as a notebook.
    """
    import jax

    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # too late
            jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


def release_compiler_memory() -> None:
    """Gives heap that XLA's compiler has freed back to the system, after every long compilation.

    The C library keeps it, in pieces too small for training's buffers: some 0.6 GB of a process
    that compiles one step. Does nothing where the C library is not glibc.
    """
    import jax

    with contextlib.suppress(OSError, AttributeError):
        trim = ctypes.CDLL("libc.so.6").malloc_trim

        def after(event: str, seconds: float, **_: object) -> None:
            if event == "/jax/core/compile/backend_compile_duration" and seconds > 1:
                trim(0)

        jax.monitoring.register_event_duration_secs_listener(after)
