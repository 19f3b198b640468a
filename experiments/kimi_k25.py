"""What does it take to continue the pretraining of Kimi K2.5 (report sections 2 and 5)?

The recipe at full size: 1.04 trillion parameters, at the two context lengths of the report with the
parallelism it names, 2 context-parallel ranks at 32k tokens and 8 at 256k, 8 expert-parallel ranks
in both. It needs about a thousand accelerators; what it would do on them is compiled without any:

    python -m launch.plan --config=experiments/kimi_k25.py:32k --topology=v5p:8x8x16
    python -m launch.plan --config=experiments/kimi_k25.py:256k --topology=v5p:8x8x16

Batches hold 16.8 million tokens at 32k and 33.6 million at 256k. Learning rates and lengths are
placeholders: the report does not give them, and the data are up to whoever runs it.
"""

from dataclasses import replace

from c2.data.config import DataConfig
from c2.models import presets
from c2.parallel.mesh import MeshConfig
from c2.training.loop import LoopConfig
from c2.training.optimizer import ScheduleConfig
from c2.training.pretrain import PhaseConfig
from experiments import recipe
from experiments.recipe import Config, EvaluationConfig
from experiments.study import Result, Run

VARIANTS = ("32k", "256k")


def _config(context: int, batch: int, mesh: MeshConfig) -> Config:
    return Config(
        model=replace(presets.get("kimi_k25"), kernels="tpu"),
        data=DataConfig(held_out="json"),
        phases=(
            PhaseConfig(
                name="main",
                steps=1000,
                context=context,
                batch=batch,
                learning_rate=ScheduleConfig(peak=1e-5, warmup_steps=50),
            ),
        ),
        mesh=mesh,
        evaluation=EvaluationConfig(windows=(4096, context)),
        loop=LoopConfig(log_every=1, eval_every=100, checkpoint_every=50),
    )


def get_config(variant: str = "32k") -> Config:
    """The configuration of a variant."""
    sharded = MeshConfig(expert=8, weights="sharded", expert_micro_batches=16)
    if variant == "32k":
        return _config(32_768, 512, replace(sharded, context=2))
    return _config(262_144, 128, replace(sharded, context=8, expert_micro_batches=32))


def run(config: Config, run: Run) -> Result:
    """Trains it, as `experiments.recipe` does."""
    return recipe.run(config, run)
