"""Devices of chips that are not there, to compile programs for.

    targets.prepare()                      # before jax starts
    device, *_ = targets.devices("b200")   # or "h100", "h200", "v5p:2x2x1", "b200:64x8", ...
    with jax.default_device(device):
        jax.jit(f).lower(*targets.shapes_on(device, shapes)).compile()

The compilers come with pip: `pip install --constraint constraints.txt --editable ".[aot]"`.
"""

import importlib.util
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

GPUS = ("h100", "h200", "b200")
GPU_CLUSTER = re.compile(rf"({'|'.join(GPUS)})(?::([1-9]\d*)x([1-9]\d*))?")  # hosts x GPUs each
TPU_SLICE = re.compile(r"[a-z]+\d+\w*:\d+(x\d+){0,2}")  # what jax calls a topology
_INSTALL = 'pip install --constraint constraints.txt --editable ".[aot]"'


class TargetError(Exception):
    """There is no compiler for a chip, or no such chip; one line says which and what to do."""


def prepare(dump_to: Path | None = None) -> None:
    """Sets the environment that jax and its compilers read when they start.

    Call it before jax is imported. It keeps jax from looking for accelerators and for the cloud
    that TPUs are in, shows it the CUDA compiler and turns off what needs a GPU to measure on.

    Args:
      dump_to: a folder for the PTX of GPU programs and the low-level code of TPU kernels.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # or a warning that this is no TPU machine
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # there is no chip that two could fight over
    _add_flag("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    if cuda := cuda_home():
        os.environ["CUDA_HOME"] = str(cuda)  # read by XLA and by Mosaic GPU alike
    if dump_to:
        _add_flag("XLA_FLAGS", f"--xla_dump_to={dump_to}")
        _add_flag("XLA_FLAGS", "--xla_dump_emitter_re=.*")  # or jax 0.12 leaves most PTX out
        _add_flag("LIBTPU_INIT_ARGS", f"--xla_mosaic_dump_to={dump_to}")
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump_to)


def _add_flag(variable: str, flag: str) -> None:
    os.environ[variable] = f"{os.environ.get(variable, '')} {flag}".strip()


def cuda_home() -> Path | None:
    """The folder with `bin/ptxas` and the device library that belongs to it, if there is one.

    `$CUDA_HOME`, else pip's, else `/usr/local/cuda`.
    """
    packages = importlib.util.find_spec("nvidia")
    found = [Path(p) / "cu13" for p in packages.submodule_search_locations] if packages else []
    if own := os.environ.get("CUDA_HOME"):
        found.insert(0, Path(own))
    for folder in (*found, Path("/usr/local/cuda")):
        if all((folder / f).exists() for f in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc")):
            return folder
    return None


def devices(name: str) -> list:
    """Jax devices of GPUs, or of a slice of TPUs, that a program can be compiled for.

    Kernels written in Mosaic GPU look at the default device for the chip they are made for, and
    the first answer holds for the process: compile them for one kind of GPU in each.

    Args:
      name: one of `GPUS`, for a cluster with hosts and GPUs of each, as in "b200:64x8"; or a TPU
        generation and the shape of a slice, such as "v6e:2x2", "v5p:2x2x1" or "tpu7x:4x4x4".

    Raises:
      TargetError: if there is no such chip or slice, or the compiler is not installed.
    """
    if reason := missing(name):
        raise TargetError(reason)
    import jax
    from jax.experimental import topologies

    try:
        if cluster := GPU_CLUSTER.fullmatch(name):
            chip, hosts, gpus = cluster.groups(default="1")
            text = resources.files("launch").joinpath(f"chips/{chip}.txtpb").read_text()
            return topologies.get_topology_desc(
                platform="cuda",
                topology_name=name,
                target_config=text,
                topology=f"1x{hosts}x{gpus}",  # slices, hosts of each, GPUs of each
            ).devices
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(f"{name}: {str(error).splitlines()[0]}") from None


def missing(name: str) -> str | None:
    """Why nothing can be compiled for this chip here, in one line that says what to do."""
    if GPU_CLUSTER.fullmatch(name):
        if not _installed("jax_plugins.xla_cuda13"):
            return f"{name}: the compiler is not installed; {_INSTALL}"
        if not cuda_home():
            return f"{name}: no ptxas in $CUDA_HOME, from pip or in /usr/local/cuda; {_INSTALL}"
    elif name.partition(":")[0] in GPUS or not TPU_SLICE.fullmatch(name):
        return (
            f"{name!r} is no chip; legal are {', '.join(GPUS)}, clusters of them as 'b200:64x8' "
            "(hosts x GPUs) and TPU slices as 'v5p:2x2x1'"
        )
    elif not _installed("libtpu"):
        return f"{name}: the compiler is not installed; {_INSTALL}"
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def shapes_on(device: Any, shapes: Any) -> Any:
    """Places every `jax.ShapeDtypeStruct` of a tree on one device."""
    import jax

    here = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
