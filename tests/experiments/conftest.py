"""The recipe at a size that trains in a moment: nearly all of its time is compilation."""

from dataclasses import replace
from pathlib import Path

import pytest

from c2.data.config import DataConfig, Source
from c2.models import MLAConfig, MoEConfig
from c2.training.loop import LoopConfig
from c2.training.optimizer import OptimizerConfig
from experiments import recipe, registry
from experiments.recipe import EvaluationConfig
from launch import run_dir


@pytest.fixture(scope="session")
def tiny_recipe() -> recipe.Config:
    """Pretraining alone: three phases of one shape; two programs serve them."""
    config = recipe.get_config("smoke")
    main, distillation, _, tuning = config.phases
    size = {"context": 128, "batch": 4, "yarn": None}
    rate = replace(main.learning_rate, peak=1e-2)
    return replace(
        config,
        model=replace(
            config.model,
            vocab=512,
            hidden=16,
            layers=2,
            dense_intermediate=32,
            attention=MLAConfig(heads=2, q_lora=8, kv_lora=8, nope=4, rope=4, v=4),
            moe=MoEConfig(experts=4, top_k=2, intermediate=16),
        ),
        data=DataConfig(sources=(Source(path="stdlib:email"),), held_out="json", vocab_size=512),
        packages=None,
        optimizer=OptimizerConfig(),  # compiles faster than Muon
        phases=(
            replace(main, steps=12, learning_rate=rate, **size),
            replace(distillation, steps=6, learning_rate=rate, **size),
            replace(tuning, steps=4, mtp=None, **size),  # the program of the first phase
        ),
        evaluation=EvaluationConfig(windows=(32, 128), batch=32),
        loop=LoopConfig(log_every=1, eval_every=3, checkpoint_every=5),
        post_training=None,
    )


@pytest.fixture(scope="session")
def save_config():
    """Writes a config of the recipe as a config.json; gives its path."""

    def save(config: recipe.Config, path: Path) -> Path:
        run_dir.write_json(path, run_dir.manifest(registry.load("recipe:smoke"), config))
        return path

    return save


@pytest.fixture(scope="session")
def tiny_json(tiny_recipe, save_config, tmp_path_factory) -> Path:
    """The tiny recipe as a config.json."""
    return save_config(tiny_recipe, tmp_path_factory.mktemp("tiny") / "tiny.json")
