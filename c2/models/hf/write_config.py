"""From `ModelConfig` to config.json of a Hugging Face checkpoint."""

from typing import Any

from c2.config import ConfigError
from c2.models.config import MLAConfig, ModelConfig, YarnConfig
from c2.models.hf.read_config import LATENT_NORM_EPS


def from_model_config(cfg: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, in the fields that inference engines and transformers read.

    Raises:
      ConfigError: names the field that no class of transformers can express.
    """
    kind, own = _write_mla(cfg) if isinstance(cfg.attention, MLAConfig) else _write_gqa(cfg)
    architecture = {
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "llama": "LlamaForCausalLM",
    }[kind]
    yarn = cfg.rope.yarn
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": cfg.layers,
        "intermediate_size": cfg.dense_intermediate,
        "num_attention_heads": cfg.attention.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        "max_position_embeddings": int(yarn.factor * yarn.original_context) if yarn else 4096,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": _write_yarn(yarn) if yarn else None,
        **own,
    }


def _write_mla(cfg: ModelConfig) -> tuple[str, dict[str, Any]]:
    a, m = cfg.attention, cfg.moe
    _can_express("DeepSeek-V3", "attention.latent_norm_eps", a.latent_norm_eps, LATENT_NORM_EPS)
    if m is None or not m.shared:
        raise ConfigError("moe.shared: DeepSeek-V3 has at least one shared expert")
    _can_express("DeepSeek-V3", "moe.scoring", m.scoring, "sigmoid")
    _can_express("DeepSeek-V3", "moe.bias", m.bias, True)
    if cfg.mtp and not cfg.moe_layers:
        raise ConfigError("mtp: DeepSeek-V3's modules are mixture layers")
    return "deepseek_v3", {
        "num_key_value_heads": a.heads,
        "q_lora_rank": a.q_lora,
        "kv_lora_rank": a.kv_lora,
        "qk_nope_head_dim": a.nope,
        "qk_rope_head_dim": a.rope,
        "v_head_dim": a.v,
        "rope_interleave": cfg.rope.layout == "neighbours",
        "first_k_dense_replace": cfg.dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": m.experts,
        "num_experts_per_tok": m.top_k,
        "moe_intermediate_size": m.intermediate,
        "n_shared_experts": m.shared,
        "n_group": m.groups,
        "topk_group": m.top_groups,
        "norm_topk_prob": m.norm_top_k,
        "routed_scaling_factor": m.scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": cfg.mtp,
    }


def _write_gqa(cfg: ModelConfig) -> tuple[str, dict[str, Any]]:
    a, m = cfg.attention, cfg.moe
    kind = "qwen3_moe" if cfg.moe_layers else "qwen3" if a.qk_norm else "llama"
    _can_express(kind, "mtp", cfg.mtp, 0)
    _can_express(kind, "rope.layout", cfg.rope.layout, "halves")
    if cfg.rope.yarn:
        _can_express(kind, "rope.yarn.mscale_all_dim", cfg.rope.yarn.mscale_all_dim, 0.0)
    own = {"num_key_value_heads": a.kv_heads, "head_dim": a.head_dim}
    if not cfg.moe_layers:
        if kind == "llama" and cfg.hidden % a.heads:
            raise ConfigError(f"hidden: {cfg.hidden} must be a multiple of heads = {a.heads}")
        return kind, own
    _can_express(kind, "attention.qk_norm", a.qk_norm, True)
    for field, value in {"shared": 0, "scoring": "softmax", "bias": False}.items():
        _can_express(kind, f"moe.{field}", getattr(m, field), value)
    _can_express(kind, "moe.groups", m.groups, 1)
    _can_express(kind, "moe.scale", m.scale, 1.0)
    return kind, own | {
        "mlp_only_layers": list(range(cfg.dense_layers)),
        "decoder_sparse_step": 1,
        "num_experts": m.experts,
        "num_experts_per_tok": m.top_k,
        "moe_intermediate_size": m.intermediate,
        "norm_topk_prob": m.norm_top_k,
    }


def _can_express(kind: str, field: str, value: Any, only: Any) -> None:
    if value != only:
        raise ConfigError(f"{field}: {value!r} cannot be exported; {kind} has {only!r}")


def _write_yarn(yarn: YarnConfig) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "type": "yarn",  # the old name, read by DeepSeek's own code
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_context,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    if not yarn.mscale_all_dim:
        _can_express("without mscale_all_dim transformers", "rope.yarn.mscale", yarn.mscale, 1.0)
        return scaling
    if not yarn.mscale:
        raise ConfigError("rope.yarn.mscale: 0 cannot be exported with mscale_all_dim")
    return scaling | {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
