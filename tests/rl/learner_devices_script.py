"""A step of reinforcement learning on one device and on four, packed and split in several ways.

Prints how far loss and gradients are from those of one device with every row in one batch.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

from c2 import models
from c2.losses.config import PolicyGradientConfig
from c2.models import presets
from c2.parallel.mesh import DATA_PARALLEL, make
from c2.rl.learner import make_learner
from c2.rl.replay import ReplayConfig
from c2.rl.rows import Row, pack
from c2.training.sharding import place_batch, place_state
from c2.training.state import TrainState

LENGTHS = (9, 14, 5, 12, 7, 16, 3, 11, 15, 6, 8, 13)
SEQ, DENOMINATOR = 16, 37.0
# devices, layout, rows of the packed batch are a multiple of, batches that it is split into
CASES = [(1, DATA_PARALLEL, 4, 1), (4, DATA_PARALLEL, 4, 2)]


def random_rows(cfg: models.ModelConfig) -> list[Row]:
    rng = np.random.default_rng(0)
    return [
        Row(
            rollout=number,
            tokens=rng.integers(0, cfg.vocab, n).astype(np.int32),
            weights=np.append(0, rng.random(n - 1) < 0.7).astype(np.float32),
            advantages=rng.normal(size=n).astype(np.float32),
            log_probs=rng.normal(size=n).astype(np.float32) - 4,
            temperatures=np.ones(n, np.float32),
            routes=np.full((n, cfg.moe_layers, cfg.moe.top_k), -1, np.int16),
        )
        for number, n in enumerate(LENGTHS)
    ]


def step(cfg, params, devices, layout, multiple, parts):
    """Loss and gradients."""
    mesh, optimizer = make(layout, jax.devices()[:devices]), optax.sgd(1.0)
    learner = make_learner(
        cfg, optimizer, mesh, layout, PolicyGradientConfig(), ReplayConfig(mode="strict")
    )
    batch = pack(random_rows(cfg), SEQ, multiple=multiple).batch
    state = TrainState(jnp.int32(0), params, optimizer.init(params.replace(mtp=())))
    state = place_state(state, cfg, optimizer, mesh, layout)
    total = None
    for part in np.array_split(np.arange(len(batch["tokens"])), parts):
        placed = place_batch({name: x[part] for name, x in batch.items()}, mesh, layout)
        total = learner.zero(state.params, placed) if total is None else total
        total = learner.add(total, state.params, placed)
    (loss, _), grads = jax.device_get(total)
    return loss / DENOMINATOR, jax.tree.map(lambda g: g / DENOMINATOR, grads)


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    cfg = dataclasses.replace(
        presets.get("tiny_mla_moe"), vocab=64, hidden=32, layers=2, dense_intermediate=48
    )
    params = jax.device_get(models.init(jax.random.key(0), cfg))
    (loss, grads), *others = (step(cfg, params, *case) for case in CASES)
    norms = jax.tree.map(np.linalg.norm, grads)
    assert max(jax.tree.leaves(norms)) > 1e-3
    for other, found in others:
        apart = jax.tree.map(lambda a, b, n: np.abs(a - b).max() / (n + 1e-6), grads, found, norms)
        worst = float(max(jax.tree.leaves(apart)))
        print(json.dumps({"loss": float(abs(other - loss)), "gradients": worst}))


if __name__ == "__main__":
    main()
