"""A checkpoint of one mesh restores on another, bit for bit."""

import subprocess
import sys
from pathlib import Path

import c2

SCRIPT = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from c2 import models
from c2.models import presets
from c2.parallel.mesh import MeshConfig, data_mesh, make
from c2.training.checkpoint import Checkpoints
from c2.training.optimizer import OptimizerConfig, by_part, make as make_optimizer
from c2.training.sharding import abstract_state, place_state
from c2.training.state import TrainState


class Batches:
    def get_state(self):
        return {"next": 5}

    def set_state(self, state):
        assert state == {"next": 5}


cfg = presets.get("tiny_mla_moe")
table = models.spec(cfg)
optimizer = by_part(
    main=make_optimizer(OptimizerConfig(), 1e-3, table.replace(mtp=())),
    mtp=make_optimizer(OptimizerConfig(), 1e-3, table.mtp),
)
rng = np.random.default_rng(0)
layouts = [
    MeshConfig(weights="sharded", context=2, expert=4),
    MeshConfig(weights="sharded", context=8, expert=2),
    MeshConfig(),
]
first = abstract_state(cfg, optimizer, make(layouts[0]), layouts[0])
values = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), first)  # moments too
with Checkpoints(sys.argv[1], keep=1) as checkpoints:
    state = place_state(values, cfg, optimizer, make(layouts[0]), layouts[0])
    checkpoints.save(1, state, Batches())
    checkpoints.wait()
    for layout in layouts:
        target = abstract_state(cfg, optimizer, make(layout), layout)
        restored = checkpoints.restore(1, target, Batches())
        trees = map(jax.tree.leaves, (values, restored, target))
        for saved, got, wanted in zip(*trees, strict=True):
            assert got.sharding == wanted.sharding
            np.testing.assert_array_equal(got, saved)
    moved = abstract_state(cfg, optimizer, data_mesh(1), MeshConfig())
    experts = checkpoints.restore(1, moved, Batches()).params.moe.moe.down
    assert len(experts.sharding.device_set) == 1
"""


def test_any_mesh_restores_any_other(tmp_path):
    root = Path(c2.__file__).parent.parent
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "run"], cwd=root, check=True)
