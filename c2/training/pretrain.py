"""Pretraining as phases: what changes between short context, long context and fine-tuning.

Report section 2: a main phase, a shorter phase at longer context, a short supervised phase. They
share one state, one step count and one optimizer; each has its own context length, rotary
scaling, learning-rate schedule and data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from c2 import models
from c2.config import ConfigError, located
from c2.data.packing import pack
from c2.data.pipeline import batches
from c2.data.store import TokenStore
from c2.losses.cross_entropy import token_log_probs
from c2.models import ModelConfig, YarnConfig, mtp, speculative
from c2.parallel import mesh as meshes
from c2.parallel.mesh import DATA_PARALLEL, MeshConfig
from c2.training import optimizer as optimizers
from c2.training.loop import Phase, StepFn
from c2.training.objective import MTPConfig
from c2.training.optimizer import OptimizerConfig, ScheduleConfig, schedule
from c2.training.sharding import place_batch
from c2.training.state import TrainState
from c2.training.step import make_train_step

Data = Callable[[str], tuple[TokenStore, Sequence[float] | None]]
"""Documents by the `data` of a phase, with the weights of their sources."""

KERNELS = {"cpu": ["xla"], "tpu": ["xla", "tpu"], "gpu": ["xla", "hopper", "blackwell"]}


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One phase of pretraining.

    Attributes:
      name: shown in progress, metrics and checkpoints.
      steps: optimizer steps.
      context: tokens per row; longer documents are cut.
      batch: rows per step, over all devices.
      learning_rate: its schedule.
      data: "code" trains on whole documents, "fine_tuning" on instruction and solution pairs
        made from them, with loss on the solutions only.
      yarn: rotary scaling from this phase on the model's own; none keeps the model's.
      mtp: how the multi-token-prediction module is trained; none leaves it out of the phase.
      micro_batches: gradient accumulation; does not change the result.
    """

    name: str
    steps: int
    context: int
    batch: int
    learning_rate: ScheduleConfig
    data: Literal["code", "fine_tuning"] = "code"
    yarn: YarnConfig | None = None
    mtp: MTPConfig | None = None
    micro_batches: int = 1

    def __post_init__(self):
        for key in ("steps", "batch", "micro_batches"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)} is not legal; legal: 1 or more")
        if self.context < 2:
            raise ConfigError(f"context: {self.context} is not legal; legal: 2 or more")
        if self.batch % self.micro_batches:
            raise ConfigError(
                f"micro_batches: {self.micro_batches} must divide batch = {self.batch}"
            )
        if self.learning_rate.warmup_steps >= self.steps:
            raise ConfigError(
                f"learning_rate.warmup_steps: {self.learning_rate.warmup_steps} must be below "
                f"steps = {self.steps}"
            )

    @property
    def trains_main(self) -> bool:
        """Whether the main model learns, too."""
        return self.mtp is None or self.mtp.joint_weight is not None


def phase_model(cfg: ModelConfig, phase: PhaseConfig) -> ModelConfig:
    """The model as a phase runs it: only rotary scaling can differ, so parameters fit all phases.

    ``cfg`` keeps its own scaling where the phase names none.
    """
    if phase.yarn is None:
        return cfg
    return replace(cfg, rope=replace(cfg.rope, yarn=phase.yarn))


def make_optimizer(
    cfg: OptimizerConfig, phases: Sequence[PhaseConfig], model: ModelConfig
) -> optax.GradientTransformation:
    """The optimizer of all phases: each part of the model counts the steps that train it."""

    def adamw(table, taking_part: Sequence[PhaseConfig]) -> optax.GradientTransformation:
        rates = schedule([(phase.learning_rate, phase.steps) for phase in taking_part])
        return optimizers.make(cfg, rates, table)

    table = models.spec(model)
    return optimizers.by_part(
        main=adamw(table.replace(mtp=()), [phase for phase in phases if phase.trains_main]),
        mtp=adamw(table.mtp, [phase for phase in phases if phase.mtp is not None]),
    )


