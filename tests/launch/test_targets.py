"""Chips that are not there: names, what must be installed, and a program compiled for each."""

import subprocess
import sys

import pytest

from launch import targets


@pytest.fixture
def environment(monkeypatch):
    """The variables that `prepare` sets, in place of those of this process."""
    variables = {}
    monkeypatch.setattr(targets.os, "environ", variables)
    return variables


def cuda_in(folder):
    for name in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    "name", ["", "b100", "v5p", "v5p:", "v5p:2x", "v5p:2x2x1x1", "../b200", "b200:8", "b200:0x8"]
)
def test_a_name_that_is_no_chip_gives_one_line_with_legal_ones(name):
    with pytest.raises(
        targets.TargetError, match="is no chip; legal are h100, h200, b200"
    ) as error:
        targets.devices(name)
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["h200", "b200", "v5e:2x2", "tpu7x:2x2x1"])
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, name):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(targets.TargetError, match=rf"{name}: .* not installed; pip install .*aot"):
        targets.devices(name)


def test_without_ptxas_one_line_says_where_it_was_looked_for(monkeypatch):
    monkeypatch.setattr(targets, "_installed", lambda module: True)
    monkeypatch.setattr(targets, "cuda_home", lambda: None)
    with pytest.raises(targets.TargetError, match=r"no ptxas in .*CUDA_HOME.*; pip install"):
        targets.devices("b200")


def test_the_users_cuda_goes_before_that_of_pip_unless_it_is_incomplete(
    monkeypatch, environment, tmp_path
):
    of_pip, own = cuda_in(tmp_path / "nvidia/cu13"), cuda_in(tmp_path / "own")
    spec = type("Spec", (), {"submodule_search_locations": [tmp_path / "nvidia"]})
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: spec)
    assert targets.cuda_home() == of_pip
    environment["CUDA_HOME"] = str(own)
    assert targets.cuda_home() == own
    (own / "bin/ptxas").unlink()
    assert targets.cuda_home() == of_pip


def test_preparing_keeps_the_users_flags_and_shows_both_compilers_where_to_dump(
    monkeypatch, environment, tmp_path
):
    monkeypatch.setattr(targets, "cuda_home", lambda: tmp_path / "cuda")
    environment["XLA_FLAGS"] = "--xla_own=1"
    targets.prepare(tmp_path)
    assert environment["XLA_FLAGS"].split()[0] == "--xla_own=1"
    assert f"--xla_dump_to={tmp_path}" in environment["XLA_FLAGS"].split()
    assert environment["LIBTPU_INIT_ARGS"] == f"--xla_mosaic_dump_to={tmp_path}"
    assert environment["CUDA_HOME"] == str(tmp_path / "cuda")
    assert environment["JAX_PLATFORMS"] == "cpu"


SCRIPT = """
import sys
from launch import targets
targets.prepare()
import jax, jax.numpy as jnp
devices = targets.devices(sys.argv[1])
x = targets.shapes_on(devices[0], jax.ShapeDtypeStruct((256, 128), jnp.float32))
with jax.default_device(devices[0]):
    memory = jax.jit(lambda x: jnp.exp(x).T @ x).lower(x).compile().memory_analysis()
print(len(devices), devices[0].device_kind, memory.output_size_in_bytes, sep=", ")
"""


def compile_for(name):
    if reason := targets.missing(name):
        pytest.skip(reason)
    command = [sys.executable, "-c", SCRIPT, name]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", "1, NVIDIA H100 80GB HBM3"),
        ("h200", "1, NVIDIA H200"),
        ("b200", "1, NVIDIA B200"),
        ("b200:2x8", "16, NVIDIA B200"),  # hosts x GPUs of each
        ("v5p:2x2x1", "4, TPU v5"),
        ("v6e:2x2", "4, TPU v6 lite"),
        ("tpu7x:2x2x1", "8, TPU7x"),  # a chip is two devices
    ],
)
def test_a_program_is_compiled_for_every_chip(name, expected):
    done = compile_for(name)
    assert done.stdout == f"{expected}, {128 * 128 * 4}\n", done.stderr


@pytest.mark.slow
def test_a_slice_that_cannot_be_is_refused_with_the_compilers_reason():
    error = compile_for("v6e:2x3").stderr.splitlines()[-1]
    assert error.startswith("launch.targets.TargetError: v6e:2x3: ") and "not divisible" in error
