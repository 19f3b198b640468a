"""Preset numbers against the released configurations."""

import pytest

from c2.config import ConfigError
from c2.models import MLAConfig, MoEConfig, YarnConfig, presets

MLA_7168 = {"q_lora": 1536, "kv_lora": 512, "nope": 128, "rope": 64, "v": 128}


def yarn(factor, beta_fast):
    return YarnConfig(
        factor=factor,
        original_context=4096,
        beta_fast=beta_fast,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )


# Other ports have lost rope_scaling on the way (factor 40, no temperature, for K2.5).
@pytest.mark.parametrize(
    ("name", "theta", "scaling", "eps"),
    [
        ("kimi_k2", 50_000, yarn(32, 1), 1e-6),
        ("kimi_k25", 50_000, yarn(64, 32), 1e-5),
        ("deepseek_v3", 10_000, yarn(40, 32), 1e-6),
    ],
)
def test_position_and_norm_settings(name, theta, scaling, eps):
    cfg = presets.get(name)
    assert (cfg.rope.theta, cfg.rope.yarn, cfg.norm_eps) == (theta, scaling, eps)
    assert cfg.attention.latent_norm_eps == 1e-6  # the reference code ignores norm_eps here


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k25"])
def test_kimi_sizes(name):
    cfg = presets.get(name)
    assert (cfg.vocab, cfg.hidden, cfg.layers, cfg.dense_layers) == (163_840, 7168, 61, 1)
    assert cfg.dense_intermediate == 18_432
    assert cfg.attention == MLAConfig(heads=64, **MLA_7168)
    assert cfg.moe == MoEConfig(
        experts=384, top_k=8, intermediate=2048, shared=1, norm_top_k=True, scale=2.827
    )


def test_deepseek_sizes():
    cfg = presets.get("deepseek_v3")
    assert (cfg.vocab, cfg.hidden, cfg.layers, cfg.dense_layers) == (129_280, 7168, 61, 3)
    assert cfg.dense_intermediate == 18_432
    assert cfg.attention == MLAConfig(heads=128, **MLA_7168)
    assert cfg.moe == MoEConfig(
        experts=256, top_k=8, intermediate=2048, groups=8, top_groups=4, scale=2.5
    )


def test_tiny_preset_has_every_part_of_the_architecture():
    cfg = presets.get("tiny_mla_moe")
    assert cfg.dense_layers == 1 and cfg.moe_layers > 1
    assert cfg.moe.shared == 1 and cfg.moe.norm_top_k


def test_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"did you mean 'kimi_k25'.*deepseek_v3.*tiny_mla_moe"):
        presets.get("kimi_k2.5")
