"""What runs beside a trainer or an engine starts without jax."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["publisher", "subscriber"])
def test_no_jax(module):
    code = f"import c2.weights.{module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
