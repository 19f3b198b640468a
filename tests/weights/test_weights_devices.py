"""Ranks that are devices of a mesh: see `device_ranks`."""

import subprocess
import sys
from pathlib import Path


def test_ranks_of_a_mesh_publish_everything_once(tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("device_ranks.py"), tmp_path],
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
        },
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
