"""Fine-tuning of given weights on given documents: a stage of its own, with own checkpoints."""

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from c2.data.store import TokenStore
from c2.models import ModelConfig, Params
from c2.parallel.mesh import MeshConfig
from c2.training.checkpoint import Checkpoints
from c2.training.loop import LoopConfig, train
from c2.training.metrics import MetricsLog
from c2.training.optimizer import OptimizerConfig
from c2.training.pretrain import PhaseConfig, choose_mesh, make_optimizer, make_phases
from c2.training.progress import TrainingProgress
from c2.training.sharding import place_state
from c2.training.state import TrainState
from experiments.study import Run


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig:
    """A stage of fine-tuning.

    Attributes:
      phase: its length, shape and learning rate.
      optimizer: its settings; its state begins anew.
      mesh: how steps are spread over devices.
      bias_update_rate: step of the routers' selection biases towards equal expert load.
      seed: of the order of the documents.
      loop: reporting and saving.
    """

    phase: PhaseConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    bias_update_rate: float = 1e-3
    seed: int = 0
    loop: LoopConfig = field(default_factory=LoopConfig)


def fine_tune(
    config: FineTuningConfig,
    model: ModelConfig,
    params: Params,
    documents: TokenStore,
    folder: Path,
    run: Run,
) -> Params:
    """Trains, or goes on where it was interrupted.

    Args:
      config: how.
      model: model configuration.
      params: to begin with; kept as they are.
      documents: what to train on.
      folder: for checkpoints and metrics.
      run: where progress is shown.

    Returns:
      The parameters after the last step.
    """
    phases, layout = (config.phase,), config.mesh
    mesh = choose_mesh(phases, layout)
    optimizer = make_optimizer(config.optimizer, phases, model)
    made = make_phases(
        phases, model, lambda _: (documents, None), optimizer, mesh,
        seed=config.seed, bias_update_rate=config.bias_update_rate, evaluate=lambda _: None,
        layout=layout,
    )  # fmt: skip
    state = TrainState(jnp.int32(0), jax.tree.map(jnp.copy, params), None)
    state = state.replace(opt_state=optimizer.init(state.params))  # steps donate all of it
    state = place_state(state, model, optimizer, mesh, layout)
    loop = config.loop
    with (
        Checkpoints(folder / "checkpoints", keep=loop.keep, keep_every=loop.keep_every) as saved,
        MetricsLog(folder) as log,
    ):
        progress = TrainingProgress(run.console)
        return train(made, state, checkpoints=saved, log=log, progress=progress, config=loop).params
