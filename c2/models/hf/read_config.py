"""From config.json of a Hugging Face checkpoint to `ModelConfig`.

Every field of a config.json must be understood: translated, checked to have the only value that
our code implements, or known not to change the function. Anything else is refused, because a field
that is silently ignored is a different model with the same weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

from c2.config import ConfigError
from c2.models.config import (
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    YarnConfig,
)

LATENT_NORM_EPS = 1e-6  # transformers and DeepSeek's code fix it, whatever rms_norm_eps is

# What a config.json says about itself and its weights.
_ABOUT = """
    architectures auto_map dtype torch_dtype transformers_version model_type quantization_config
    is_llama_config transformers.js_config
"""
# Training, generation, limits: nothing here changes the logits of given tokens.
_HARMLESS = """
    max_position_embeddings max_window_layers
    attention_dropout initializer_range pretraining_tp ep_size use_cache gradient_checkpointing
    aux_loss_alpha seq_aux output_router_logits router_aux_loss_coef router_z_loss_coef
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    tokenizer_class prefix problem_type task_specific_params finetuning_task id2label label2id
    num_labels return_dict output_attentions output_hidden_states torchscript use_bfloat16
    tf_legacy_loss tie_encoder_decoder is_encoder_decoder is_decoder add_cross_attention
    cross_attention_hidden_size chunk_size_feed_forward pruned_heads
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
# Of a config around a text model; what reads images is not loaded.
_WRAPPER = """
    text_config vision_config ignore_index media_placeholder_token_id image_token_id video_token_id
    vision_start_token_id vision_end_token_id video_placeholder use_unified_vision_chunk
    projection_hidden_size projection_layer_norm_eps encoder_only language_only
"""
HARMLESS = frozenset(_HARMLESS.split())
# As released, and as transformers writes them.
_IMAGE_TENSORS = (
    "vision_tower.",
    "mm_projector.",
    "model.vision_tower.",
    "model.mm_projector.",
)
_REQUIRED = object()


class Fields:
    """The fields of a config.json, each of which must be asked for by someone."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data, self.where, self.left = data, where, set(data)

    def take(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value, of this type; ``default`` if it is absent or null."""
        self.left.discard(key)
        value = self.data.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self.where}.{key}: expected {kind.__name__}, got {value!r}")
        return value

    def only(self, legal: Any, *keys: str) -> None:
        """Checks fields for which one value is implemented; absent or null is that value."""
        for key in keys:
            self.left.discard(key)
            if self.data.get(key) not in (None, legal):
                raise ConfigError(
                    f"{self.where}.{key}: {self.data[key]!r} is not supported, only {legal!r}"
                )

    def finish(self) -> None:
        """Refuses fields that nobody asked for and that may change the function."""
        for key in sorted(self.left - HARMLESS - set(_ABOUT.split())):
            if self.data[key] is not None and not key.startswith("_"):
                raise ConfigError(
                    f"{self.where}.{key}: unknown field, which may change what the model computes"
                )


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Finds the text model in a config.json.

    Returns:
      Its config; the prefix of its tensors' names; and the prefixes of those to leave out.
    """
    if config.get("model_type") != "kimi_k25":
        return dict(config), "", ()
    outer = Fields(config, "config.json")
    text = outer.take("text_config", dict)
    outer.left -= set(_WRAPPER.split())
    tied = outer.take("tie_word_embeddings", bool, text.get("tie_word_embeddings", False))
    outer.finish()
    quantization = text.get("quantization_config") or config.get("quantization_config")
    text = text | {"tie_word_embeddings": tied, "quantization_config": quantization}
    return text, "language_model.", _IMAGE_TENSORS


def to_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Translates the config of a text model.

    Raises:
      ConfigError: for a model type, field or value that our code does not implement.
    """
    fields = Fields(config, "config.json")
    kind = fields.take("model_type", str)
    if kind not in _READERS:
        raise ConfigError(
            f"config.json.model_type: {kind!r} is not supported; "
            f"known: kimi_k25, {', '.join(_READERS)}"
        )
    fields.only("silu", "hidden_act")
    fields.only(False, "attention_bias", "mlp_bias", "use_sliding_window")
    try:
        cfg = _READERS[kind](fields)
    except ConfigError as error:
        if str(error).startswith("config.json"):
            raise
        raise ConfigError(f"config.json: {error}") from error
    fields.finish()
    return cfg


def _model(fields: Fields, **rest: Any) -> ModelConfig:
    """What all architectures have in common."""
    return ModelConfig(
        vocab=fields.take("vocab_size", int),
        hidden=fields.take("hidden_size", int),
        layers=fields.take("num_hidden_layers", int),
        dense_intermediate=fields.take("intermediate_size", int),
        norm_eps=fields.take("rms_norm_eps", float),
        tied=fields.take("tie_word_embeddings", bool, False),
        **rest,
    )


