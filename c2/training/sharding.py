"""The model on a mesh: where state and batches lie, and how the forward pass changes.

A change of mesh changes nothing else: the same step, objective and model run on one device and on a
thousand, and a checkpoint of one mesh is restored on another.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from c2 import models
from c2.config import ConfigError
from c2.models import MLAConfig, ModelConfig, Params, blocks, moe
from c2.parallel import context, expert, rules
from c2.parallel import mesh as meshes
from c2.parallel.mesh import BATCH, DATA_PARALLEL, EXPERTS, TOKENS, MeshConfig
from c2.training.objective import Functions
from c2.training.state import TrainState


def partitions(cfg: ModelConfig, mesh: Mesh, layout: MeshConfig) -> Params:
    """How every parameter lies on the mesh, as a tree of `PartitionSpec`.

    Raises:
      ConfigError: if a dimension does not divide over the devices it lies on.
    """
    return jax.tree.map(lambda spec: rules.partition(spec, layout, mesh), models.spec(cfg))


def functions(cfg: ModelConfig, mesh: Mesh, layout: MeshConfig) -> Functions:
    """The pieces of the forward pass that exchange something between devices.

    Raises:
      ConfigError: if the layout asks for what the model does not have.
    """
    chosen: dict[str, Any] = {}
    if layout.context > 1:
        exchange = {"exchange": layout.exchange} if isinstance(cfg.attention, MLAConfig) else {}
        attention = blocks.kind_of_attention(cfg).attention
        chosen["attention"] = partial(attention, gather=_all_tokens, **exchange)
    if layout.expert > 1 or layout.dispatch != "native":
        if cfg.moe is None or cfg.moe.experts % layout.expert:
            experts = 0 if cfg.moe is None else cfg.moe.experts
            raise ConfigError(
                f"mesh.expert: {layout.expert} ranks do not divide the model's {experts} experts"
            )
        dispatched = partial(
            expert.expert_mlp,
            axes=EXPERTS,
            dispatch=layout.dispatch,
            micro_batches=layout.expert_micro_batches,
            ragged=mesh.devices.flat[0].platform != "cpu",  # which has no such collective
        )
        chosen["experts"] = partial(moe.moe, mlp_of_experts=dispatched)
    if layout.weights == "sharded":
        chosen["unshard"] = partial(rules.unshard, cfg=layout, mesh=mesh, dtype=cfg.dtype)
    return Functions(**chosen)


def _all_tokens(x: jax.Array) -> jax.Array:
    """[rows, tokens, ...] of this rank -> [rows, seq, ...] of all that share the sequence."""
    return jax.lax.all_gather(x, TOKENS, axis=1, tiled=True)


def abstract_state(
    cfg: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, layout: MeshConfig
) -> TrainState:
    """Shapes, dtypes and shardings of a state, to place, restore or compile for one.

    Moments lie where their parameters lie: shapes that carry a sharding hand it on to what an
    optimizer makes of them.
    """
    carrying = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 4)

    def shape(spec, partition) -> jax.ShapeDtypeStruct:
        where = NamedSharding(carrying, partition)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where)

    params = jax.tree.map(shape, models.spec(cfg), partitions(cfg, mesh, layout))
    with jax.set_mesh(carrying):
        opt_state = jax.eval_shape(optimizer.init, params)
    state = TrainState(jax.ShapeDtypeStruct((), np.int32), params, opt_state)

    def place(leaf) -> jax.ShapeDtypeStruct:
        partition = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
        where = NamedSharding(mesh, partition)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(place, state)


def place_state(
    state: TrainState,
    cfg: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    layout: MeshConfig = DATA_PARALLEL,
) -> TrainState:
    """Moves a state to where it lies on the mesh."""
    target = abstract_state(cfg, optimizer, mesh, layout)
    return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, target)


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: Mesh, layout: MeshConfig = DATA_PARALLEL
) -> dict[str, jax.Array]:
    """Puts a batch in the layout's order of tokens and onto the devices.

    Args:
      batch: this process's rows of the global batch, with all tokens, see
        `c2.parallel.mesh.rows_of_process`.
      mesh: the mesh.
      layout: what lies where.
    """
    return meshes.place(context.arrange(batch, layout), mesh)


def abstract_batch(
    batch: Mapping[str, Any], mesh: Mesh, layout: MeshConfig = DATA_PARALLEL
) -> dict[str, jax.ShapeDtypeStruct]:
    """What `place_batch` makes of a batch of such shapes, without making it."""
    where = NamedSharding(mesh, BATCH)
    shapes = {name: (x.shape, x.dtype) for name, x in batch.items()}
    if layout.context > 1:
        rows, seq = batch["segment_ids"].shape
        per_row = 2 * layout.context if layout.layout == "zigzag" else seq // context.CHUNK
        shapes[context.CHUNKS] = (rows, per_row), np.dtype(np.int32)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        for name, (shape, dtype) in shapes.items()
    }