def choose_mesh(phases: Sequence[PhaseConfig], layout: MeshConfig = DATA_PARALLEL) -> Mesh:
    """A mesh for the rows of every phase, see `c2.parallel.mesh.choose`."""
    rows = np.gcd.reduce([phase.batch // phase.micro_batches for phase in phases])
    return meshes.choose(int(rows), layout)


def make_phases(
    phases: Sequence[PhaseConfig],
    cfg: ModelConfig,
    data: Data,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    seed: int,
    bias_update_rate: float,
    evaluate: Callable[[ModelConfig], Callable[[TrainState], dict[str, float]]],
    layout: MeshConfig = DATA_PARALLEL,
) -> list[Phase]:
    """Turns phase configs into phases of `c2.training.loop.train`.

    Args:
      phases: in order.
      cfg: the model before any phase changes its rotary scaling.
      data: what to train on.
      optimizer: from `make_optimizer`.
      mesh: the devices.
      seed: of the order of the data; every phase derives its own.
      bias_update_rate: see `c2.training.step.balance_routers`.
      evaluate: from the phase's model to its evaluation of a state.
      layout: what lies where on the mesh.

    Raises:
      ConfigError: if the devices cannot run the model's kernels, or a phase's data do not fill one
        batch; names the key from `model`, `phases` or `data`.
    """
    platform = mesh.devices.flat[0].platform
    if cfg.kernels not in KERNELS[platform]:
        legal = ", ".join(KERNELS[platform])
        raise ConfigError(
            f"model.kernels: {cfg.kernels!r} does not run on {platform}; legal: {legal}"
        )
    made = []
    for number, phase in enumerate(phases):
        model = phase_model(cfg, phase)
        step = make_train_step(
            model,
            optimizer,
            mesh,
            layout,
            micro_batches=phase.micro_batches,
            bias_update_rate=bias_update_rate,
            module=phase.mtp,
        )
        made.append(
            Phase(
                name=phase.name,
                steps=phase.steps,
                step_fn=_placed(step, mesh, layout),
                make_batches=_batch_factory(
                    phase, number, data, seed + number, meshes.rows_of_process(mesh)
                ),
                evaluate=evaluate(model),
            )
        )
    return made


def _placed(step: StepFn, mesh: Mesh, layout: MeshConfig) -> StepFn:
    return lambda state, batch: step(state, place_batch(batch, mesh, layout))


def _batch_factory(phase: PhaseConfig, number: int, data: Data, seed: int, part: tuple[int, int]):
    with located("data"):
        documents, weights = data(phase.data)
    overlong = "split" if phase.data == "code" else "drop"
    rows = pack(documents, phase.context, overlong=overlong)
    with located(f"phases.{number}"):
        dataset = batches(
            rows,
            batch=phase.batch,
            seed=seed,
            weights=weights,
            shard=part[0],
            shards=part[1],
        )
    return lambda: iter(dataset)


def log_prob_fn(params: models.Params, cfg: ModelConfig) -> Callable[[np.ndarray], np.ndarray]:
    """Scores token rows under a model, as evaluations want it.

    Returns:
      ``tokens int32 [batch, window] -> log-probabilities of tokens[:, 1:], f32
      [batch, window - 1]``; compiled once per shape.
    """
    return lambda tokens: _whole(_log_probs(params, tokens, cfg))


@partial(jax.jit, static_argnames="cfg")
def _log_probs(params, tokens, cfg):
    logits = models.forward(params, tokens[:, :-1], cfg).logits
    return token_log_probs(logits, tokens[:, 1:])


def _whole(x: jax.Array) -> np.ndarray:
    """An array that may lie on devices of several processes, in all of them."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def acceptance_fn(params: models.Params, cfg: ModelConfig) -> Callable[[np.ndarray], np.ndarray]:
    """Tells how often the multi-token-prediction module's drafts would be accepted.

    Returns:
      ``tokens int32 [batch, window] -> probability that a draft for tokens[:, 2:] is accepted,
      f32 [batch, window - 2]``; compiled once per shape.
    """
    return lambda tokens: _whole(_acceptance(params, tokens, cfg))


@partial(jax.jit, static_argnames="cfg")
def _acceptance(params, tokens, cfg):
    p, q = model_and_draft(params, tokens, cfg)
    return speculative.acceptance(p, q)


def model_and_draft(
    params: models.Params, tokens: jax.Array, cfg: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """What model and module say of tokens[:, 2:]: probabilities, f32 [batch, window - 2, vocab].

    The module sees one token less: it drafts a token while the model computes the one before.
    """
    tokens = tokens[:, :-1]
    segment_ids = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = models.trunk(params, tokens, cfg)
    draft, _ = mtp.trunk(
        params.mtp[0],
        params.embed,
        out.hidden,
        tokens,
        cfg,
        positions=positions,
        segment_ids=segment_ids,
    )

    def probabilities(hidden):
        return jax.nn.softmax(models.logits(hidden, params), axis=-1)

    return probabilities(out.hidden[:, 1:]), probabilities(draft[:, :-1])
