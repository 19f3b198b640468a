"""Loss and gradients of a step do not depend on packing, micro-batches or devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import c2

SCRIPT = Path(__file__).with_name("learner_devices_script.py")


@pytest.mark.slow
def test_four_devices_learn_what_one_does():
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=Path(c2.__file__).parents[1],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        capture_output=True,
        text=True,
    )
    apart = json.loads(done.stdout)
    assert apart["loss"] < 1e-6 and apart["gradients"] < 1e-6, apart
