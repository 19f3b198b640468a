"""Rotary embedding and YaRN against published numbers and complex arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest

from c2.models import RopeConfig, YarnConfig, presets, rope

PAIRS = [0, 8, 12, 16, 18, 19, 20, 24, 31]
# the published rule, evaluated in f32 by another implementation
GOLDEN = {
    "kimi_k2": [
        1.0, 0.066874035, 0.017293634, 0.004472136, 0.0022742038, 0.00162176,
        3.6140467e-05, 9.3459303e-06, 8.7644128e-07,
    ],
    "kimi_k25": [
        1.0, 0.066874035, 0.01161916, 0.0015372967, 0.00040864607, 0.00015837497,
        1.8070234e-05, 4.6729651e-06, 4.3822064e-07,
    ],
    "deepseek_v3": [
        1.0, 0.1, 0.026879361, 0.0055000004, 0.0022493652, 0.0013705135,
        0.00079056941, 2.4999999e-05, 3.3338035e-06,
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_inverse_frequencies_are_the_published_ones(name):
    cfg = presets.get(name)
    got = rope.inverse_frequencies(cfg.rope, cfg.attention.rope)
    assert got.shape == (32,) and got.dtype == np.float64
    np.testing.assert_allclose(got[PAIRS], GOLDEN[name], rtol=3e-7)  # three f32 roundings


@pytest.mark.parametrize(
    ("name", "low", "high"), [("kimi_k2", 19, 20), ("kimi_k25", 8, 20), ("deepseek_v3", 10, 23)]
)
def test_yarn_blends_between_the_published_pairs(name, low, high):
    cfg = presets.get(name)
    scaled = rope.inverse_frequencies(cfg.rope, 64)
    plain = cfg.rope.theta ** (-np.arange(32) / 32)
    np.testing.assert_allclose(scaled[: low + 1], plain[: low + 1], rtol=1e-14)
    np.testing.assert_allclose(scaled[high:], plain[high:] / cfg.rope.yarn.factor, rtol=1e-14)
    between = (scaled / plain)[low + 1 : high]
    assert ((between < 1) & (between > 1 / cfg.rope.yarn.factor)).all()


@pytest.mark.parametrize(
    ("name", "scale"),
    [("kimi_k2", 0.130860800), ("kimi_k25", 0.144679626), ("deepseek_v3", 0.135233779)],
)
def test_attention_scale_is_the_published_one(name, scale):
    cfg = presets.get(name)
    features = cfg.attention.nope + cfg.attention.rope
    assert rope.attention_scale(cfg.rope.yarn, features) == pytest.approx(scale, abs=5e-10)


def test_attention_scale_is_plain_without_yarn_temperature():
    assert rope.attention_scale(None, 192) == 192**-0.5
    silent = YarnConfig(factor=8.0, original_context=16, mscale_all_dim=0.0)
    assert rope.attention_scale(silent, 192) == 192**-0.5


def test_tables_scale_by_the_ratio_of_temperatures():
    yarn = YarnConfig(factor=8.0, original_context=16, mscale=0.7, mscale_all_dim=0.3)
    cos, sin = rope.tables(jnp.arange(5)[None], RopeConfig(theta=100.0, yarn=yarn), 8)
    amplitude = (0.07 * np.log(8) + 1) / (0.03 * np.log(8) + 1)
    np.testing.assert_allclose(np.hypot(cos, sin), amplitude, rtol=1e-6)
    for name in GOLDEN:
        cos, sin = rope.tables(jnp.arange(5)[None], presets.get(name).rope, 64)
        np.testing.assert_allclose(np.hypot(cos, sin), 1, rtol=1e-6)


def test_rotation_multiplies_neighbouring_pairs_by_a_unit_complex_number():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 7, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 1000, size=(2, 7))
    cfg = RopeConfig(theta=100.0)
    got = np.asarray(rope.rotate(x, *rope.tables(jnp.asarray(positions), cfg, 8), cfg))

    angles = positions[..., None] * 100.0 ** (-np.arange(4) / 4)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, :, None]
    # an f32 angle of up to 1000 radians is known to 6e-5
    np.testing.assert_allclose(got[..., ::2], turned.real, atol=3e-4)
    np.testing.assert_allclose(got[..., 1::2], turned.imag, atol=3e-4)