def _deepseek_v3(fields: Fields) -> ModelConfig:
    heads = fields.take("num_attention_heads", int)
    fields.only(heads, "num_key_value_heads")
    fields.only("sigmoid", "scoring_func")
    fields.only("noaux_tc", "topk_method")
    fields.only(1, "moe_layer_freq")
    attention = MLAConfig(
        heads=heads,
        q_lora=fields.take("q_lora_rank", int, None),
        kv_lora=fields.take("kv_lora_rank", int),
        nope=fields.take("qk_nope_head_dim", int),
        rope=fields.take("qk_rope_head_dim", int),
        v=fields.take("v_head_dim", int),
        latent_norm_eps=LATENT_NORM_EPS,
    )
    fields.only(attention.qk, "qk_head_dim")
    fields.only(attention.rope, "head_dim")
    moe = MoEConfig(
        experts=fields.take("n_routed_experts", int),
        top_k=fields.take("num_experts_per_tok", int),
        intermediate=fields.take("moe_intermediate_size", int),
        shared=fields.take("n_shared_experts", int, 0),
        groups=fields.take("n_group", int, 1),
        top_groups=fields.take("topk_group", int, 1),
        norm_top_k=fields.take("norm_topk_prob", bool),
        scale=fields.take("routed_scaling_factor", float),
    )
    interleaved = fields.take("rope_interleave", bool, True)
    return _model(
        fields,
        dense_layers=fields.take("first_k_dense_replace", int),
        attention=attention,
        moe=moe,
        rope=_rope(fields, "neighbours" if interleaved else "halves", sharpened=True),
        mtp=fields.take("num_nextn_predict_layers", int, 0),
    )


def _qwen3_moe(fields: Fields) -> ModelConfig:
    dense = fields.take("mlp_only_layers", list, [])
    if dense != list(range(len(dense))):
        raise ConfigError(f"mlp_only_layers: {dense!r} is not supported, only the first layers")
    fields.only(1, "decoder_sparse_step")
    experts = "num_experts" if "num_experts" in fields.data else "num_local_experts"  # its new name
    moe = MoEConfig(
        experts=fields.take(experts, int),
        top_k=fields.take("num_experts_per_tok", int),
        intermediate=fields.take("moe_intermediate_size", int),
        shared=0,
        scoring="softmax",
        bias=False,
        norm_top_k=fields.take("norm_topk_prob", bool),
    )
    return _gqa(fields, dense_layers=len(dense), moe=moe, qk_norm=True)


def _dense(qk_norm: bool) -> Callable[[Fields], ModelConfig]:
    def read(fields: Fields) -> ModelConfig:
        layers = fields.take("num_hidden_layers", int)
        return _gqa(fields, dense_layers=layers, moe=None, qk_norm=qk_norm)

    return read


def _gqa(fields: Fields, *, qk_norm: bool, **rest: Any) -> ModelConfig:
    heads = fields.take("num_attention_heads", int)
    fields.left.discard("sliding_window")  # means nothing without use_sliding_window
    fields.only(False, "rope_interleaved")
    for kind in fields.take("layer_types", list, []):
        if kind != "full_attention":
            raise ConfigError(f"layer_types: {kind!r} is not supported, only 'full_attention'")
    attention = GQAConfig(
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", int, heads),
        head_dim=fields.take("head_dim", int, fields.take("hidden_size", int) // max(heads, 1)),
        qk_norm=qk_norm,
    )
    return _model(fields, attention=attention, rope=_rope(fields, "halves"), **rest)


_READERS = {
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "qwen3_moe": _qwen3_moe,
    "qwen3": _dense(qk_norm=True),
    "llama": _dense(qk_norm=False),
}


def _rope(fields: Fields, layout: str, sharpened: bool = False) -> RopeConfig:
    """Reads rotary embedding, old style (``rope_scaling``) and new (``rope_parameters``).

    Args:
      fields: of the config.
      layout: as in `RopeConfig`.
      sharpened: whether the architecture multiplies attention scores by YaRN's m squared.
    """
    scaling = fields.take("rope_scaling", dict, {}) | fields.take("rope_parameters", dict, {})
    rope = Fields(scaling, "config.json.rope_scaling")
    theta = fields.take("rope_theta", float, 10_000.0)
    theta = rope.take("rope_theta", float, theta)
    kind = rope.take("rope_type", str, rope.take("type", str, "default"))
    yarn = None
    if kind == "yarn":
        # absent, they mean 1 for the angles' amplitude and none of m squared
        mscale = rope.take("mscale", float, 0.0)
        all_dim = rope.take("mscale_all_dim", float, 0.0)
        if bool(mscale) != bool(all_dim) or (all_dim and not sharpened):
            raise ConfigError(
                f"rope_scaling.mscale: {mscale} with mscale_all_dim {all_dim} is not supported: "
                "implementations of this model type disagree about it"
            )
        yarn = YarnConfig(
            factor=rope.take("factor", float),
            original_context=rope.take("original_max_position_embeddings", int),
            beta_fast=rope.take("beta_fast", float, 32.0),
            beta_slow=rope.take("beta_slow", float, 1.0),
            mscale=mscale or 1.0,
            mscale_all_dim=all_dim,
        )
        rope.only(True, "truncate")
    elif kind != "default":
        raise ConfigError(f"rope_scaling.rope_type: {kind!r} is not supported; default or yarn")
    rope.finish()
    return RopeConfig(theta=theta, yarn=yarn, layout=layout)
