"""What model and prediction module say of a text, and the optimizer of several phases."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.config import ConfigError
from c2.parallel import mesh as meshes
from c2.training.objective import MTPConfig, trained_part
from c2.training.optimizer import OptimizerConfig, ScheduleConfig
from c2.training.pretrain import (
    PhaseConfig,
    acceptance_fn,
    make_optimizer,
    make_phases,
    model_and_draft,
)

WINDOW = 12


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return replace(tiny_config, layers=2, mtp=1)


@pytest.fixture(scope="module")
def params(cfg, random_params):
    return random_params(cfg)


@pytest.fixture(scope="module")
def tokens(cfg):
    return np.random.default_rng(0).integers(cfg.vocab, size=(3, WINDOW)).astype(np.int32)


@pytest.fixture(scope="module")
def says(params, cfg):
    return jax.jit(lambda tokens: model_and_draft(params, tokens, cfg))


def test_the_models_distribution_is_that_of_its_next_tokens(params, cfg, tokens, says):
    p, q = says(tokens)
    assert p.shape == q.shape == (3, WINDOW - 2, cfg.vocab)
    forward = jax.jit(models.forward, static_argnums=2)
    logits = np.float64(forward(params, tokens, cfg).logits)
    exact = np.exp(logits - logits.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(p, exact[:, 1:-1], atol=1e-6)  # of tokens[:, 2:]
    np.testing.assert_allclose(np.asarray(q).sum(-1), 1, rtol=1e-5)


def test_neither_sees_the_token_it_speaks_of_and_the_draft_sees_the_one_before(cfg, tokens, says):
    before = says(tokens)
    for at in (2, 7, WINDOW - 1):  # column at - 2 of the result is about it
        other = tokens.copy()
        other[:, at] = (other[:, at] + 1) % cfg.vocab
        for one, two in zip(before, says(other), strict=True):
            changed = (np.asarray(one) != two).any(-1)  # [row, column]
            assert not changed[:, : at - 1].any()
            assert changed[:, at - 1 :].all()


def test_acceptance_is_the_overlap_of_the_two(params, cfg, tokens, says):
    p, q = (np.asarray(x) for x in says(tokens))
    accepted = acceptance_fn(params, cfg)(tokens)
    np.testing.assert_allclose(accepted, 1 - np.abs(p - q).sum(-1) / 2, rtol=1e-5)


def test_each_part_follows_the_rates_of_the_phases_that_train_it(params, cfg):
    """With equal gradients every step of Adam has the size of the learning rate."""
    kinds = {0.1: None, 0.2: MTPConfig(), 0.3: MTPConfig(joint_weight=1.0)}
    phases = [
        PhaseConfig(
            name=str(peak),
            steps=2,
            context=2,
            batch=1,
            learning_rate=ScheduleConfig(peak=peak, decay="constant"),
            mtp=module,
        )
        for peak, module in kinds.items()
    ]
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0, clip_norm=1e9), phases, cfg)
    state = optimizer.init(params)
    for phase in phases:
        part = trained_part(params, phase.mtp)
        grads = jax.tree.map(jnp.ones_like, part)
        update = jax.jit(lambda state, grads=grads, part=part: optimizer.update(grads, state, part))
        for _ in range(phase.steps):
            updates, state = update(state)
            norms = jax.tree.leaves((updates.norm, [module.norm for module in updates.mtp]))
            assert len(norms) == phase.trains_main + (phase.mtp is not None)
            np.testing.assert_allclose(np.concatenate(norms), -phase.learning_rate.peak, rtol=1e-5)


def test_kernels_of_another_chip_are_refused_by_name(cfg):
    with pytest.raises(
        ConfigError, match=r"^model\.kernels: 'tpu' does not run on cpu; legal: xla$"
    ):
        make_phases(
            (),
            replace(cfg, kernels="tpu"),
            None,
            None,
            meshes.data_mesh(1),
            seed=0,
            bias_update_rate=0.0,
            evaluate=None,
        )
