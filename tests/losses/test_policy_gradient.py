"""The loss of tokens with advantages, against the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.losses.config import ImportanceConfig, KLConfig, PolicyGradientConfig
from c2.losses.policy_gradient import linear_log_probs, policy_gradient
from c2.rollout.sampling import distribution

FAST_COMPILE = {"xla_backend_optimization_level": 0}
ROWS, SEQ = 4, 8
PLAIN = PolicyGradientConfig()
WITH_ALL = PolicyGradientConfig(
    kl=KLConfig(beta=0.3, estimator="k3", placement="loss"),
    importance=ImportanceConfig(kind="sequence_tis", high=1.5),
)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    shape = (ROWS, SEQ)
    segment_ids = np.sort(rng.integers(0, 3, shape))[:, ::-1].astype(np.int32)
    weights = np.where(segment_ids > 0, rng.choice([0, 0.5, 1], shape), 0)
    arrays = {
        "weights": weights,
        "advantages": rng.normal(size=shape),
        "sampled": -rng.exponential(size=shape),
        "reference": -rng.exponential(size=shape),
    }
    assert 5 < (weights > 0).sum() < ROWS * SEQ - 5
    return {name: x.astype(np.float32) for name, x in arrays.items()} | {"segment_ids": segment_ids}


LOG_PROBS = -np.random.default_rng(1).exponential(size=(ROWS, SEQ)).astype(np.float32)


run = jax.jit(
    jax.value_and_grad(policy_gradient, has_aux=True),
    static_argnames="config",
    compiler_options=FAST_COMPILE,
)


def loss_and_gradient(log_probs, batch, config):
    (loss, sums), gradient = run(jnp.float32(log_probs), batch, config=config)
    return float(loss), {name: float(x) for name, x in sums.items()}, np.asarray(gradient)


def test_plain_is_advantage_times_log_probability(batch):
    loss, sums, gradient = loss_and_gradient(LOG_PROBS, batch, PLAIN)
    coefficient = batch["weights"] * batch["advantages"]
    np.testing.assert_allclose(loss, -(coefficient * LOG_PROBS).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, -coefficient, rtol=1e-6)
    trained = batch["weights"] > 0
    log_ratio = np.where(trained, LOG_PROBS.astype(np.float64) - batch["sampled"], 0)
    expected = {
        "tokens": trained.sum(),
        "importance_weight": trained.sum(),
        "out_of_bounds": 0,
        "log_ratio_abs": np.abs(log_ratio).sum(),
        "mismatch": (np.expm1(log_ratio) - log_ratio).sum(),
    }
    assert sums == pytest.approx(expected, rel=1e-5)


def test_everything_at_once_against_a_loop(batch):
    loss, sums, gradient = loss_and_gradient(LOG_PROBS, batch, WITH_ALL)
    b = {name: x.astype(np.float64) for name, x in batch.items()}
    log_q = LOG_PROBS.astype(np.float64)
    total, expected = 0.0, np.zeros((ROWS, SEQ))
    kl = {"kl_k1": 0.0, "kl_k2": 0.0, "kl_k3": 0.0}
    for at in np.argwhere(b["weights"] > 0):
        at = tuple(at)
        mine = (b["segment_ids"][at[0]] == b["segment_ids"][at]) & (b["weights"][at[0]] > 0)
        ratio = min(np.exp((log_q - b["sampled"])[at[0]][mine].sum()), 1.5)
        log_r = (b["reference"] - log_q)[at]
        k3, slope = np.exp(log_r) - 1 - log_r, 1 - np.exp(log_r)
        scale = b["weights"][at] * ratio
        total -= scale * (b["advantages"][at] * log_q[at] - 0.3 * k3)
        expected[at] = -scale * (b["advantages"][at] - 0.3 * slope)
        for name, value in zip(kl, (-log_r, log_r**2 / 2, k3), strict=True):
            kl[name] += value
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert {name: sums[name] for name in kl} == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("config", [PLAIN, WITH_ALL])
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_what_has_no_weight_has_no_effect(batch, config, rubbish):
    clean = loss_and_gradient(LOG_PROBS, batch, config)
    idle = batch["weights"] == 0
    dirty = {
        name: np.where(idle, np.float32(rubbish), batch[name])
        for name in ("advantages", "sampled", "reference")
    }
    got = loss_and_gradient(np.where(idle, rubbish, LOG_PROBS), batch | dirty, config)
    assert got[:2] == clean[:2]
    np.testing.assert_array_equal(got[2], clean[2])
    assert (got[2][idle] == 0).all()


@pytest.mark.parametrize("config", [PLAIN, WITH_ALL])
def test_rows_add_up_however_they_are_split(batch, config):
    loss, sums, _ = loss_and_gradient(LOG_PROBS, batch, config)
    parts = [
        loss_and_gradient(LOG_PROBS[i : i + 1], {n: x[i : i + 1] for n, x in batch.items()}, config)
        for i in range(ROWS)
    ]
    np.testing.assert_allclose(sum(part[0] for part in parts), loss, rtol=1e-5)
    for name, value in sums.items():
        np.testing.assert_allclose(sum(part[1][name] for part in parts), value, rtol=1e-5)


@pytest.fixture(scope="module")
def tokens():
    rng = np.random.default_rng(2)
    hidden = rng.normal(size=(2, 5, 6)).astype(np.float32)
    head = rng.normal(size=(6, 11)).astype(np.float32)
    targets = rng.integers(0, 11, (2, 5))
    return hidden, head, targets, rng.choice([0.6, 1.0, 1.4], (2, 5)).astype(np.float32)


def exact_log_probs(hidden, head, targets, temperatures):
    logits = (hidden.astype(np.float64) @ head) / temperatures[..., None]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at_target = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    return at_target, -(np.exp(log_probs) * log_probs).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 10, 256])
def test_log_probs_do_not_depend_on_chunks(tokens, chunk):
    got = jax.jit(linear_log_probs, static_argnames="chunk")(*tokens, chunk=chunk)
    for mine, expected in zip(got, exact_log_probs(*tokens), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


def test_gradients_of_log_probs(tokens):
    hidden, head, targets, temperatures = tokens
    weights = np.random.default_rng(3).normal(size=targets.shape).astype(np.float32)

    def chunked(hidden, head):
        log_probs, entropies = linear_log_probs(hidden, head, targets, temperatures, chunk=3)
        return (weights * log_probs).sum() + entropies.sum()  # the second has no gradient

    def whole(hidden, head):
        log_probs = jax.nn.log_softmax(hidden @ head / temperatures[..., None])
        return (weights * jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]).sum()

    got, expected = (
        jax.jit(jax.grad(f, (0, 1)), compiler_options=FAST_COMPILE)(hidden, head)
        for f in (chunked, whole)
    )
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_the_softmax_is_float32(tokens):
    hidden, head, targets, temperatures = tokens
    got = jax.jit(linear_log_probs)(jnp.bfloat16(hidden), head, targets, temperatures)[0]
    rounded = (np.asarray(jnp.bfloat16(x), np.float32) for x in (hidden, head))
    np.testing.assert_allclose(got, exact_log_probs(*rounded, targets, temperatures)[0], rtol=1e-5)


def test_the_trainer_sees_the_distribution_that_the_engine_samples_from(tokens):
    hidden, head, targets, temperatures = tokens
    log_probs = distribution((hidden @ head).reshape(10, -1), temperatures.reshape(-1))
    expected = log_probs[np.arange(10), targets.reshape(-1)].reshape(targets.shape)
    got = jax.jit(linear_log_probs)(*tokens)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
