"""The module's objective against one without chunks, shifts and masks; who gets which gradient."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.config import ConfigError
from c2.models import mtp
from c2.training import objective
from c2.training.objective import MTPConfig
from c2.training.step import summed_gradients

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
SEQ = 24
ROWS = [[9, 14], [20, 4], [1, 2, 1, 16], [24]]

ALONE = MTPConfig()
REVERSE = MTPConfig(loss="reverse_kl")
LABELS = MTPConfig(loss="hard_labels")
BESIDE = MTPConfig(joint_weight=0.5)
JOINT = MTPConfig(joint_weight=0.5, into_trunk=True)


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return replace(tiny_config, layers=2, mtp=1)  # one layer of each kind


@pytest.fixture(scope="module")
def params(cfg, random_params):
    return random_params(cfg)


@pytest.fixture(scope="module")
def batch(cfg, packed_rows):
    batch = packed_rows(ROWS, SEQ, cfg.vocab)
    batch["loss_mask"][1, :7] = 0  # a prompt
    return batch


@pytest.fixture(scope="module")
def grads_of(cfg, params):
    """Batch -> ((loss, sums), gradients of all parameters)."""

    @cache
    def compiled(module, micro_batches=1, remat="none"):
        def run(params, batch):
            def loss(params, batch):
                return objective.loss(params, batch, replace(cfg, remat=remat), module)

            return summed_gradients(loss, params, batch, micro_batches)

        jitted = jax.jit(run, compiler_options=FAST_COMPILE)
        return lambda batch: jax.device_get(jitted(params, batch))

    return lambda module, batch, *how: compiled(module, *how)(batch)


def assert_close(got, expected, rtol=1e-5):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(np.float64(a) - np.float64(b))
        assert error <= rtol * np.linalg.norm(b), jax.tree_util.keystr(path)


def main_of(grads):
    return grads.replace(mtp=())


def is_zero(grads):
    return not any(leaf.any() for leaf in jax.tree.leaves(grads))


def drafted(batch):
    """Row and index of every token whose module prediction counts, by definition."""
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            for at in range(start, start + length - 2):  # predicts token at + 2
                if batch["loss_mask"][row, at + 1]:
                    yield row, at
            start += length


@pytest.fixture(scope="module")
def reference(params, batch, cfg):
    """The module's loss from whole matrices of logits, token by token; and its gradients."""
    rows, at = np.array(list(drafted(batch))).T
    layout = {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}

    def loss(params, module):
        out = models.forward(params, batch["tokens"], cfg, **layout)
        shared = out.hidden, params.embed, models.head(params)
        hidden, embed, head = shared if module.into_trunk else jax.lax.stop_gradient(shared)
        draft, _ = mtp.trunk(params.mtp[0], embed, hidden, batch["tokens"], cfg, **layout)
        log_q = jax.nn.log_softmax(draft[rows, at] @ head)
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(out.logits[rows, at + 1]))
        match module.loss:
            case "forward_kl":
                return (jnp.exp(log_p) * (log_p - log_q)).sum()
            case "reverse_kl":
                return (jnp.exp(log_q) * (log_q - log_p)).sum()
            case "hard_labels":
                return -log_q[np.arange(len(rows)), batch["tokens"][rows, at + 2]].sum()

    grads = jax.jit(jax.value_and_grad(loss), static_argnums=1, compiler_options=FAST_COMPILE)
    return lambda module: jax.device_get(grads(params, module))


@pytest.mark.parametrize(
    "module",
    [ALONE, LABELS, pytest.param(REVERSE, marks=pytest.mark.slow)],
    ids=lambda module: module.loss,
)
def test_alone_the_loss_is_the_references_and_only_the_module_has_a_gradient(
    grads_of, reference, batch, module
):
    (loss, sums), grads = grads_of(module, batch)
    exact, exact_grads = reference(module)
    np.testing.assert_allclose(loss, exact, rtol=1e-5)
    assert sums["losses"]["loss"] == sums["losses"]["mtp_loss"] == loss
    assert_close(grads.mtp, exact_grads.mtp)
    assert is_zero(main_of(grads))
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads.mtp):
        assert leaf.any() != jax.tree_util.keystr(path).endswith(".bias")


