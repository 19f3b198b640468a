"""The train step: invariance to how a batch is split, padding, metrics and router balancing."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from c2 import models
from c2.config import ConfigError
from c2.parallel.mesh import data_mesh
from c2.training import optimizer
from c2.training.objective import MTPConfig
from c2.training.state import TrainState, init_state
from c2.training.step import balance_routers, make_train_step

RATE = 0.01  # of the router biases
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
SEQ = 24
# 12 rows that differ in tokens, in targets (a document of one token has none) and in padding
ROWS = [[24], [9, 14], [20, 4], [1, 1, 1], [], [5], [3, 3, 16], [24], [2], [11, 1, 8], [17], [6, 6]]


def recording(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer, with the gradients it was last given as part of its state."""

    def init(params):
        return inner.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(grads, state, params):
        updates, inner_state = inner.update(grads, state[0], params)
        return updates, (inner_state, grads)

    return optax.GradientTransformation(init, update)


@pytest.fixture(scope="module")
def cfg(tiny_config):
    return replace(tiny_config, layers=2)  # one of each kind


@pytest.fixture(scope="module")
def adam(cfg):
    return recording(optimizer.make(optimizer.OptimizerConfig(), 0.01, models.spec(cfg)))


@pytest.fixture(scope="module")
def fresh_state(cfg, adam, random_params):
    """Makes equal states; each can be donated once."""

    def make():
        params = random_params(cfg)
        return TrainState(jnp.int32(0), params, adam.init(params))

    return make


@pytest.fixture(scope="module")
def step(cfg, adam, fresh_state, batch):
    """Compiled steps by number of micro-batches and remat mode."""

    @cache
    def compiled(micro_batches=1, remat="none"):
        jitted = make_train_step(
            replace(cfg, remat=remat),
            adam,
            data_mesh(1),
            micro_batches=micro_batches,
            bias_update_rate=RATE,
        )
        return jitted.lower(fresh_state(), batch).compile(compiler_options=FAST_COMPILE)

    return compiled


@pytest.fixture(scope="module")
def batch(cfg, packed_rows):
    return packed_rows(ROWS, SEQ, cfg.vocab)


@pytest.fixture(scope="module")
def whole(step, fresh_state, batch):
    """State and metrics after one step on the batch in one piece."""
    return step()(fresh_state(), batch)


def gradients(state):
    return jax.device_get(state.opt_state[1])


def assert_close(got, expected):
    """Each tensor's error is at most 1e-6 of the tensor in the Euclidean norm."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(np.float64(a) - np.float64(b))
        assert error <= 1e-6 * np.linalg.norm(b), jax.tree_util.keystr(path)


def assert_identical(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def assert_equal_steps(got, expected):
    (grads, metrics), (exact_grads, exact_metrics) = got, expected
    assert_close(grads, exact_grads)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], exact_metrics[name], rtol=1e-6)
    for name in ("target_tokens", "tokens", "expert_load", "load_imbalance"):
        np.testing.assert_array_equal(metrics[name], exact_metrics[name])


slow = partial(pytest.param, marks=pytest.mark.slow)


# 12 pieces are recomputed in the backward pass as well, to compile one program less
@pytest.mark.parametrize(
    ("micro_batches", "remat"),
    [(3, "none"), (12, "full"), slow(12, "none"), slow(1, "full"), slow(1, "dots")],
)
def test_neither_accumulation_nor_recomputation_changes_gradients(
    step, fresh_state, batch, whole, micro_batches, remat
):
    state, metrics = step(micro_batches, remat)(fresh_state(), batch)
    assert_equal_steps((gradients(state), metrics), (gradients(whole[0]), whole[1]))


ON_FOUR_DEVICES = """
import pickle, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_default_matmul_precision", "highest")
import jax.numpy as jnp
import optax
from c2.parallel.mesh import data_mesh, replicate, place
from c2.training.state import TrainState
from c2.training.step import make_train_step

path, micro_batches = sys.argv[1], int(sys.argv[2])
with open(path, "rb") as file:
    cfg, params, batch = pickle.load(file)
mesh = data_mesh()
assert mesh.size == 4
keep = optax.GradientTransformation(
    lambda p: p, lambda grads, state, p: (jax.tree.map(jnp.zeros_like, grads), grads)
)
state = replicate(TrainState(jnp.int32(0), params, jax.tree.map(jnp.zeros_like, params)), mesh)
step = make_train_step(cfg, keep, mesh, micro_batches=micro_batches)
state, metrics = step(state, place(batch, mesh))
for leaf in jax.tree.leaves(state):
    assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 4
