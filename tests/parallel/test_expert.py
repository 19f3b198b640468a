"""Expert parallelism: eight forced CPU devices in a process of their own, and bad arguments."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from c2.parallel.expert import expert_mlp


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(chosen):
    cases = Path(__file__).with_name("expert_cases.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", chosen, cases]
    flags = "--xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatch": "fp8"}, "dispatch 'fp8'; legal are native, mxfp8"),
        ({"micro_batches": 0}, "micro_batches = 0 must be positive"),
        ({"routes": jnp.zeros((5, 2), jnp.int32)}, r"x \(6, 4\), routes \(5, 2\)"),
        ({"weights": jnp.zeros((6, 3))}, r"weights \(6, 3\) disagree"),
    ],
)
def test_bad_arguments_are_named(options, message):
    arguments = {
        "x": jnp.zeros((6, 4)),
        "routes": jnp.zeros((6, 2), jnp.int32),
        "weights": jnp.zeros((6, 2)),
        "gate_up": jnp.zeros((2, 4, 2, 4)),
        "down": jnp.zeros((2, 4, 4)),
        "axes": ("data_ep",),
    }
    with pytest.raises(ValueError, match=message):
        expert_mlp(**arguments | options)
