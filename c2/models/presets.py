"""Named model configurations: published architectures and their miniature."""

import difflib
from dataclasses import replace

from c2.config import ConfigError
from c2.models.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig


def tiny_mla_moe() -> ModelConfig:
    """The K2.5 architecture small enough to learn something in minutes on two CPU cores."""
    return ModelConfig(
        vocab=2048,
        hidden=128,
        layers=4,
        dense_layers=1,
        dense_intermediate=384,
        attention=MLAConfig(heads=4, q_lora=64, kv_lora=32, nope=32, rope=16, v=32),
        moe=MoEConfig(experts=8, top_k=2, intermediate=128, scale=1.0),
        rope=RopeConfig(theta=10_000.0),
    )


def kimi_k2() -> ModelConfig:
    """Kimi-K2-Base (July 2025)."""
    return ModelConfig(
        vocab=163_840,
        hidden=7168,
        layers=61,
        dense_layers=1,
        dense_intermediate=18_432,
        attention=MLAConfig(heads=64, q_lora=1536, kv_lora=512, nope=128, rope=64, v=128),
        moe=MoEConfig(experts=384, top_k=8, intermediate=2048, scale=2.827),
        rope=RopeConfig(
            theta=50_000.0,
            yarn=YarnConfig(factor=32.0, original_context=4096, beta_fast=1.0),
        ),
        dtype="bfloat16",
        remat="full",
    )


def kimi_k25() -> ModelConfig:
    """The text model of Kimi K2.5, the base of Composer 2."""
    yarn = YarnConfig(factor=64.0, original_context=4096, beta_fast=32.0)
    return replace(kimi_k2(), rope=RopeConfig(theta=50_000.0, yarn=yarn), norm_eps=1e-5)


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3 (December 2024)."""
    return ModelConfig(
        vocab=129_280,
        hidden=7168,
        layers=61,
        dense_layers=3,
        dense_intermediate=18_432,
        attention=MLAConfig(heads=128, q_lora=1536, kv_lora=512, nope=128, rope=64, v=128),
        moe=MoEConfig(experts=256, top_k=8, intermediate=2048, groups=8, top_groups=4, scale=2.5),
        rope=RopeConfig(theta=10_000.0, yarn=YarnConfig(factor=40.0, original_context=4096)),
        mtp=1,
        dtype="bfloat16",
        remat="full",
    )


def tiny_gqa_moe() -> ModelConfig:
    """The Qwen3-MoE architecture at the size of `tiny_mla_moe`."""
    return replace(
        tiny_mla_moe(),
        dense_layers=0,
        attention=GQAConfig(heads=4, kv_heads=2, head_dim=32, qk_norm=True),
        moe=MoEConfig(
            experts=8, top_k=2, intermediate=128, shared=0, scoring="softmax", bias=False
        ),
        rope=RopeConfig(theta=10_000.0, layout="halves"),
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B (April 2025) and, with another ``theta``, Qwen3-Coder-30B-A3B."""
    return ModelConfig(
        vocab=151_936,
        hidden=2048,
        layers=48,
        dense_layers=0,
        dense_intermediate=6144,
        attention=GQAConfig(heads=32, kv_heads=4, head_dim=128, qk_norm=True),
        moe=MoEConfig(
            experts=128, top_k=8, intermediate=768, shared=0, scoring="softmax", bias=False
        ),
        rope=RopeConfig(theta=1_000_000.0, layout="halves"),
        dtype="bfloat16",
        remat="full",
    )


def smollm2_135m() -> ModelConfig:
    """SmolLM2-135M (November 2024), a dense Llama-style model that fits on any machine."""
    return ModelConfig(
        vocab=49_152,
        hidden=576,
        layers=30,
        dense_layers=30,
        dense_intermediate=1536,
        attention=GQAConfig(heads=9, kv_heads=3, head_dim=64),
        moe=None,
        rope=RopeConfig(theta=100_000.0, layout="halves"),
        norm_eps=1e-5,
        tied=True,
    )


PRESETS = {
    f.__name__: f
    for f in (
        tiny_mla_moe,
        tiny_gqa_moe,
        kimi_k2,
        kimi_k25,
        deepseek_v3,
        qwen3_30b_a3b,
        smollm2_135m,
    )
}


def get(name: str) -> ModelConfig:
    """The configuration with this name; a `ConfigError` lists the known names."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"unknown model {name!r}{hint}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()
