"""One training step: gradients over micro-batches and devices, AdamW, router balancing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from c2 import models
from c2.losses.cross_entropy import linear_cross_entropy
from c2.parallel.mesh import DATA

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@struct.dataclass
class TrainState:
    """Everything a step changes; a checkpoint holds it and the data iterator."""

    step: jax.Array  # int32 scalar, steps taken
    params: models.Params
    opt_state: Any


def init_state(
    key: jax.Array, cfg: models.ModelConfig, optimizer: optax.GradientTransformation
) -> TrainState:
    """A state at step 0 with random parameters."""
    params = models.init(key, cfg)
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def language_model_loss(
    params: models.Params, batch: Batch, cfg: models.ModelConfig
) -> tuple[jax.Array, Metrics]:
    """Summed next-token loss of one micro-batch, in nats; see `c2.data.packing` for the fields."""
    out = models.trunk(
        params,
        batch["tokens"],
        cfg,
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
    )
    loss = linear_cross_entropy(
        out.hidden, models.head(params), batch["targets"], batch["loss_mask"]
    )
    return loss, {"expert_load": out.expert_load}


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


def balance_routers(params: models.Params, load: jax.Array, rate: float) -> models.Params:
    """Moves each expert's selection bias towards equal load, without an auxiliary loss.

    Args:
      params: parameters.
      load: f32 [moe_layer, expert], assignments of the step over the whole batch.
      rate: size of a move, up for experts below their layer's mean and down for those above
        (DeepSeek-V3 section 2.1.2).
    """
    if params.moe is None or params.moe.moe.bias is None:
        return params
    block = params.moe.moe
    bias = block.bias + rate * jnp.sign(load.mean(-1, keepdims=True) - load)
    return params.replace(moe=params.moe.replace(moe=block.replace(bias=bias)))


def make_train_step(
    cfg: models.ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    bias_update_rate: float = 1e-3,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Compiles ``step(state, batch) -> (state, metrics)``; the given state is donated.

    The loss is divided by the number of target tokens of the global batch, known before any
    gradient is computed: splitting the batch over devices or micro-batches changes nothing.

    Args:
      cfg: model configuration.
      optimizer: gradient transformation.
      mesh: from `c2.parallel.mesh`; rows of the batch are split over its data axis.
      micro_batches: gradient accumulation steps; divides the rows of one device.
      bias_update_rate: see `balance_routers`.

    Metrics (scalars unless said): ``loss`` in nats per target token, ``grad_norm`` before
    clipping, ``target_tokens``, ``tokens`` (padding excluded), ``load_imbalance`` (busiest expert
    over mean, worst layer), ``expert_load`` [moe_layer, expert].
    """
    loss_fn = partial(language_model_loss, cfg=cfg)

    def gradients(params, batch):
        sums = summed_gradients(loss_fn, params, batch, micro_batches)
        return jax.lax.psum(sums, DATA)

    # check_vma off: the sums over devices are the explicit psum above
    gradients = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(DATA)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )

    # On CPU the devices of a mesh are the cores: threads inside operations would only compete.
    single_threaded = jax.default_backend() == "cpu" and mesh.size > 1
    options = {"xla_cpu_multi_thread_eigen": False} if single_threaded else {}

    @partial(jax.jit, donate_argnums=0, compiler_options=options)
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        targets = batch["loss_mask"].sum()
        (loss, aux), grads = gradients(state.params, batch)
        denominator = jnp.maximum(targets, 1.0)
        grads = jax.tree.map(lambda g: g / denominator, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        load = aux["expert_load"]
        params = balance_routers(params, load, bias_update_rate)
        metrics = {
            "loss": loss / denominator,
            "grad_norm": optax.tree.norm(grads),
            "target_tokens": targets,
            "tokens": (batch["segment_ids"] > 0).sum(),
            "load_imbalance": (load.max(-1) / jnp.maximum(load.mean(-1), 1.0)).max(initial=1.0),
            "expert_load": load,
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return step
