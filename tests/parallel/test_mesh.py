"""Placement on a mesh of forced CPU devices, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

import c2
from c2.parallel.mesh import data_mesh

SCRIPT = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from c2.parallel.mesh import data_mesh, replicate, place

assert data_mesh().shape["data"] == data_mesh().size == 4 and data_mesh(2).size == 2
mesh = data_mesh()
tree = {"w": np.arange(6.0).reshape(2, 3), "none": None}
copies = replicate(tree, mesh)["w"].addressable_shards
assert [shard.device for shard in copies] == jax.devices()
for shard in copies:
    np.testing.assert_array_equal(shard.data, tree["w"])

batch = {"tokens": np.arange(24).reshape(8, 3), "loss_mask": np.ones((8, 3), np.float32)}
placed = place(batch, mesh)
np.testing.assert_array_equal(placed["tokens"], batch["tokens"])
for i, shard in enumerate(placed["tokens"].addressable_shards):
    assert shard.device == jax.devices()[i]
    np.testing.assert_array_equal(shard.data, batch["tokens"][2 * i : 2 * i + 2])
try:
    place(np.zeros((6, 3)), mesh)
except ValueError as error:
    assert "divi" in str(error), error
else:
    raise AssertionError("6 rows were split over 4 devices")
"""


def test_rows_are_split_and_parameters_copied():
    root = Path(c2.__file__).parent.parent
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, check=True)


def test_missing_devices_are_counted():
    assert data_mesh(1).size == 1
    with pytest.raises(ValueError, match="1000 devices asked for, 1 present"):
        data_mesh(1000)
