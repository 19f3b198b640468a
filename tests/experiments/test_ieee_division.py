"""Every rule against numpy, the model against the kernels', and that each claim can fail."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from experiments import division_gap, division_report, division_rules, nvfp4_model
from experiments import ieee_division as study
from experiments.study import Run
from pallas_kernels import float_bits as fb
from pallas_kernels import nvfp4
from pallas_kernels.nvfp4 import reference

SMOKE = study.get_config("smoke")
F32 = np.float32


def numpy_rule(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, block scales and outer scale in the operations that the path's name says."""
    x = x.astype(F32).reshape(len(x), -1, 16)
    block_amax = np.abs(x).max(-1, keepdims=True)
    amax = block_amax.max(1, keepdims=True)
    g = amax / F32(2688)
    s = block_amax / F32(6) / g
    if name == "jax.nn: (x / g) / s":
        s = np.abs(x / g).max(-1, keepdims=True) / F32(6)
    if name.startswith("TE"):
        e = F32(2688) / amax
        g = F32(1) / e
        s = block_amax * (e * F32(1 / 6))
    s = np.minimum(s, F32(448)).astype(ml_dtypes.float8_e4m3fn)
    wide = s.astype(F32)
    inverse = F32(1) / (wide * g)
    match name.split(", "):
        case ["IEEE division"]:
            quotients = x / (wide * g)
        case ["x * rcp"]:
            quotients = x * inverse
        case ["x * rcp", shift]:
            quotients = x * (inverse.view(np.int32) + np.int32(shift.split()[0])).view(F32)
        case ["jax.nn: (x / g) / s"]:
            quotients = x / g / wide
        case ["torchao: x * ((1 / g) / s)"]:
            quotients = x * (F32(1) / g / wide)
        case ["TE: x * (1 / (s * (1 / e)))"]:
            quotients = x * inverse
        case ["TE", "early: x * (e / s)"]:
            quotients = x * (e / wide)
        case ["TE", "fast: bf16 coefficient"]:
            quotients = x * inverse.astype(ml_dtypes.bfloat16).astype(F32)
    codes = quotients.astype(F32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes.reshape(len(x), -1), s[..., 0].view(np.uint8), g[:, 0, 0]


WRITTEN = [name for name in division_rules.RULES if "every" not in name and "compiled" not in name]


def test_rules_are_the_arithmetic_they_name():
    x = study.near_ties(study.normal(32, 256, seed=5), seed=6)
    seen = set()
    for name in WRITTEN:
        q = jax.jit(division_rules.RULES[name])(x)
        codes, scales, g = numpy_rule(name, x)
        np.testing.assert_array_equal(fb.unpack_nibbles(q.codes), codes, err_msg=name)
        np.testing.assert_array_equal(q.block_scales, scales, err_msg=name)
        np.testing.assert_array_equal(q.outer_scale, g, err_msg=name)
        seen.add(codes.tobytes())
    assert len(seen) >= len(WRITTEN) - 2  # not the same rule again and again


def test_the_yardstick_is_the_kernels_rule():
    x = study.normal(32, 256, seed=7)
    for got in (division_rules.ieee(x), nvfp4.quantize(x)):
        for part, expected in zip(got, reference.quantize(x), strict=True):
            np.testing.assert_array_equal(part, expected)


def test_near_ties_are_the_closest_bf16_numbers_to_ties():
    x = study.near_ties(study.normal(16, 64, seed=1), seed=2)
    _, s, g = reference.quantize(x)
    d = s.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * g[:, None]
    inner = np.abs(x.astype(np.float64).reshape(16, -1, 16)[..., 1:])
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    distance = np.abs(inner[..., None] / d[..., None, None] / ties - 1).min(-1)
    assert distance.max() <= 2.0**-8  # half a unit in the last place of bf16


def test_mxfp8_paths_at_known_maxima():
    """The carry at 448, and the maxima at which logarithms are known to fail."""
    paths = division_rules.SCALE_PATHS
    exact = paths["IEEE amax / 448"](np.array([448, 449, 480, 1, 1.75, 1.796875], F32))
    np.testing.assert_array_equal(exact, [127, 128, 128, 119, 119, 120])
    assert paths["amax * fl(1 / 448), +1 ulp"](np.array([1.75], F32)) == 120
    assert paths["ceil(ln / ln 2) in bf16"](np.array([1.796875], F32)) == 119
    assert paths["ceil(log2) in f32"](np.array([448 * 2.0**20 * (1 + 2.0**-23)], F32)) == 147


def test_gradient_error_against_autodiff():
    """One head, and the gradient of its expected log-prob under the engine's samples."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1, 6, 4)).astype(F32)
    head = rng.normal(size=(4, 9)).astype(F32)
    log_q, log_p = (
        np.asarray(jax.nn.log_softmax(hidden @ w))
        for w in (head + 0.1 * rng.normal(size=(4, 9)), head)
    )

    def expected_log_prob(head, q, hidden):
        return (np.exp(q) * jax.nn.log_softmax(hidden @ head)).sum()

    gradient = jax.grad(expected_log_prob)
    total = np.square(gradient(head, log_q, hidden)).sum()
    alone = sum(np.square(gradient(head, log_q[:, [t]], hidden[:, [t]])).sum() for t in range(6))
    noise = (np.square(hidden).sum(-1) * (1 - np.exp(2 * log_p).sum(-1))).sum()
    coherence, drift = division_gap.gradient_error(log_q, log_p, hidden)
    np.testing.assert_allclose(coherence, total / alone, rtol=1e-4)
    np.testing.assert_allclose(drift, np.sqrt(total / noise), rtol=1e-4)


@pytest.mark.slow  # compiles the model twice
def test_smoke_variant_runs_to_a_result(tmp_path):
    result = study.run(SMOKE, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert len(result.figures) == 2
    for figure in result.figures:
        assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    codes, scales, gaps = result.tables.values()
    assert [row["path"] for row in codes] == ["IEEE division", *SMOKE.paths]
    assert [row["bf16 amax"] for row in scales[:6]] == [0, 0, 0, 0, 247, 247]
    assert {row["trainer"]: row["largest"] == 0 for row in gaps} == {
        "IEEE division": True,
        **dict.fromkeys((*SMOKE.model_paths, division_gap.NATIVE), False),
    }
    assert "a CPU cannot show" in result.summary


def measurements(bad: bool) -> tuple:
    """What `judge` is given by one path that is as bad as one can be, or as expected."""
    up, fast = SMOKE.paths
    counted = {name: division_report.COUNTED[name] / 2**23 for name in SMOKE.paths}
    codes = {
        name: division_rules.Codes(1e-5 if bad else share, 0.5 if bad else 1, 0, 0.0951)
        for name, share in counted.items()
    }
    codes |= {division_rules.IEEE: division_rules.Codes(0, 0, 0, 0.1 if bad else 0.0951)}
    ties = {name: c._replace(changed=(2 if bad else 20) * c.changed) for name, c in codes.items()}
    wrong = {
        name: int("-1" in name) if bad else 247 * ("+1" in name or "+2" in name or "ln" in name)
        for name in division_rules.SCALE_PATHS
    }
    scales = {name: {"bf16 amax": n, "N(0,1) blocks": n} for name, n in wrong.items()}

    def gap(first: float, last: float) -> nvfp4_model.Gap:
        rms = np.array([[first, last]])
        return nvfp4_model.Gap(*[rms] * 8)._replace(changed=np.full((1, 2), 0.1 if bad else 1))

    gaps = {
        division_rules.IEEE: gap(bad, bad),
        up: gap(1, 1) if bad else gap(1, 3),
        fast: gap(1, 5) if bad else gap(1, 4),
        division_gap.NATIVE: gap(9, 9),
    }
    coherence = dict.fromkeys(gaps, np.full(1, 50 if bad else 1))
    return codes, ties, scales, division_gap.Models(gaps, {}, {}, coherence, coherence)


@pytest.mark.parametrize("bad", [False, True])
def test_each_claim_can_hold_and_fail(bad):
    claims = division_report.judge(SMOKE, *measurements(bad))
    assert {claim.verdict for claim in claims} == {"not shown" if bad else "shown"}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("paths", {"paths": ("by heart",)}),
        ("model_paths", {"model_paths": ()}),
        ("seeds", {"seeds": 0}),
        ("features", {"features": 100}),
        ("depths", {"depths": (2, 1)}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}.*legal"):
        dataclasses.replace(SMOKE, **change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: default, smoke"):
        study.get_config("huge")
