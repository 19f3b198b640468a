"""One training step: gradients over micro-batches and devices, AdamW, router balancing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from c2 import models
from c2.config import ConfigError
from c2.models.blocks import MoELayer
from c2.models.compiling import ROUND_AS_WRITTEN
from c2.parallel.expert import OVERLAP
from c2.parallel.mesh import AXES, BATCH, DATA_PARALLEL, MeshConfig
from c2.parallel.rules import sum_gradients
from c2.training import objective, sharding
from c2.training.objective import Batch, MTPConfig, put, trained_part
from c2.training.state import TrainState

Metrics = dict[str, jax.Array]


def summed_gradients(loss_fn: Callable, params: Any, batch: Batch, micro_batches: int):
    """Sums loss, metrics and gradients over equal slices of the batch's rows.

    Returns ``((loss, metrics), gradients)`` as `jax.value_and_grad` does, whatever the split:
    every term is a sum, so nothing depends on it but rounding.
    """
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if micro_batches == 1:
        return grad_fn(params, batch)
    slices = jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], slices))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total, micro_batch):
        return jax.tree.map(jnp.add, total, grad_fn(params, micro_batch)), None

    return jax.lax.scan(add, zeros, slices)[0]


def balance_routers(
    params: models.Params, load: jax.Array, rate: float, mtp_load: jax.Array | None = None
) -> models.Params:
    """Moves each expert's selection bias towards equal load, without an auxiliary loss.

    Args:
      params: parameters, or a part of them; the biases in it move.
      load: f32 [moe_layer, expert], assignments of the step over the whole batch.
      rate: size of a move, up for experts below their layer's mean and down for those above
        (DeepSeek-V3 section 2.1.2).
      mtp_load: the same for the multi-token-prediction module, f32 [1, expert].
    """

    def balanced(layer: MoELayer, load: jax.Array) -> MoELayer:
        bias = layer.moe.bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
        return layer.replace(moe=layer.moe.replace(bias=bias))

    if params.moe is not None and params.moe.moe.bias is not None:
        params = params.replace(moe=balanced(params.moe, load))
    if mtp_load is not None and params.mtp[0].layer.moe.bias is not None:
        (module,) = params.mtp
        module = module.replace(layer=balanced(module.layer, mtp_load[0]))
        params = params.replace(mtp=(module,))
    return params


def _imbalance(load: jax.Array) -> jax.Array:
    """Busiest expert over mean in the worst layer; 1 without any."""
    return (load.max(-1, initial=0.0) / jnp.maximum(load.mean(-1), 1.0)).max(initial=1.0)


def make_gradients(
    loss: Callable[..., tuple[jax.Array, Any]],
    cfg: models.ModelConfig,
    mesh: Mesh,
    layout: MeshConfig,
    module: MTPConfig | None = None,
    *,
    micro_batches: int = 1,
) -> Callable[[Any, models.Params, Batch], tuple[tuple[jax.Array, Any], Any]]:
    """Builds the gradients of a loss over a mesh.

    Args:
      loss: ``(params, batch, functions=...) -> (sum, sums)`` over the tokens that it is given.
      cfg: model configuration.
      mesh: as for `make_train_step`, and so ``layout`` and ``micro_batches``.
      layout: what lies where.
      module: decides what is trained, see `trained_part`.
      micro_batches: gradient accumulation steps.

    Returns:
      ``(trained_part, params, batch) -> ((sum, sums), gradients)`` over all devices, to be jitted.
    """
    partitions = sharding.partitions(cfg, mesh, layout)
    trained_partitions = trained_part(partitions, module)
    functions = sharding.functions(cfg, mesh, layout)

    def gradients(trained, params, batch):
        def loss_fn(part, batch):
            return loss(put(params, part), batch, functions=functions)

        sums, grads = summed_gradients(loss_fn, trained, batch, micro_batches)
        return jax.lax.psum(sums, AXES), sum_gradients(grads, trained_partitions)

    # One manual region: every exchange between devices is one that the code names. Each device
    # differentiates the sum over its own tokens (check_vma off), and what it adds to the gradients
    # of others comes to them through the transposed exchanges.
    return jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(trained_partitions, partitions, BATCH),
        out_specs=(PartitionSpec(), trained_partitions),
        check_vma=False,
    )


def state_shardings(
    cfg: models.ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    layout: MeshConfig,
) -> TrainState:
    """Where a state lies."""
    state = sharding.abstract_state(cfg, optimizer, mesh, layout)
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on all devices."""
    return NamedSharding(mesh, PartitionSpec())


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """What XLA is told about programs on a mesh."""
    platform = mesh.devices.flat[0].platform
    options = ROUND_AS_WRITTEN | (OVERLAP.get(platform, {}) if mesh.size > 1 else {})
    if platform == "cpu" and mesh.size > 1:
        # the devices of a mesh are the cores: threads inside operations would only compete
        options["xla_cpu_multi_thread_eigen"] = False
    return options


