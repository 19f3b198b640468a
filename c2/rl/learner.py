"""A step of reinforcement learning on a mesh, piece by piece.

The rows of a step are packed into batches of one shape, so however many there are, each program is
compiled once. Gradients are sums over tokens; `apply` divides them by a denominator that was fixed
before (`c2.rl.credit`), so it does not matter which batch a row is in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from c2 import models
from c2.losses.config import PolicyGradientConfig
from c2.losses.policy_gradient import linear_log_probs, policy_gradient
from c2.models import ModelConfig, Params, moe
from c2.parallel.mesh import BATCH, TOKENS, MeshConfig
from c2.rl.replay import ReplayConfig
from c2.training import sharding
from c2.training.objective import Batch, Functions, outside_layers, put, trained_part
from c2.training.state import TrainState
from c2.training.step import compiler_options, make_gradients, replicated, state_shardings

Total = Any  # ((loss, sums), gradients) so far


class Learner(NamedTuple):
    """Compiled programs; batches are those of `c2.training.sharding.place_batch`.

    Attributes:
      zero: ``(params, batch) -> total``, of no tokens, whatever the batch.
      add: ``(total, params, batch) -> total`` with one more batch; the given total is donated.
      apply: ``(state, total, denominator) -> (state, metrics)``; the state is donated.
      inspect: ``(params, batch) -> (log_probs, replaced)``: f32 [row, token] of the targets, and
        bool [row, token], whether an expert of the token's route is not the captured one.
      reference: ``(params, batch) -> f32 [row, token]``, log-probabilities of the targets under
        another policy, which routes for itself.
    """

    zero: Callable[[Params, Batch], Total]
    add: Callable[[Total, Params, Batch], Total]
    apply: Callable[[TrainState, Total, float], tuple[TrainState, dict[str, jax.Array]]]
    inspect: Callable[[Params, Batch], tuple[jax.Array, jax.Array]]
    reference: Callable[[Params, Batch], jax.Array]


def make_learner(
    cfg: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    layout: MeshConfig,
    config: PolicyGradientConfig,
    replay: ReplayConfig,
) -> Learner:
    """Builds the programs.

    A prediction module is left alone. Metrics of `apply`, means over trained tokens unless said:
    those of `c2.losses.policy_gradient.policy_gradient`, ``entropy`` in nats, ``tokens`` (how
    many), ``loss``, ``grad_norm`` before clipping, and the shares ``routes_missing`` of all rows
    of routes and ``routes_replaced`` of the replayed experts.

    Args:
      cfg: model configuration.
      optimizer: gradient transformation, of the parameters without prediction modules.
      mesh: from `c2.parallel.mesh.make`, for ``layout``.
      layout: what lies where.
      config: the objective.
      replay: of the routes that were sampled with.
    """
    functions = sharding.functions(cfg, mesh, layout)
    partitions = sharding.partitions(cfg, mesh, layout)
    options = compiler_options(mesh)

    def forward(params: Params, batch: Batch, experts: Callable):
        params = outside_layers(params, cfg, functions.unshard)
        out = models.trunk(
            params, batch["tokens"], cfg, positions=batch["positions"],
            segment_ids=batch["segment_ids"], routes=batch["routes"] if cfg.moe_layers else None,
            attention=functions.attention, experts=experts, unshard=functions.unshard,
        )  # fmt: skip
        head = models.head(params)
        return linear_log_probs(out.hidden, head, batch["targets"], batch["temperatures"]), out

    def loss(params: Params, batch: Batch, functions: Functions):
        (log_probs, entropy), out = forward(params, batch, replay.experts(functions.experts))
        total, sums = policy_gradient(log_probs, batch, config, axes=TOKENS)
        sums["entropy"] = jnp.where(batch["weights"] > 0, entropy, 0).sum()
        if cfg.moe_layers:
            sums |= moe.replay_counts(batch["routes"], out.routes, cfg.moe.experts)
        return total, sums

    gradients = make_gradients(loss, cfg, mesh, layout)
    where = jax.tree.map(lambda p: NamedSharding(mesh, p), trained_part(partitions, None))
    of_total = (replicated(mesh), where)

    @partial(jax.jit, donate_argnums=0, out_shardings=of_total, compiler_options=options)
    def add(total: Total, params: Params, batch: Batch) -> Total:
        return jax.tree.map(jnp.add, total, gradients(trained_part(params, None), params, batch))

    @partial(jax.jit, out_shardings=of_total)
    def zero(params: Params, batch: Batch) -> Total:
        shapes = jax.eval_shape(gradients, trained_part(params, None), params, batch)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    @partial(
        jax.jit,
        donate_argnums=0,
        out_shardings=(state_shardings(cfg, optimizer, mesh, layout), replicated(mesh)),
    )
    def apply(state: TrainState, total: Total, denominator: float):
        (loss, sums), grads = total
        grads = jax.tree.map(lambda g: g / denominator, grads)
        part = trained_part(state.params, None)
        updates, opt_state = optimizer.update(grads, state.opt_state, part)
        params = put(state.params, optax.apply_updates(part, updates))
        metrics = _means(sums, cfg)
        metrics |= {"loss": loss / denominator, "grad_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, opt_state), metrics

    def on_mesh(f: Callable) -> Callable:
        specs = (partitions, BATCH)
        mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=BATCH, check_vma=False)
        return jax.jit(mapped, compiler_options=options)

    def inspect(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        (log_probs, _), out = forward(params, batch, replay.experts(functions.experts))
        if not cfg.moe_layers:
            return log_probs, jnp.zeros(log_probs.shape, bool)
        given = batch["routes"]
        other = moe.captured(given, cfg.moe.experts) & (given != out.routes)
        return log_probs, other.any((-1, -2))

    def reference(params: Params, batch: Batch) -> jax.Array:
        own = ReplayConfig(mode="none").experts(functions.experts)
        return forward(params, batch, own)[0][0]

    return Learner(zero, add, apply, on_mesh(inspect), on_mesh(reference))


def _means(sums: dict[str, jax.Array], cfg: ModelConfig) -> dict[str, jax.Array]:
    sums = dict(sums)
    tokens = sums.pop("tokens")
    metrics = {"tokens": tokens}
    if cfg.moe_layers:
        rows, missing, replaced = (sums.pop(name) for name in ("routes", "missing", "replaced"))
        experts = (rows - missing) * cfg.moe.top_k
        metrics["routes_missing"] = missing / jnp.maximum(rows, 1)
        metrics["routes_replaced"] = replaced / jnp.maximum(experts, 1)
    return metrics | {name: x / jnp.maximum(tokens, 1) for name, x in sums.items()}
