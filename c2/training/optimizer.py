"""AdamW or Muon with warm-up, decay and global-norm clipping, assembled from optax."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from c2.config import ConfigError
from c2.models import Params
from c2.models.params import ParamSpec, trainable_mask

# Axes along which a tensor holds matrices of their own.
_STACKED = ("layer", "expert", "gate_up")
# Muon's updates get the root mean square that AdamW's have, so both take the same learning rates
# (Liu et al. 2025, section 2.2).
_ADAMW_RMS = 0.2


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate of one phase: linear warm-up to ``peak``, then decay to ``final * peak``."""

    peak: float
    warmup_steps: int = 0
    decay: Literal["constant", "cosine", "linear"] = "cosine"
    final: float = 0.1

    def __post_init__(self):
        if self.peak <= 0:
            raise ConfigError(f"peak must be positive, got {self.peak}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if not 0 <= self.final <= 1:
            raise ConfigError(f"final must be in 0..1 (a share of peak), got {self.final}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) or Muon; weight decay acts on matrices only.

    Attributes:
      name: "adamw", or "muon" (Jordan et al. 2024; Liu et al. 2025) for the matrices inside of
        layers: the momentum is orthogonalised. All else still gets AdamW.
      b1: decay of the first moment, and of Muon's momentum.
      b2: decay of AdamW's second moment.
      eps: added to AdamW's root of it.
      weight_decay: per step and unit of learning rate.
      clip_norm: largest norm of all gradients together.
    """

    name: Literal["adamw", "muon"] = "adamw"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self):
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.eps <= 0 or self.clip_norm <= 0 or self.weight_decay < 0:
            raise ConfigError(
                "eps and clip_norm must be positive and weight_decay at least 0, got "
                f"{self.eps}, {self.clip_norm}, {self.weight_decay}"
            )


def schedule(phases: list[tuple[ScheduleConfig, int]]) -> optax.Schedule:
    """Joins the schedules of consecutive phases, (schedule, steps) each; 0 without phases."""
    if not phases:
        return optax.constant_schedule(0.0)
    parts, borders, start = [], [], 0
    for cfg, steps in phases:
        parts.append(_phase_schedule(cfg, steps))
        start += steps
        borders.append(start)
    return optax.join_schedules(parts, borders[:-1])


def _phase_schedule(cfg: ScheduleConfig, steps: int) -> optax.Schedule:
    if cfg.warmup_steps >= max(steps, 1):
        raise ConfigError(f"warmup_steps = {cfg.warmup_steps} must be below steps = {steps}")
    left = steps - cfg.warmup_steps
    after = {
        "constant": lambda: optax.constant_schedule(cfg.peak),
        "cosine": lambda: optax.cosine_decay_schedule(cfg.peak, left, alpha=cfg.final),
        "linear": lambda: optax.linear_schedule(cfg.peak, cfg.peak * cfg.final, left),
    }[cfg.decay]()
    if not cfg.warmup_steps:
        return after
    # the first step already moves: rate peak / warmup_steps, not 0
    first = cfg.peak / cfg.warmup_steps
    warm = optax.linear_schedule(first, cfg.peak, max(cfg.warmup_steps - 1, 1))
    return optax.join_schedules([warm, after], [cfg.warmup_steps])


def make(
    cfg: OptimizerConfig, learning_rate: optax.ScalarOrSchedule, specs: Any
) -> optax.GradientTransformation:
    """Builds the optimizer for the parameters described by a table of `ParamSpec`s.

    Tensors that are not trainable get neither update nor moments. Weight decay spares vectors
    (norm scales); the stacked "layer" axis does not make a matrix of a vector.
    """
    decayed = jax.tree.map(lambda spec: sum(axis != "layer" for axis in spec.axes) >= 2, specs)
    rules = {
        "fixed": optax.set_to_zero(),
        "adamw": optax.adamw(
            learning_rate, cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay, mask=decayed
        ),
    }
    matrices = jax.tree.map(lambda _: None, specs)
    if cfg.name == "muon":
        matrices = jax.tree.map(muon_dimensions, specs)
        rules["muon"] = optax.contrib.muon(
            learning_rate,
            beta=cfg.b1,
            weight_decay=cfg.weight_decay,
            muon_weight_dimension_numbers=matrices,
            consistent_rms=_ADAMW_RMS,
        )

    def rule(spec: ParamSpec, matrix: MuonDimensionNumbers | None) -> str:
        return "fixed" if not spec.trainable else "muon" if matrix else "adamw"

    return optax.chain(
        optax.masked(optax.clip_by_global_norm(cfg.clip_norm), trainable_mask(specs)),
        optax.partition(rules, jax.tree.map(rule, specs, matrices)),
    )


def muon_dimensions(spec: ParamSpec) -> MuonDimensionNumbers | None:
    """Which axes of a tensor are the inputs and which the outputs of one matrix.

    None for what is no matrix, and for embeddings, heads and routers, whose rows or columns are
    things of their own: tokens and experts.
    """
    axes = [i for i, axis in enumerate(spec.axes) if axis not in _STACKED]
    if len(axes) < 2 or "vocab" in spec.axes:
        return None
    inputs = 1
    while math.prod(spec.shape[i] for i in axes[:inputs]) < spec.fan_in:
        inputs += 1
    return MuonDimensionNumbers(tuple(axes[:inputs]), tuple(axes[inputs:]))


def by_part(
    main: optax.GradientTransformation, mtp: optax.GradientTransformation
) -> optax.GradientTransformation:
    """One optimizer for the main model and one for its multi-token-prediction modules.

    Gradients may be of one part alone, the rest of the tree being None: the other optimizer's state
    stays as it is, its moments and its step count too. Each part is clipped by its own norm, so
    modules that send no gradient into the main model do not change its training by a bit.
    """

    def init(params: Params):
        return {"main": main.init(params.replace(mtp=())), "mtp": mtp.init(params.mtp)}

    def update(grads: Params, state, params: Params):
        updates, state = grads, dict(state)
        if grads.embed is not None:
            without = [tree.replace(mtp=()) for tree in (grads, params)]
            found, state["main"] = main.update(without[0], state["main"], without[1])
            updates = found.replace(mtp=updates.mtp)
        if grads.mtp:
            found, state["mtp"] = mtp.update(grads.mtp, state["mtp"], params.mtp)
            updates = updates.replace(mtp=found)
        return updates, state

    return optax.GradientTransformation(init, update)
