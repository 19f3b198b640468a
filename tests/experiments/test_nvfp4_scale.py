"""Outliers against numpy, the model against the kernels' experts, and that each claim can fail."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from c2.models.moe import MoE
from experiments import nvfp4_batches, nvfp4_model
from experiments import nvfp4_scale as study
from experiments.study import Run
from pallas_kernels import nvfp4
from pallas_kernels.grouped_matmul import reference as products
from pallas_kernels.nvfp4 import reference

SMOKE = study.get_config("smoke")


def test_outliers_against_numpy():
    found = study.measure_outliers(SMOKE)["tensor"]
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(ml_dtypes.bfloat16)
    before, *_ = reference.quantize(x, "tensor")
    y = x.copy()
    y[-1] = (y[-1].astype(np.float64) * 1e3).astype(ml_dtypes.bfloat16)
    packed, scales, g = reference.quantize(y, "tensor")
    nibbles = [np.stack([p & 15, p >> 4], -1).reshape(64, 256)[:-1] for p in (before, packed)]
    blocks = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64).repeat(16, -1)[:-1]
    values = nibbles[1].view(ml_dtypes.float4_e2m1fn).astype(np.float64) * blocks * g
    others = x[:-1].astype(np.float64)
    rmse = np.sqrt(((values - others) ** 2).sum() / (others**2).sum())
    assert study.at(SMOKE, found.changed, 1e3) == (nibbles[0] != nibbles[1]).mean() > 0
    np.testing.assert_allclose(study.at(SMOKE, found.rmse, 1e3), rmse, rtol=1e-6)


@functools.cache
def mixture_layer():
    """A layer, its tokens and its routing: of everything little, and one row of padding."""
    cfg = nvfp4_model.small_model(1)
    rng = np.random.default_rng(0)
    experts, embed, ffw = cfg.moe.experts, cfg.hidden, cfg.moe.intermediate

    def weights(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[1]), jnp.float32)

    layer = MoE(
        router=weights(embed, experts),
        bias=None,
        gate_up=weights(experts, embed, 2, ffw),
        down=weights(experts, ffw, embed),
        shared=None,
    )
    x = jnp.asarray(rng.normal(size=(2, 6, embed)), jnp.bfloat16)
    real = np.array([[True] * 6, [False] * 6])
    return cfg, layer, x, real


def as_stack(layer):
    """Quantises one layer as a stack of one, as a model holds it."""
    stacked = jax.tree.map(lambda w: w[None], layer)
    holder = dataclasses.make_dataclass("Holder", ["moe"])
    holder.replace = lambda self, **changes: dataclasses.replace(self, **changes)
    rule = jax.jit(nvfp4.quantize)
    quantised = nvfp4_model.quantize_experts(holder(holder(stacked)), rule)
    return jax.tree.map(lambda w: w[0], quantised.moe.moe)


def test_experts_against_f64():
    cfg, layer, x, real = mixture_layer()
    mixture = jax.jit(nvfp4_model.experts(nvfp4.quantize), static_argnums=4)
    out, used = mixture(x, as_stack(layer), real, None, cfg)
    assert (np.asarray(used)[1] == -2).all()
    assert (np.asarray(out)[1] == 0).all()

    def rounded(w):  # along the input, from bf16
        w = np.asarray(w.astype(jnp.bfloat16))
        return products.nvfp4_rounded(w.swapaxes(-1, -2)).swapaxes(-1, -2)

    tokens = products.nvfp4_rounded(np.asarray(x[0]))
    gate, up = (rounded(layer.gate_up[:, :, i]) for i in range(2))
    down = rounded(layer.down)
    scores = 1 / (1 + np.exp(-np.asarray(x[0], np.float64) @ np.asarray(layer.router, np.float64)))
    for t, chosen in enumerate(np.asarray(used)[0]):
        best = np.argsort(-scores[t])[: cfg.moe.top_k]
        assert set(chosen) == set(best)
        expected = 0
        for e in best:
            a, b = tokens[t] @ gate[e], tokens[t] @ up[e]
            act = (a / (1 + np.exp(-a)) * b).astype(ml_dtypes.bfloat16)
            weight = scores[t, e] / scores[t, best].sum()
            expected += weight * (products.nvfp4_rounded(act[None])[0] @ down[e])
        error = np.abs(np.asarray(out[0, t], np.float64) - expected).max()
        assert error < 0.02 * np.abs(expected).max()  # two roundings to bf16


def test_padding_sets_no_scale():
    """Per tensor, a huge token behind the mask changes nothing."""
    cfg, layer, x, real = mixture_layer()
    rule = functools.partial(nvfp4_batches.round_rows, scale="tensor")
    mixture = jax.jit(nvfp4_model.experts(rule), static_argnums=4)
    quantised = as_stack(layer)
    out, _ = mixture(x, quantised, real, None, cfg)
    huge, _ = mixture(x.at[1].set(1e4), quantised, real, None, cfg)
    seen, _ = mixture(x.at[1].set(1e4), quantised, np.ones_like(real), None, cfg)
    np.testing.assert_array_equal(out[0], huge[0])
    assert (out[0] != seen[0]).any()


def test_gap_against_closed_forms():
    """Two distributions that differ by one logit: the moments are sums over two outcomes."""
    n, shift = 4096, 0.5
    log_q = jnp.log(jnp.full((n, 4), 0.25))
    log_p = jax.nn.log_softmax(log_q.at[:, 0].add(shift))
    found = nvfp4_model.gap(log_q, log_p, jax.random.key(0))
    normaliser = np.log(0.75 + 0.25 * np.exp(shift))
    gaps = np.array([normaliser - shift, normaliser, normaliser, normaliser])  # log q - log p
    assert abs(float(found.mean) - gaps.mean()) < 0.02
    np.testing.assert_allclose(found.kl, gaps.mean(), rtol=1e-4)
    np.testing.assert_allclose(found.rms, np.sqrt((gaps**2).mean()), rtol=0.05)
    np.testing.assert_allclose(found.largest, np.abs(gaps).max(), rtol=1e-5)
    assert found.changed == 1
    # shared Gumbel noise moves at least the distance in total variation, and not twice as much
    moved = np.abs(np.exp(np.asarray(log_p[0])) - 0.25).sum() / 2
    assert moved * 0.9 < float(found.resampled) < moved * 2
    same = nvfp4_model.gap(log_q, log_q, jax.random.key(0))
    assert all(float(value) == 0 for value in same)


@pytest.mark.slow  # compiles the model twice
def test_smoke_variant_runs_to_a_result(tmp_path):
    result = study.run(SMOKE, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert len(result.figures) == 2
    for figure in result.figures:
        assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    outliers, gaps = result.tables.values()
    assert [row["outlier, times"] for row in outliers] == [10.0**i for i in range(8)]
    assert [row["largest"] for row in gaps[:2]] == [0, 0]
    assert all(row["largest"] > 0 for row in gaps[2:])
    exact = [claim for claim in result.claims if claim.relation == "<=" and claim.bound == 0]
    assert [claim.verdict for claim in exact] == ["shown"] * 3
    assert "no CPU can show" in result.summary


def found(size: float):
    """Measurements as a scale that errs by ``size`` would give them."""
    outliers = study.Outliers(np.full((1, 8), size), np.full((1, 8), 0.0951))
    outliers.rmse[:, 1:] += size
    gap = nvfp4_model.Gap(*[np.full(1, size)] * 8)
    leaks, outlier = np.full((1, 4), size), np.full((1, SMOKE.context), size)
    return outliers, nvfp4_batches.Model(leaks, outlier, gap, gap)


@pytest.mark.parametrize(("token", "tensor", "verdict"), [(0, 1, "shown"), (1, 0, "not shown")])
def test_each_claim_can_hold_and_fail(token, tensor, verdict):
    """With the two scales as they are, and exchanged."""
    of_token, of_tensor = found(token), found(tensor)
    outliers, models = (
        dict(zip(study.SCALES, pair, strict=True)) for pair in zip(of_token, of_tensor, strict=True)
    )
    if verdict == "not shown":
        outliers["token"].rmse[:] = 0.2
    claims = study.judge(SMOKE, outliers, models, found(1)[1].batches)
    assert {claim.verdict for claim in claims} == {verdict}


@pytest.mark.parametrize(
    ("key", "change"),
    [("tokens", {"tokens": 1}), ("features", {"features": 24}), ("context", {"context": 7})],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}.*legal"):
        dataclasses.replace(SMOKE, **change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: default, smoke"):
        study.get_config("huge")