def make_train_step(
    cfg: models.ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    layout: MeshConfig = DATA_PARALLEL,
    *,
    micro_batches: int = 1,
    bias_update_rate: float = 1e-3,
    module: MTPConfig | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Compiles ``step(state, batch) -> (state, metrics)``; the given state is donated.

    The loss is divided by the number of target tokens of the global batch, known before any
    gradient is computed: splitting the batch over devices or micro-batches changes nothing.

    Args:
      cfg: model configuration.
      optimizer: gradient transformation. It is given the `trained_part` of the parameters and its
        gradients; if that is not always the same part, see `c2.training.optimizer.by_part`.
      mesh: from `c2.parallel.mesh.make`, for ``layout``.
      layout: what lies where; batches are those of `c2.training.sharding.place_batch`.
      micro_batches: gradient accumulation steps; divides the rows of one device.
      bias_update_rate: see `balance_routers`.
      module: how the multi-token-prediction module is trained; None leaves it alone, at no cost.

    Metrics (scalars unless said): ``loss`` in nats per target token, of the main model or, where it
    is frozen, of the module; ``grad_norm`` before clipping, ``target_tokens``, ``tokens`` (padding
    excluded), ``load_imbalance`` (busiest expert over mean, worst layer), ``expert_load``
    [moe_layer, expert]. If the module is trained, ``mtp_loss`` and ``mtp_expert_load`` [1, expert].

    Raises:
      ConfigError: if there is not exactly one module to train.
    """
    if module is not None and cfg.mtp != 1:
        raise ConfigError(f"mtp: {cfg.mtp} modules cannot be trained; legal: 1")

    loss = partial(objective.loss, cfg=cfg, module=module)
    gradients = make_gradients(loss, cfg, mesh, layout, module, micro_batches=micro_batches)

    @partial(
        jax.jit,
        donate_argnums=0,
        out_shardings=(state_shardings(cfg, optimizer, mesh, layout), replicated(mesh)),
        compiler_options=compiler_options(mesh),
    )
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        targets = batch["loss_mask"].sum()
        part = trained_part(state.params, module)
        (_, sums), grads = gradients(part, state.params, batch)
        denominator = jnp.maximum(targets, 1.0)
        grads = jax.tree.map(lambda g: g / denominator, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, part)
        part = optax.apply_updates(part, updates)
        losses, load, mtp_load = sums["losses"], sums["expert_load"], sums.get("mtp_expert_load")
        part = balance_routers(part, load, bias_update_rate, mtp_load)
        metrics = {name: nats / denominator for name, nats in losses.items()} | {
            "grad_norm": optax.tree.norm(grads),
            "target_tokens": targets,
            "tokens": (batch["segment_ids"] > 0).sum(),
            "load_imbalance": _imbalance(load),
            "expert_load": load,
        }
        if mtp_load is not None:
            metrics["mtp_expert_load"] = mtp_load
        return TrainState(state.step + 1, put(state.params, part), opt_state), metrics

    return step