def test_jointly_the_main_model_notices_the_module_only_if_asked(grads_of, reference, batch):
    (main, _), main_grads = grads_of(None, batch)
    (extra, _), extra_grads = grads_of(ALONE, batch)
    assert is_zero(main_grads.mtp)
    for module in (BESIDE, JOINT):
        (loss, sums), grads = grads_of(module, batch)
        np.testing.assert_allclose(loss, main + 0.5 * extra, rtol=1e-6)
        np.testing.assert_allclose(sums["losses"]["loss"], main, rtol=1e-6)
        np.testing.assert_allclose(sums["losses"]["mtp_loss"], extra, rtol=1e-6)
        assert_close(grads.mtp, jax.tree.map(lambda g: 0.5 * g, extra_grads.mtp))
        if module is BESIDE:
            assert_close(main_of(grads), main_of(main_grads), rtol=1e-6)
    _, through = reference(JOINT)
    assert through.embed.any() and through.head.any() and through.moe.moe.router.any()
    expected = jax.tree.map(lambda a, b: a + 0.5 * b, main_of(main_grads), main_of(through))
    assert_close(main_of(grads), expected)


@pytest.mark.parametrize("micro_batches", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_splitting_the_batch_changes_nothing(grads_of, batch, micro_batches):
    (loss, sums), grads = grads_of(JOINT, batch)
    (cut_loss, cut_sums), cut_grads = grads_of(JOINT, batch, micro_batches)
    np.testing.assert_allclose(cut_loss, loss, rtol=1e-6)
    assert_close(cut_grads, grads, rtol=1e-6)
    np.testing.assert_array_equal(cut_sums["mtp_expert_load"], sums["mtp_expert_load"])


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_recomputation_changes_nothing(grads_of, batch, remat):
    (loss, _), grads = grads_of(JOINT, batch)
    (again, _), again_grads = grads_of(JOINT, batch, 1, remat)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    assert_close(again_grads, grads, rtol=1e-6)


def test_the_last_token_of_a_document_has_no_effect(grads_of, batch, cfg):
    """It is drafted only: the model's distribution at it is the first one that can't be checked."""
    last = (batch["segment_ids"] > 0) & ~np.asarray(mtp.has_next(batch["segment_ids"]))
    assert last.sum() == sum(map(len, ROWS))
    tokens = np.where(last, (batch["tokens"] + 5) % cfg.vocab, batch["tokens"])
    (loss, _), grads = grads_of(ALONE, batch)
    (again, _), again_grads = grads_of(ALONE, batch | {"tokens": tokens})
    assert loss == again
    assert_close(again_grads.mtp, grads.mtp, rtol=1e-6)


def test_other_documents_change_no_bit(grads_of, batch, cfg):
    mine = np.zeros_like(batch["loss_mask"], bool)
    mine[0] = batch["segment_ids"][0] == 2
    only = batch | {"loss_mask": batch["loss_mask"] * mine}
    rng = np.random.default_rng(3)
    tokens = np.where(mine, batch["tokens"], rng.integers(cfg.vocab, size=mine.shape))
    loss, again = (grads_of(ALONE, b)[0][0] for b in (only, only | {"tokens": tokens}))
    assert loss > 0 and loss == again


def test_draft_mask_by_definition(batch):
    expected = np.zeros_like(batch["loss_mask"])
    for row, at in drafted(batch):
        expected[row, at] = 1
    assert 0 < expected[1].sum() < 20 - 2  # the prompt is not drafted
    np.testing.assert_array_equal(objective.draft_mask(batch), expected)


def test_loads_are_those_of_tokens_with_a_next_one(grads_of, batch, cfg):
    (_, sums), _ = grads_of(ALONE, batch)
    followed = np.asarray(mtp.has_next(batch["segment_ids"])).sum()
    assert sums["mtp_expert_load"].shape == (1, cfg.moe.experts)
    assert sums["mtp_expert_load"].sum() == followed * cfg.moe.top_k


def test_parts_are_taken_and_put_back(params):
    params = jax.device_get(params)
    for module, trained in ((None, "main"), (ALONE, "module"), (BESIDE, "both"), (JOINT, "both")):
        part = objective.trained_part(params, module)
        assert (part.embed is None) == (trained == "module")
        assert (part.mtp == ()) == (trained == "main")
        doubled = objective.put(params, jax.tree.map(lambda x: 2 * x, part))
        assert jax.tree.structure(doubled) == jax.tree.structure(params)
        factors = jax.tree.map(lambda a, b: bool((a == 2 * b).all()), doubled, params)
        assert all(jax.tree.leaves(factors.mtp)) == (trained != "main")
        assert all(jax.tree.leaves(main_of(factors))) == (trained != "module")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"into_trunk": True}, "into_trunk: the main model is frozen; legal"),
        ({"joint_weight": 0.0}, "joint_weight: 0.0 is not legal; legal: above 0"),
    ],
)
def test_illegal_settings_are_refused_by_name(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        MTPConfig(**kwargs)
