"""Small checkpoints of every supported kind, written with the published names and layouts.

Nothing here knows our code: configs are those of the released models with small numbers, and names
and shapes are spelt out from the published model descriptions. Nothing is left neutral: norm scales
and biases are random, biases are below -1, and the tiny YaRN bends most frequencies.
"""

import json
import math
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

_COMMON = {
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 56,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 83,
}


def _yarn(factor: float, beta_fast: float = 32) -> dict:
    return {
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "factor": factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
        "type": "yarn",
    }


_K2 = _COMMON | {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 3,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "rope_scaling": _yarn(32.0, beta_fast=1.0),
    "rope_theta": 100.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 10,
}
_V3 = _K2 | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 1,
    "rope_scaling": _yarn(40.0),
    "routed_scaling_factor": 2.5,
}
_GQA = _COMMON | {
    "head_dim": 10,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_theta": 100.0,
}
_QWEN3_MOE = _GQA | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}
# written as transformers 5 writes it, others as the releases did
_LLAMA = {key: value for key, value in _GQA.items() if key != "rope_theta"} | {
    "model_type": "llama",
    "mlp_bias": False,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}
CONFIGS = {
    "k2": _K2,
    "k25": {
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 80,
        "projection_hidden_size": 8,
        "text_config": _K2 | {"rope_scaling": _yarn(64.0), "rms_norm_eps": 1e-5},
        "tie_word_embeddings": False,
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        | {"intermediate_size": 8, "patch_size": 2},
    },
    "v3": _V3,
    "no_q_lora": _V3
    | {
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rope_interleave": False,
        "rope_scaling": None,
        "norm_topk_prob": False,
    },
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_yarn": _GQA
    | {
        "model_type": "qwen3",
        "rope_scaling": {
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "rope_type": "yarn",
        },
    },
    "llama": _LLAMA,
}
RECORDED = Path(__file__).parent / "fixtures" / "logits.npz"
TOKENS = np.random.default_rng(0).integers(_COMMON["vocab_size"], size=(2, 40))


def _swiglu(prefix: str, hidden: int, features: int) -> dict:
    return {
        f"{prefix}.gate_proj.weight": (features, hidden),
        f"{prefix}.up_proj.weight": (features, hidden),
        f"{prefix}.down_proj.weight": (hidden, features),
    }


def _attention(c: dict, at: str) -> dict:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        dim, kv_heads = c["head_dim"], c["num_key_value_heads"]
        shapes = {
            "q_proj": (heads * dim, hidden),
            "k_proj": (kv_heads * dim, hidden),
            "v_proj": (kv_heads * dim, hidden),
            "o_proj": (hidden, heads * dim),
        }
        if c["model_type"].startswith("qwen3"):
            shapes |= {"q_norm": (dim,), "k_norm": (dim,)}
    else:
        nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        q_rank, rank = c["q_lora_rank"], c["kv_lora_rank"]
        shapes = {
            "kv_a_proj_with_mqa": (rank + rope, hidden),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (nope + v), rank),
            "o_proj": (hidden, heads * v),
        }
        if q_rank is None:
            shapes |= {"q_proj": (heads * (nope + rope), hidden)}
        else:
            shapes |= {"q_a_proj": (q_rank, hidden), "q_a_layernorm": (q_rank,)}
            shapes |= {"q_b_proj": (heads * (nope + rope), q_rank)}
    return {f"{at}.self_attn.{name}.weight": shape for name, shape in shapes.items()}


