"""The learner's programs against a whole-batch gradient with plain jax, and over batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from c2 import models
from c2.losses.config import PolicyGradientConfig
from c2.parallel.mesh import DATA_PARALLEL, make
from c2.rl.learner import make_learner
from c2.rl.replay import ReplayConfig
from c2.rl.rows import Row, pack
from c2.training.sharding import place_batch
from c2.training.state import TrainState

TEMPERATURE = 0.8


def random_rows(cfg, lengths, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for number, n in enumerate(lengths):
        choices = [rng.permutation(cfg.moe.experts)[: cfg.moe.top_k] for _ in range(n * 2)]
        routes = np.array(choices, np.int16).reshape(n, 2, cfg.moe.top_k)
        routes[-1] = -1
        weights = (rng.random(n) < 0.7).astype(np.float32)
        weights[0] = 0
        rows.append(
            Row(
                rollout=number,
                tokens=rng.integers(0, cfg.vocab, n).astype(np.int32),
                weights=weights,
                advantages=rng.normal(size=n).astype(np.float32),
                log_probs=rng.normal(size=n).astype(np.float32) - 4,
                temperatures=np.full(n, TEMPERATURE, np.float32),
                routes=routes,
            )
        )
    return rows


def padded(rows):
    """Every row alone in a batch row: tokens, routes, targets, and what targets count."""
    tokens, targets, real = np.zeros((3, len(rows), 16), np.int32)
    worth = np.zeros((len(rows), 16), np.float32)
    routes = np.full((len(rows), 16, *rows[0].routes.shape[1:]), -2, np.int16)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        tokens[i, :n], routes[i, :n], real[i, :n] = row.tokens, row.routes, 1
        targets[i, : n - 1] = row.tokens[1:]
        worth[i, : n - 1] = (row.weights * row.advantages)[1:]
    return tokens, routes, targets, real, worth


def make_expected(cfg):
    """The log-probabilities of the targets and the loss, with neither packing nor accumulation."""

    def loss(params, tokens, routes, targets, real, worth):
        out = models.forward(params, tokens, cfg, segment_ids=real, routes=routes)
        log_probs = jax.nn.log_softmax(out.logits / TEMPERATURE)
        taken = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
        return -(worth * taken).sum(), taken

    return jax.jit(
        jax.value_and_grad(loss, has_aux=True),
        compiler_options={"xla_backend_optimization_level": 0},
    )


def test_a_step_is_that_of_the_loss_row_by_row(tiny_config, random_params):
    cfg, params = tiny_config, random_params(tiny_config)
    optimizer = optax.sgd(1.0)
    mesh = make(DATA_PARALLEL, jax.devices()[:1])
    objective, replay = PolicyGradientConfig(), ReplayConfig(mode="strict")
    learner = make_learner(cfg, optimizer, mesh, DATA_PARALLEL, objective, replay)
    rows = random_rows(cfg, [9, 14, 5, 12, 7])
    packing = pack(rows, 16, multiple=4)
    assert len(packing.batch["tokens"]) == 4
    parts = np.array_split(np.arange(4), 2)
    placed = [place_batch({k: x[part] for k, x in packing.batch.items()}, mesh) for part in parts]
    opt_state = optimizer.init(params.replace(mtp=()))
    state = TrainState(jnp.int32(0), jax.tree.map(jnp.array, params), opt_state)
    total = learner.zero(state.params, placed[0])
    for batch in placed:
        total = learner.add(total, state.params, batch)
    new, metrics = learner.apply(state, total, 37.0)
    (loss, log_probs), grads = make_expected(cfg)(params, *padded(rows))
    np.testing.assert_allclose(metrics["loss"], loss / 37, rtol=1e-5)
    for old, after, grad in zip(*map(jax.tree.leaves, (params, new.params, grads)), strict=True):
        scale = np.linalg.norm(grad) + 1e-6
        np.testing.assert_allclose((old - after) * 37 / scale, grad / scale, atol=3e-5)
    found = np.concatenate([learner.inspect(params, batch)[0] for batch in placed])
    for number, (row, start, end) in enumerate(packing.places):
        wanted = log_probs[number, : end - start - 1]
        np.testing.assert_allclose(found[row, start : end - 1], wanted, atol=1e-5)
    assert metrics["tokens"] == sum((row.weights > 0).sum() for row in rows)
    real = sum(len(row.tokens) for row in rows)
    np.testing.assert_allclose(metrics["routes_missing"], 5 / real, rtol=1e-5)
    assert metrics["routes_replaced"] == 0 and int(new.step) == 1
