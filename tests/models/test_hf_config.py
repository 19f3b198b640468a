"""config.json against the released models' own, and refusal of what would be another function."""

import copy
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest

from c2.config import ConfigError
from c2.models import presets
from c2.models.config import ModelConfig, RopeConfig, YarnConfig
from c2.models.hf.read_config import text_config, to_model_config
from c2.models.hf.write_config import from_model_config


def yarn(factor, beta_fast=32.0):
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "factor": factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


# As published, without fields of no interest here.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": yarn(40),
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(32.0, beta_fast=1.0),
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": 163584,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "text_config": KIMI_K2
    | {
        "_name_or_path": "",
        "num_beams": 1,  # its writer put all defaults of generation here
        "rms_norm_eps": 1e-05,
        "rope_scaling": yarn(64.0),
        "top_k": 50,
    },
    "tie_word_embeddings": False,
    "vision_config": {"hidden_size": 1152},
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
RELEASED = {
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": KIMI_K2,
    "kimi_k25": KIMI_K25,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "smollm2_135m": SMOLLM2_135M,
}


def read(config):
    return to_model_config(text_config(config)[0])


def bare(name):
    """A preset with what no config.json knows: how we compute it."""
    return replace(presets.get(name), dtype="float32", remat="none")


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_our_presets(name):
    assert read(RELEASED[name]) == bare(name)


def test_the_wrapper_knows_names_and_quantization():
    scheme = {"quant_method": "compressed-tensors"}
    for config in (
        KIMI_K25 | {"text_config": KIMI_K2 | {"quantization_config": scheme}},
        KIMI_K25
        | {"text_config": KIMI_K2 | {"quantization_config": None}}
        | {"quantization_config": scheme},
    ):
        text, prefix, skipped = text_config(config)
        assert text["quantization_config"] == scheme and prefix == "language_model."
        assert {"vision_tower.", "mm_projector."} < set(skipped)
    assert text_config(KIMI_K2)[1:] == ("", ())


@pytest.mark.parametrize("name", presets.PRESETS)
def test_what_is_written_reads_back(name):
    cfg = bare(name)
    assert read(from_model_config(cfg)) == cfg


def test_yarn_without_mscale_is_that_of_qwen3():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    cfg = read(QWEN3_30B_A3B | {"rope_scaling": scaling})
    expected = YarnConfig(factor=4.0, original_context=32768, mscale=1.0, mscale_all_dim=0.0)
    assert cfg.rope == RopeConfig(theta=1e6, yarn=expected, layout="halves")
    assert read(from_model_config(cfg)) == cfg


V3, QWEN, LLAMA = DEEPSEEK_V3, QWEN3_30B_A3B, SMOLLM2_135M


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (V3, {"model_type": "deepseek_v2"}, "model_type: 'deepseek_v2' is not supported; known:"),
        (V3, {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported, only"),
        (V3, {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        (V3, {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        (V3, {"attention_bias": True}, "attention_bias: True"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads: 8"),
        (V3, {"hidden_size": "7168"}, "hidden_size: expected int, got '7168'"),
        (V3, {"vocab_size": None}, "vocab_size: expected int, got None"),
        (V3, {"num_experts_per_tok": 300}, ": top_k must be in 1..128 eligible"),
        (V3, {"index_topk": 2048}, "index_topk: unknown field, which may change"),
        (V3, {"rope_scaling": yarn(40) | {"truncate": False}}, "rope_scaling.truncate: False"),
        (V3, {"rope_scaling": yarn(40) | {"mscale": 0.0}}, "rope_scaling.mscale: 0.0 with"),
        (V3, {"rope_scaling": yarn(40) | {"attention_factor": 2.0}}, "attention_factor: unknown"),
        (V3, {"rope_scaling": yarn(0.5)}, ": factor must be at least 1"),
        (QWEN, {"rope_scaling": yarn(4)}, "mscale_all_dim 1.0 is not supported"),
        (QWEN, {"mlp_only_layers": [5]}, r"mlp_only_layers: \[5\] is not supported, only the"),
        (QWEN, {"decoder_sparse_step": 2}, "decoder_sparse_step: 2"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window: True"),
        (QWEN, {"layer_types": ["sliding_attention"] * 48}, "layer_types: .* only"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type: 'llama3'"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: unk"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias: True"),
        (KIMI_K25, {"use_text_adapter": True}, "use_text_adapter: unknown field"),
        (KIMI_K25, {"text_config": None}, "text_config: expected dict, got None"),
    ],
)
def test_another_function_is_refused(config, change, message):
    with pytest.raises(ConfigError, match=rf"config\.json.*{message}") as caught:
        read(config | change)
    assert "\n" not in str(caught.value)


JUNK = st.sampled_from([None, True, -1, 0, 1, 0.5, 10**9, "x", [], [1], ["x"], {}, {"x": 1}])


@hypothesis.given(name=st.sampled_from(sorted(RELEASED)), data=st.data())
@hypothesis.settings(max_examples=100, deadline=None)
def test_any_config_is_understood_or_refused(name, data):
    config = copy.deepcopy(RELEASED[name])
    part = config.get("text_config", config)
    part = data.draw(st.sampled_from([config, part, part["rope_scaling"] or part]))
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JUNK)
    try:
        cfg = read(config)
    except ConfigError as error:
        assert "config.json" in str(error)
    else:
        assert isinstance(cfg, ModelConfig)


def with_moe(name, **changes):
    cfg = bare(name)
    return replace(cfg, moe=replace(cfg.moe, **changes))


def with_attention(name, **changes):
    cfg = bare(name)
    return replace(cfg, attention=replace(cfg.attention, **changes))


def with_rope(name, **changes):
    cfg = bare(name)
    return replace(cfg, rope=replace(cfg.rope, **changes))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (with_moe("kimi_k2", scoring="softmax"), r"moe\.scoring: 'softmax' cannot be exported"),
        (with_moe("kimi_k2", bias=False), r"moe\.bias: False"),
        (with_moe("kimi_k2", shared=0), r"moe\.shared: "),
        (with_attention("kimi_k25", latent_norm_eps=1e-5), r"attention\.latent_norm_eps: 1e-05"),
        (with_rope("kimi_k2", yarn=YarnConfig(factor=2, original_context=8, mscale=0.0)), "mscale"),
        (replace(bare("deepseek_v3"), dense_layers=61), "mtp: "),
        (with_moe("qwen3_30b_a3b", scoring="sigmoid"), r"moe\.scoring: 'sigmoid'"),
        (with_moe("qwen3_30b_a3b", shared=1), r"moe\.shared: 1"),
        (with_moe("qwen3_30b_a3b", scale=2.0), r"moe\.scale: 2\.0"),
        (with_moe("qwen3_30b_a3b", groups=8, top_groups=4), r"moe\.groups: 8"),
        (with_attention("qwen3_30b_a3b", qk_norm=False), r"attention\.qk_norm: False"),
        (with_rope("qwen3_30b_a3b", layout="neighbours"), r"rope\.layout: 'neighbours'"),
        (
            with_rope("smollm2_135m", yarn=YarnConfig(factor=2, original_context=8)),
            "mscale_all_dim",
        ),
        (replace(bare("smollm2_135m"), mtp=1), "mtp: 1 cannot be exported; llama has 0"),
        (with_attention("smollm2_135m", heads=10, kv_heads=5), "hidden: 576"),
    ],
)
def test_what_no_class_of_transformers_computes_is_not_exported(cfg, message):
    with pytest.raises(ConfigError, match=message):
        from_model_config(cfg)