with open(path, "wb") as file:
    pickle.dump(jax.device_get((state.opt_state, metrics)), file)
"""


def test_gradients_do_not_depend_on_devices(cfg, random_params, batch, whole, tmp_path):
    """Four devices of three rows each, with 66, 4, 43 and 43 targets."""
    path = tmp_path / "exchange.pickle"
    path.write_bytes(pickle.dumps((cfg, jax.device_get(random_params(cfg)), batch)))
    subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES, path, "3"],
        cwd=Path(models.__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        check=True,
    )
    assert_equal_steps(pickle.loads(path.read_bytes()), (gradients(whole[0]), whole[1]))


def test_rows_count_by_their_targets(step, fresh_state, batch, whole):
    """The loss is a mean over targets, not over rows: parts add up by their number of targets."""
    totals = jax.tree.map(np.zeros_like, gradients(whole[0]))
    loss = 0.0
    parts = [slice(0, 1), slice(1, 5), slice(5, 12)]
    for part in parts:
        mask = np.zeros_like(batch["loss_mask"])
        mask[part] = batch["loss_mask"][part]
        state, metrics = step()(fresh_state(), batch | {"loss_mask": mask})
        assert metrics["target_tokens"] == mask.sum()
        share = mask.sum() / batch["loss_mask"].sum()
        loss += share * float(metrics["loss"])
        totals = jax.tree.map(lambda t, g, s=share: t + s * g, totals, gradients(state))
    np.testing.assert_allclose(loss, whole[1]["loss"], rtol=1e-6)
    assert_close(totals, gradients(whole[0]))


def test_batch_without_targets_is_no_division_by_zero(step, fresh_state, batch):
    nothing = batch | {"loss_mask": np.zeros_like(batch["loss_mask"])}
    state, metrics = step()(fresh_state(), nothing)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients(state)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_garbage_in_padding_changes_no_bit(step, fresh_state, batch, whole, cfg):
    padding = batch["segment_ids"] == 0
    rng = np.random.default_rng(5)
    garbage = {
        "tokens": rng.integers(-5, 2 * cfg.vocab, padding.shape),  # not even words
        "targets": rng.integers(cfg.vocab, size=padding.shape),
        "positions": rng.integers(-(10**9), 10**9, padding.shape),
    }
    noisy = {k: np.where(padding, v, batch[k]).astype(np.int32) for k, v in garbage.items()}
    assert padding.any() and (noisy["tokens"] != batch["tokens"]).any()
    assert_identical(step()(fresh_state(), batch | noisy), whole)


def test_metrics_count_what_they_say(batch, whole, cfg):
    state, metrics = whole
    load = np.asarray(metrics["expert_load"])
    assert metrics["target_tokens"] == batch["loss_mask"].sum()
    assert metrics["tokens"] == (batch["segment_ids"] > 0).sum()
    assert load.shape == (1, cfg.moe.experts)
    assert load.sum() == metrics["tokens"] * cfg.moe.top_k
    np.testing.assert_allclose(metrics["load_imbalance"], load.max() / load.mean(), rtol=1e-6)
    squares = sum((np.float64(g) ** 2).sum() for g in jax.tree.leaves(gradients(state)))
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=1e-6)
    # random parameters know nothing: the loss is that of guessing, and some
    assert np.log(cfg.vocab) < metrics["loss"] < np.log(cfg.vocab) + 1


def test_state_is_donated_and_counted(step, fresh_state, batch):
    before = fresh_state()
    after, _ = step()(before, batch)
    assert before.params.embed.is_deleted() and before.params.moe.moe.gate_up.is_deleted()
    assert after.step == 1 and after.step.dtype == jnp.int32
    assert step()(after, batch)[0].step == 2


def test_overfits_one_batch(step, fresh_state, batch):
    state, losses = fresh_state(), []
    for _ in range(20):
        state, metrics = step()(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    assert (np.diff(losses) < 0).mean() > 0.9


def test_router_bias_moves_against_load_by_exactly_the_rate(fresh_state, whole):
    state, metrics = whole
    load = np.asarray(metrics["expert_load"])
    assert len(np.unique(np.sign(load.mean() - load))) > 1
    move = np.float32(RATE) * np.sign(load.mean(-1, keepdims=True) - load)
    expected = np.asarray(fresh_state().params.moe.moe.bias) + move
    np.testing.assert_array_equal(state.params.moe.moe.bias, expected)


def test_balance_update_of_the_worked_example(fresh_state):
    params = fresh_state().params
    block = params.moe.moe.replace(bias=jnp.zeros((1, 8)))
    params = params.replace(moe=params.moe.replace(moe=block))
    load = jnp.float32([[10, 2, 6, 6, 0, 12, 4, 8]])
    moved = balance_routers(params, load, 0.001).moe.moe.bias
    expected = [[-0.001, 0.001, 0, 0, 0.001, -0.001, 0.001, -0.001]]
    np.testing.assert_array_equal(moved, np.float32(expected))
    dense = params.replace(moe=None)
    assert balance_routers(dense, jnp.zeros((0, 8)), 0.001) is dense


def test_router_biases_have_no_moments(cfg):
    made = optimizer.make(optimizer.OptimizerConfig(), 0.01, models.spec(cfg))
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), cfg, made))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    moments = [path for path in paths if path.startswith(".opt_state") and ".moe.moe." in path]
    assert [p for p in moments if p.endswith(".router")] and len(moments) == 2 * 5
    assert not [p for p in moments if p.endswith(".bias")]


@pytest.fixture(scope="module")
def mtp_cfg(cfg):
    return replace(cfg, mtp=1)


@pytest.fixture(scope="module")
def mtp_steps(mtp_cfg, random_params, batch):
    """State and metrics before and after three steps: the main model, its module, both."""
    table = models.spec(mtp_cfg)
    settings = optimizer.OptimizerConfig()
    adam = optimizer.by_part(
        main=optimizer.make(settings, 0.01, table.replace(mtp=())),
        mtp=optimizer.make(settings, 0.01, table.mtp),
    )
    params = random_params(mtp_cfg)
    state = TrainState(jnp.int32(0), params, adam.init(params))
    seen = [(jax.device_get(state), None)]
    for module in (None, MTPConfig(), MTPConfig(joint_weight=0.5)):
        step = make_train_step(mtp_cfg, adam, data_mesh(1), bias_update_rate=RATE, module=module)
        compiled = step.lower(state, batch).compile(compiler_options=FAST_COMPILE)
        state, metrics = compiled(state, batch)
        seen.append(jax.device_get((state, metrics)))
    return seen


def main_of(state):
    return state.params.replace(mtp=()), state.opt_state["main"]


def module_of(state):
    return state.params.mtp, state.opt_state["mtp"]


def all_move(before, after):
    """Whether every tensor of a part of the parameters is another one."""
    return all(
        (a != b).any() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )


def test_a_part_that_is_not_trained_keeps_every_bit_of_weights_and_moments(mtp_steps):
    (start, _), (main, _), (distilled, _), (joint, _) = mtp_steps
    assert_identical(module_of(main), module_of(start))
    assert all_move(main_of(start)[0], main_of(main)[0])
    assert_identical(main_of(distilled), main_of(main))
    assert all_move(module_of(main)[0], module_of(distilled)[0])
    assert all_move(distilled.params, joint.params)
    assert joint.step == 3


def test_each_part_counts_its_own_steps(mtp_steps):
    last = mtp_steps[-1][0].opt_state
    counts = {
        name: {int(leaf) for leaf in jax.tree.leaves(state) if leaf.ndim == 0}
        for name, state in last.items()
    }
    assert counts == {"main": {2}, "mtp": {2}}


def test_the_first_step_of_the_main_model_is_that_without_a_module(mtp_steps, whole):
    """The module's parameters are there, but nothing is computed of them."""
    state, metrics = whole
    assert_close(main_of(mtp_steps[1][0])[0], jax.device_get(state.params))
    np.testing.assert_allclose(mtp_steps[1][1]["loss"], metrics["loss"], rtol=1e-6)
    assert mtp_steps[1][1].keys() == metrics.keys()


def test_the_modules_router_bias_moves_by_exactly_the_rate(mtp_steps):
    biases = [state.params.mtp[0].layer.moe.bias for state, _ in mtp_steps]
    load = mtp_steps[2][1]["mtp_expert_load"][0]
    move = np.float32(RATE) * np.sign(load.mean() - load)
    assert move.any()
    np.testing.assert_array_equal(biases[2], biases[1] + move)


def test_a_step_that_trains_the_module_reports_its_loss(mtp_steps):
    (_, distilled), (_, joint) = mtp_steps[2:]
    assert distilled["loss"] == distilled["mtp_loss"] > 0
    assert joint["loss"] > joint["mtp_loss"] > 0
    assert joint["mtp_loss"] < distilled["mtp_loss"]  # on the same batch, a step later


@pytest.mark.parametrize("modules", [0, 2])
def test_only_one_module_can_be_trained(cfg, adam, modules):
    with pytest.raises(ConfigError, match=f"mtp: {modules} modules cannot be trained; legal: 1"):
        make_train_step(replace(cfg, mtp=modules), adam, data_mesh(1), module=MTPConfig())
