"""Importance weights against worked examples and loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.config import ConfigError
from c2.losses import importance
from c2.losses.config import ImportanceConfig, KLConfig, PolicyGradientConfig

RATIOS = np.float32([[1.25, 0.8, 1.5]])  # probabilities .5 .4 .9 where .4 .5 .6 were sampled from
ALL = np.ones((1, 3), bool)
ONE = np.ones((1, 3), np.int32)


@pytest.mark.parametrize(
    ("config", "weights", "out"),
    [
        ({"kind": "off"}, [1, 1, 1], [0, 0, 0]),
        ({"kind": "token_tis", "high": 1.2}, [1.2, 0.8, 1.2], [1, 0, 1]),
        ({"kind": "token_tis", "high": 9.0}, [1.25, 0.8, 1.5], [0, 0, 0]),
        ({"kind": "sequence_tis", "high": 1.2}, [1.2] * 3, [1] * 3),
        ({"kind": "sequence_tis", "high": 2.0}, [1.5] * 3, [0] * 3),
        ({"kind": "mis", "low": 0.5, "high": 1.2}, [0, 0.8, 0], [1, 0, 1]),
        ({"kind": "mis", "low": 0.9, "high": 1.4}, [1.25, 0, 0], [0, 1, 1]),
    ],
)
def test_worked_examples(config, weights, out):
    got, outside = importance.weights(jnp.log(RATIOS), ALL, ONE, ImportanceConfig(**config))
    np.testing.assert_allclose(got[0], weights, rtol=1e-6)
    assert outside[0].tolist() == [bool(o) for o in out]


def random_case(seed=0, rows=3, seq=12):
    rng = np.random.default_rng(seed)
    segment_ids = np.sort(rng.integers(0, 4, (rows, seq)))[:, ::-1].astype(np.int32)
    trained = (rng.random((rows, seq)) < 0.7) & (segment_ids > 0)
    log_ratio = np.where(trained, rng.normal(size=(rows, seq)), 0).astype(np.float32)
    return log_ratio, trained, segment_ids


def test_a_sequence_has_the_product_of_its_own_ratios():
    log_ratio, trained, segment_ids = random_case()
    config = ImportanceConfig(kind="sequence_tis", high=3.0)
    got, out = importance.weights(log_ratio, trained, segment_ids, config)
    for row, token in np.argwhere(trained):
        mine = (segment_ids[row] == segment_ids[row, token]) & trained[row]
        product = np.prod(np.exp(log_ratio[row][mine].astype(np.float64)))
        np.testing.assert_allclose(got[row, token], min(product, 3.0), rtol=1e-5)
        assert out[row, token] == (product > 3.0)
    assert out.any() and not out[~trained].any()


def test_tokens_of_a_row_may_lie_on_several_devices():
    log_ratio, trained, segment_ids = random_case(1)
    config = ImportanceConfig(kind="sequence_tis", high=3.0)
    whole = importance.weights(log_ratio, trained, segment_ids, config)

    def on_devices(x):  # tokens dealt in turn, [device, row, token]
        return np.stack([x[:, i::4] for i in range(4)])

    split = jax.vmap(
        lambda *x: importance.weights(*x, config, axes=("context",)), axis_name="context"
    )(*map(on_devices, (log_ratio, trained, segment_ids)))
    for mine, expected in zip(split, whole, strict=True):
        np.testing.assert_allclose(mine, on_devices(expected), rtol=1e-6)


@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis", "mis"])
def test_no_gradient_and_no_overflow(kind):
    config = ImportanceConfig(kind=kind)
    log_ratio = jnp.float32([[200.0, -200.0, 0.0]])

    def total(x):
        return importance.weights(x, ALL, ONE, config)[0].sum()

    value, gradient = jax.value_and_grad(total)(log_ratio)
    assert np.isfinite(value) and (gradient == 0).all()


def test_configs_refuse_what_cannot_be_meant():
    with pytest.raises(ConfigError, match="placement: 'loss' does nothing with estimator k1"):
        KLConfig(estimator="k1", placement="loss")
    for estimator in ("k2", "k3"):
        KLConfig(estimator=estimator, placement="loss")
    for bad in ({"beta": -1.0}, {"beta": float("nan")}, {"beta": float("inf")}):
        with pytest.raises(ConfigError, match="beta"):
            KLConfig(**bad)
    for bad in ({"high": 0.5}, {"low": 1.5}, {"low": -0.1}, {"high": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ImportanceConfig(**bad)
    with pytest.raises(ConfigError, match="tokens_per_rollout"):
        PolicyGradientConfig(tokens_per_rollout=0)
