"""Gradients of the real train step on eight devices, in every layout asked for.

Reads cases from the file named on the command line, one dict of keys of `MeshConfig` each, and
writes for each how far loss and gradients are from those of one device, and which collectives the
compiled module holds: opcode, dimensions of the result and scope.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from c2 import models
from c2.data.packing import Batch
from c2.models import presets
from c2.parallel import mesh as meshes
from c2.parallel.mesh import MeshConfig
from c2.training import objective
from c2.training.objective import MTPConfig
from c2.training.sharding import place_batch, place_state
from c2.training.state import TrainState
from c2.training.step import make_train_step
from launch import hlo

ROWS, SEQ = 8, 128
LENGTHS = [
    [128],
    [16, 112],
    [5, 9, 80],
    [65, 63],
    [1, 1, 126],
    [40, 40, 48],
    [100],
    [7, 8, 9, 10, 90],
]


def config(attention: str, mtp: int) -> models.ModelConfig:
    small = {
        "vocab": 64,
        "hidden": 32,
        "layers": 2,
        "dense_layers": 1,
        "dense_intermediate": 48,
        "mtp": mtp,
    }
    cfg = presets.get(f"tiny_{attention}_moe")
    sizes = {"q_lora": 16, "kv_lora": 16, "nope": 16, "rope": 16, "v": 16, "heads": 8}
    if attention == "gqa":
        sizes = {"heads": 8, "kv_heads": 2, "head_dim": 16}
    return dataclasses.replace(
        cfg,
        **small,
        attention=dataclasses.replace(cfg.attention, **sizes),
        moe=dataclasses.replace(cfg.moe, experts=8, top_k=2, intermediate=32),
    )


def packed_batch(cfg: models.ModelConfig, routes: bool) -> Batch:
    rng = np.random.default_rng(0)
    segment_ids = np.zeros((ROWS, SEQ), np.int32)
    positions = np.zeros((ROWS, SEQ), np.int32)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths, 1):
            segment_ids[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    batch = {
        "tokens": rng.integers(0, cfg.vocab, (ROWS, SEQ), np.int32),
        "targets": rng.integers(0, cfg.vocab, (ROWS, SEQ), np.int32),
        "positions": positions,
        "segment_ids": segment_ids,
        "loss_mask": ((segment_ids > 0) & (rng.random((ROWS, SEQ)) < 0.8)).astype(np.float32),
    }
    if routes:
        shape = ROWS, SEQ, cfg.moe_layers
        chosen = np.argsort(rng.random((*shape, cfg.moe.experts)), axis=-1)[..., : cfg.moe.top_k]
        chosen[rng.random(shape) < 0.3] = -1  # these take their own
        batch["routes"] = chosen.astype(np.int16)
    return batch


def gradients(cfg, params, batch, mesh, layout, module):
    """Metrics, gradients and collectives of a train step with an optimizer that keeps gradients."""

    def part(p):
        return objective.trained_part(p, module)

    keep = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, part(p)),
        lambda grads, old, p: (jax.tree.map(jnp.zeros_like, grads), grads),
    )
    state = TrainState(np.int32(0), params, jax.tree.map(np.zeros_like, part(params)))
    state = place_state(state, cfg, keep, mesh, layout)
    step = make_train_step(cfg, keep, mesh, layout, module=module)
    batch = place_batch(batch, mesh, layout)
    compiled = step.lower(state, batch).compile()
    state, metrics = compiled(state, batch)
    for leaf, spec in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(models.spec(cfg)), strict=True
    ):
        matrix = sum(axis != "layer" for axis in spec.axes) > 1
        if layout.weights == "sharded" and matrix:
            assert leaf.addressable_shards[0].data.size * mesh.size == leaf.size, spec
    return *jax.device_get((state.opt_state, metrics)), collectives(compiled.as_text())


def collectives(text: str) -> list[tuple[str, tuple[int, ...], str]]:
    """What the module exchanges between devices."""
    kinds = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective", "ragged"
    return [
        (instruction.opcode, shape.dims, instruction.scope)
        for computation in hlo.parse(text).computations.values()
        for instruction in computation.values()
        if instruction.opcode.startswith(kinds) and not instruction.opcode.endswith("-done")
        for shape in instruction.shapes
    ]


def distance(one, other) -> float:
    """Largest difference relative to the Euclidean norm of a tensor."""

    def relative(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max(initial=0) / max(np.linalg.norm(a), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(relative, one, other)))


def main(path: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    with open(path) as file:
        cases = json.load(file)
    results, references = [], {}
    for case in cases:
        attention, mtp = case.pop("attention"), case.pop("mtp", False)
        routes = case.pop("routes", False)
        layout = MeshConfig(**case)
        cfg = config(attention, int(mtp))
        module = MTPConfig(joint_weight=0.3, into_trunk=True) if mtp else None
        params = jax.device_get(models.init(jax.random.key(1), cfg))
        batch = packed_batch(cfg, routes)
        key = attention, mtp, routes, layout.dispatch
        if key not in references:
            alone = MeshConfig(dispatch=layout.dispatch)
            references[key] = gradients(cfg, params, batch, meshes.data_mesh(1), alone, module)
        found = gradients(cfg, params, batch, meshes.make(layout), layout, module)
        pairs = zip(references[key][:2], found[:2], strict=True)
        grads, metrics = (distance(a, b) for a, b in pairs)
        results.append({"gradients": grads, "metrics": metrics, "collectives": found[2]})
    with open(path, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(sys.argv[1])