def _layer(c: dict, at: str, mixture: bool) -> dict:
    hidden = c["hidden_size"]
    shapes = _attention(c, at) | {
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
    }
    if not mixture:
        return shapes | _swiglu(f"{at}.mlp", hidden, c["intermediate_size"])
    features = c["moe_intermediate_size"]
    experts = c.get("n_routed_experts") or c["num_experts"]
    shapes |= {f"{at}.mlp.gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _swiglu(f"{at}.mlp.experts.{expert}", hidden, features)
    if "n_routed_experts" in c:
        shapes |= {f"{at}.mlp.gate.e_score_correction_bias": (experts,)}
        shapes |= _swiglu(f"{at}.mlp.shared_experts", hidden, features * c["n_shared_experts"])
    return shapes


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint."""
    if config["model_type"] == "kimi_k25":
        text = tensor_shapes(config["text_config"])
        vision = {"vision_tower.patch_embed.proj.bias": (8,), "mm_projector.pre_norm.bias": (8,)}
        return {f"language_model.{name}": shape for name, shape in text.items()} | vision
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    dense = {"llama": layers, "qwen3": layers, "qwen3_moe": 0}.get(config["model_type"])
    dense = config["first_k_dense_replace"] if dense is None else dense
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    shapes |= {"model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes |= {"lm_head.weight": (config["vocab_size"], hidden)}
    for layer in range(layers):
        shapes |= _layer(config, f"model.layers.{layer}", layer >= dense)
    for module in range(config.get("num_nextn_predict_layers", 0)):
        at = f"model.layers.{layers + module}"
        shapes |= _layer(config, at, True)
        shapes |= {f"{at}.{n}.weight": (hidden,) for n in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{at}.eh_proj.weight": (hidden, 2 * hidden)}
        shapes |= {f"{at}.embed_tokens.weight": shapes["model.embed_tokens.weight"]}
        shapes |= {f"{at}.shared_head.head.weight": shapes["lm_head.weight"]}
    return shapes


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Reproducible f32 values; the generator's uniform numbers are the same in all numpy's."""
    # soft attention and tame residuals: at gain 1 rounding alone reaches 1.5e-5, ours and theirs
    # alike, measured against float64
    gains = {"q_b_proj": 0.4, "q_proj": 0.4, "o_proj": 0.5, "down_proj": 0.5}
    name = name.removesuffix(".weight")
    for copy, original in {
        ".embed_tokens": "model.embed_tokens",
        ".shared_head.head": "lm_head",
    }.items():
        name = original if name.endswith(copy) and "layers" in name else name
    uniform = np.random.default_rng(zlib.crc32(name.encode())).random(shape)
    if name.endswith("e_score_correction_bias"):
        drawn = -1.6 + 0.4 * uniform
    elif len(shape) == 1:
        drawn = 0.5 + uniform
    else:
        gain = next((g for part, g in gains.items() if part in name), 1.0)
        drawn = gain * math.sqrt(12 / shape[-1]) * (uniform - 0.5)
    return drawn.astype(np.float32)


def write_checkpoint(config: dict, folder: Path, dtype: str) -> Path:
    """Writes config.json and model.safetensors of a model with these `values`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: values(name, shape) for name, shape in tensor_shapes(config).items()}
    for name in tensors:
        if not name.endswith("e_score_correction_bias"):  # f32 in all releases
            tensors[name] = tensors[name].astype(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function from a name in ``CONFIGS`` (and a dtype) to the folder of its checkpoint."""
    root, written = tmp_path_factory.mktemp("checkpoints"), {}

    def get(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in written:
            folder = root / f"{name}_{dtype}"
            written[name, dtype] = write_checkpoint(CONFIGS[name], folder, dtype)
        return written[name, dtype]

    return get


@pytest.fixture(params=CONFIGS)
def case(request) -> str:
    """Each of the names in ``CONFIGS``."""
    return request.param


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    """Input of every case, int [2, 40]."""
    return TOKENS


@pytest.fixture
def recorded():
    """A function from a case to transformers' logits; if asked to, it writes given ones first."""

    def get(case: str, new: np.ndarray | None = None) -> np.ndarray:
        if new is not None and os.environ.get("WRITE_FIXTURES"):
            old = dict(np.load(RECORDED)) if RECORDED.exists() else {}
            RECORDED.parent.mkdir(exist_ok=True)
            np.savez_compressed(RECORDED, **old | {case: new})
        return np.load(RECORDED)[case]

    return get
