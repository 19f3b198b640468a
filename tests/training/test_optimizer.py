"""Schedules in closed form and the optimizer against AdamW written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from c2.config import ConfigError
from c2.models.params import ParamSpec
from c2.training.optimizer import OptimizerConfig, ScheduleConfig, make, schedule


def rates(*phases, steps):
    rate = schedule(list(phases))
    return [float(rate(step)) for step in range(steps)]


def test_warmup_moves_from_the_first_step():
    cfg = ScheduleConfig(peak=0.8, warmup_steps=4, decay="constant")
    np.testing.assert_allclose(rates((cfg, 6), steps=6), [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=1e-6)
    one = ScheduleConfig(peak=0.8, warmup_steps=1, decay="constant")
    np.testing.assert_allclose(rates((one, 3), steps=3), 0.8, rtol=1e-6)


def test_decay_starts_at_peak_and_ends_at_its_final_share():
    cosine = ScheduleConfig(peak=2.0, warmup_steps=2, decay="cosine", final=0.25)
    at = np.arange(9)
    expected = 2 * (0.25 + 0.75 * (1 + np.cos(np.pi * at / 8)) / 2)
    # step 10 is the first one after the phase; asking for it is legal
    np.testing.assert_allclose(rates((cosine, 10), steps=11), [1, 2, *expected], rtol=1e-6)
    linear = ScheduleConfig(peak=2.0, decay="linear", final=0.0)
    np.testing.assert_allclose(
        rates((linear, 4), steps=6), [2, 1.5, 1, 0.5, 0, 0], rtol=1e-6, atol=1e-7
    )


def test_phases_follow_each_other_with_their_own_warmup():
    first = ScheduleConfig(peak=1.0, decay="linear", final=0.5)
    second = ScheduleConfig(peak=0.2, warmup_steps=2, decay="constant")
    third = ScheduleConfig(peak=0.1, decay="cosine", final=0.0)
    got = rates((first, 2), (second, 3), (third, 2), steps=8)
    np.testing.assert_allclose(got, [1, 0.75, 0.1, 0.2, 0.2, 0.1, 0.05, 0], atol=1e-7)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"peak": 0.0}, "peak"),
        ({"peak": 1.0, "warmup_steps": -1}, "warmup_steps"),
        ({"peak": 1.0, "final": 1.5}, "final"),
    ],
)
def test_illegal_schedules_are_refused_by_name(kwargs, named):
    with pytest.raises(ConfigError, match=named):
        ScheduleConfig(**kwargs)


def test_warmup_must_fit_into_the_phase():
    with pytest.raises(ConfigError, match="warmup_steps = 5 must be below steps = 5"):
        schedule([(ScheduleConfig(peak=1.0, warmup_steps=5), 5)])


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [({"b2": 1.0}, "b2"), ({"eps": 0.0}, "eps"), ({"weight_decay": -0.1}, "weight_decay")],
)
def test_illegal_optimizers_are_refused_by_name(kwargs, named):
    with pytest.raises(ConfigError, match=named):
        OptimizerConfig(**kwargs)


SPECS = {
    "matrix": ParamSpec((3, 4), ("embed", "ffw")),
    "stacked": ParamSpec((2, 3, 4), ("layer", "embed", "ffw")),
    "square": ParamSpec((3, 3), ("embed", "embed")),
    "norm": ParamSpec((3,), ("embed",)),
    "stacked_norm": ParamSpec((2, 3), ("layer", "embed")),
    "bias": ParamSpec((4,), ("expert",), trainable=False),
}
DECAYED = {"matrix", "stacked", "square"}


def test_steps_equal_adamw_in_numpy():
    cfg = OptimizerConfig(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.3, clip_norm=1.0)
    rate = schedule([(ScheduleConfig(peak=0.1, warmup_steps=2, decay="constant"), 10)])
    optimizer = make(cfg, rate, SPECS)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=s.shape).astype(np.float32) for name, s in SPECS.items()}
    exact = {name: np.float64(p) for name, p in params.items()}
    first, second = ({name: np.zeros(s.shape) for name, s in SPECS.items()} for _ in range(2))
    state = optimizer.init(jax.tree.map(jnp.asarray, params))
    update = jax.jit(optimizer.update)

    for t, size in enumerate([10.0, 0.01, 1.0]):  # clipped, not clipped, clipped
        grads = {n: (size * rng.normal(size=p.shape)).astype(np.float32) for n, p in params.items()}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)

        trained = [name for name, spec in SPECS.items() if spec.trainable]
        norm = np.sqrt(sum((np.float64(grads[name]) ** 2).sum() for name in trained))
        for name in trained:
            g = grads[name] * min(1, cfg.clip_norm / norm)
            first[name] = cfg.b1 * first[name] + (1 - cfg.b1) * g
            second[name] = cfg.b2 * second[name] + (1 - cfg.b2) * g**2
            m = first[name] / (1 - cfg.b1 ** (t + 1))
            v = second[name] / (1 - cfg.b2 ** (t + 1))
            decay = cfg.weight_decay * exact[name] if name in DECAYED else 0
            exact[name] -= [0.05, 0.1, 0.1][t] * (m / (np.sqrt(v) + cfg.eps) + decay)
        for name in SPECS:
            np.testing.assert_allclose(params[name], exact[name], rtol=1e-5, atol=1e-6)


def test_only_trainable_tensors_have_moments():
    optimizer = make(OptimizerConfig(), 0.1, SPECS)
    params = {name: jnp.zeros(spec.shape) for name, spec in SPECS.items()}
    state = jax.tree_util.tree_leaves_with_path(optimizer.init(params))
    moments = [path for path, leaf in state if leaf.ndim]
    names = sorted(path[-1].key for path in moments)
    assert names == sorted(2 * [name for name in SPECS if name != "bias"])


def test_muon_orthogonalises_each_matrix_at_the_size_of_adamws_updates():
    specs = {
        "experts": ParamSpec((2, 3, 6, 2, 4), ("layer", "expert", "embed", "gate_up", "ffw"), 6),
        "heads": ParamSpec((2, 3, 6), ("heads", "v", "embed"), 6),
        "embed": ParamSpec((5, 6), ("vocab", "embed")),
        "norm": ParamSpec((6,), ("embed",)),
    }
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape), specs)
    grads = jax.tree.map(lambda s: jax.random.normal(next(keys), s.shape), specs)
    plain = {"weight_decay": 0.0, "clip_norm": 1e9}
    muon, adamw = (
        make(OptimizerConfig(name=name, **plain), 1.0, specs) for name in ("muon", "adamw")
    )
    found, _ = muon.update(grads, muon.init(params), params)
    other, _ = adamw.update(grads, adamw.init(params), params)
    for name in ("embed", "norm"):
        np.testing.assert_array_equal(found[name], other[name])
    one, grad = (x["experts"][1, 2, :, 0] for x in (found, grads))
    u, _, v = np.linalg.svd(grad, full_matrices=False)
    np.testing.assert_allclose(-one, 0.2 * 6**0.5 * u @ v, atol=0.3 * 0.2 * 6**0.5)
    values = np.linalg.svd(found["heads"].reshape(6, 6), compute_uv=False) / (0.2 * 6**0.5)
    assert values.min() > 0.6 and values.max() < 1.3  # five Newton-Schulz steps are no more exact
