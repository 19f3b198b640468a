"""The pretrained base that studies of agents share: the last weights, found again, measured."""

import dataclasses

import jax
import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from c2.data.config import Source
from c2.data.prepare import prepare
from c2.evals.codebase_nll import codebase_nll
from c2.training.pretrain import log_prob_fn
from experiments import agents, recipe
from experiments.study import Run


@pytest.mark.slow
def test_a_base_is_what_pretraining_ended_with_and_is_found_again(tiny_recipe, tmp_path):
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    base = agents.pretrain(tiny_recipe, tmp_path / "base", run)
    data = prepare(tiny_recipe.data, tmp_path / "base" / "data")
    windows = tiny_recipe.evaluation
    score = codebase_nll(
        data.corpus.held_out, data.tokenizer, log_prob_fn(base.params, base.model),
        window=windows.windows[0], stride=int(windows.windows[0] * windows.stride), batch_size=32,
    )  # fmt: skip
    assert score.bits_per_byte == pytest.approx(base.bits_per_byte, rel=1e-5)
    assert base.model.mtp == 0 and base.params.mtp == () and base.tokenizer.exists()
    again = agents.pretrain(tiny_recipe, tmp_path / "base", run)
    jax.tree.map(np.testing.assert_array_equal, base.params, again.params)
    assert again.bits_per_byte == base.bits_per_byte


def test_what_is_wrong_with_pretraining_is_named_from_the_root(tiny_recipe, tmp_path):
    nowhere = (Source(path=str(tmp_path / "nowhere")),)
    wrong = dataclasses.replace(
        tiny_recipe, data=dataclasses.replace(tiny_recipe.data, sources=nowhere)
    )
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    with pytest.raises(ConfigError, match=r"^config\.pretraining\.data\."):
        agents.pretrain(wrong, tmp_path / "base", run)


def test_post_training_has_one_place():
    shared = agents.smoke()
    whole = recipe.get_config("smoke")
    with pytest.raises(ConfigError, match=r"^pretraining\.post_training: .*legal: none"):
        dataclasses.replace(shared, pretraining=whole)
