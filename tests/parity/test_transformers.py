"""Live parity with Hugging Face transformers' DeepSeek-V3, of which Kimi K2 and K2.5 are cases.

Needs the extra `parity`. The tolerance sits between rounding (some 5e-6 at a logit spread of 1)
and the smallest mutation that must be caught, another epsilon in the latent norms (2.4e-5). For
the same reason nothing is left neutral: norm scales and biases are random, biases below -1, and
the tiny YaRN bends most frequencies.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.losses.cross_entropy import token_log_probs
from c2.models import MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig
from c2.models.blocks import DenseLayer, MoELayer
from c2.models.layers import MLP
from c2.models.mla import Attention
from c2.models.moe import MoE
from c2.models.transformer import Params

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

K2 = ModelConfig(
    vocab=83,
    hidden=48,
    layers=2,
    dense_layers=1,
    dense_intermediate=56,
    attention=MLAConfig(heads=3, q_lora=24, kv_lora=20, nope=12, rope=8, v=10),
    moe=MoEConfig(experts=12, top_k=3, intermediate=16, shared=2, scale=2.827),
    rope=RopeConfig(theta=100.0, yarn=YarnConfig(factor=32.0, original_context=16, beta_fast=1.0)),
)
K25 = replace(
    K2,
    rope=RopeConfig(theta=100.0, yarn=YarnConfig(factor=64.0, original_context=16)),
    norm_eps=1e-5,
)
V3 = replace(
    K2,
    moe=MoEConfig(experts=16, top_k=3, intermediate=16, groups=4, top_groups=2, scale=2.5),
    rope=RopeConfig(theta=100.0, yarn=YarnConfig(factor=40.0, original_context=16)),
)


def their_config(cfg: ModelConfig):
    a, m, yarn = cfg.attention, cfg.moe, cfg.rope.yarn
    config = transformers.DeepseekV3Config(
        vocab_size=cfg.vocab,
        hidden_size=cfg.hidden,
        num_hidden_layers=cfg.layers,
        first_k_dense_replace=cfg.dense_layers,
        intermediate_size=cfg.dense_intermediate,
        num_attention_heads=a.heads,
        num_key_value_heads=a.heads,
        q_lora_rank=a.q_lora,
        kv_lora_rank=a.kv_lora,
        qk_nope_head_dim=a.nope,
        qk_rope_head_dim=a.rope,
        v_head_dim=a.v,
        n_routed_experts=m.experts,
        num_experts_per_tok=m.top_k,
        moe_intermediate_size=m.intermediate,
        n_shared_experts=m.shared,
        n_group=m.groups,
        topk_group=m.top_groups,
        norm_topk_prob=m.norm_top_k,
        routed_scaling_factor=m.scale,
        rms_norm_eps=cfg.norm_eps,
        max_position_embeddings=int(yarn.factor) * yarn.original_context,
        rope_theta=cfg.rope.theta,
        rope_scaling={
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_context,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        },
        rope_interleave=True,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    config._experts_implementation = "eager"
    return config


def their_model(cfg: ModelConfig, seed: int):
    model = transformers.DeepseekV3ForCausalLM(their_config(cfg)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                weight.uniform_(-1.6, -1.2, generator=generator)
            elif weight.ndim == 1 and "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
            elif weight.ndim > 1:
                # soft attention and tame residuals: at gain 1 rounding alone reaches 1.5e-5, ours
                # and theirs alike, measured against float64
                gain = {"q_b_proj": 0.4, "o_proj": 0.5, "down_proj": 0.5}
                scale = next((g for part, g in gain.items() if part in name), 1.0)
                weight.normal_(0, scale * weight.shape[-1] ** -0.5, generator=generator)
    return model


def to_params(state: dict[str, np.ndarray], cfg: ModelConfig) -> Params:
    """Their tensors, [out, in] and one per layer, as ours; every one must be used."""
    a, left = cfg.attention, dict(state)

    def take(name):
        return left.pop(name).T  # .T reverses all axes: [expert, out, in] -> [in, out, expert]

    def swiglu(prefix):
        gate, up = take(f"{prefix}.gate_proj.weight"), take(f"{prefix}.up_proj.weight")
        return MLP(gate_up=np.stack([gate, up], 1), down=take(f"{prefix}.down_proj.weight"))

    def attention(prefix):
        return Attention(
            q_down=take(f"{prefix}.q_a_proj.weight"),
            q_norm=take(f"{prefix}.q_a_layernorm.weight"),
            q_up=take(f"{prefix}.q_b_proj.weight").reshape(a.q_lora, a.heads, -1),
            kv_down=take(f"{prefix}.kv_a_proj_with_mqa.weight"),
            kv_norm=take(f"{prefix}.kv_a_layernorm.weight"),
            kv_up=take(f"{prefix}.kv_b_proj.weight").reshape(a.kv_lora, a.heads, -1),
            out=take(f"{prefix}.o_proj.weight").reshape(a.heads, a.v, -1),
        )

    def mixture(prefix):
        gate_up = take(f"{prefix}.experts.gate_up_proj").transpose(2, 0, 1)
        return MoE(
            router=take(f"{prefix}.gate.weight"),
            bias=take(f"{prefix}.gate.e_score_correction_bias"),
            gate_up=np.stack(np.split(gate_up, 2, axis=2), 2),
            down=take(f"{prefix}.experts.down_proj").transpose(2, 0, 1),
            shared=swiglu(f"{prefix}.shared_experts"),
        )

    def layer(i):
        prefix = f"model.layers.{i}"
        common = {
            "attention_norm": take(f"{prefix}.input_layernorm.weight"),
            "attention": attention(f"{prefix}.self_attn"),
        }
        norm = take(f"{prefix}.post_attention_layernorm.weight")
        if i < cfg.dense_layers:
            return DenseLayer(**common, mlp_norm=norm, mlp=swiglu(f"{prefix}.mlp"))
        return MoELayer(**common, moe_norm=norm, moe=mixture(f"{prefix}.mlp"))

    def stack(layers):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)

    params = Params(
        embed=take("model.embed_tokens.weight").T,
        dense=stack([layer(i) for i in range(cfg.dense_layers)]),
        moe=stack([layer(i) for i in range(cfg.dense_layers, cfg.layers)]),
        norm=take("model.norm.weight"),
        head=take("lm_head.weight"),
    )
    assert not left, f"unused: {sorted(left)}"
    return jax.tree.map(jnp.asarray, params)


def compiled(f):
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})  # it runs once


def their_logits(model, tokens):
    return model(torch.from_numpy(tokens), use_cache=False).logits


def arrays(model):
    return {name: weight.detach().numpy() for name, weight in model.state_dict().items()}


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(K2.vocab, size=(2, 60))


@pytest.mark.parametrize("cfg", [K2, K25], ids=["k2", "k25"])
def test_logits_equal_theirs(cfg, tokens):
    model = their_model(cfg, seed=3)
    forward = compiled(lambda p: models.forward(p, tokens, cfg).logits)
    logits = forward(to_params(arrays(model), cfg))
    with torch.no_grad():
        np.testing.assert_allclose(logits, their_logits(model, tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "cfg",
    [
        pytest.param(K2, id="k2", marks=pytest.mark.slow),
        pytest.param(K25, id="k25", marks=pytest.mark.slow),
        pytest.param(V3, id="v3"),
    ],
)
def test_logits_and_gradients_equal_theirs(cfg, tokens):
    model = their_model(cfg, seed=3)
    exact_logits = their_logits(model, tokens)
    exact_loss = torch.nn.functional.cross_entropy(
        exact_logits[:, :-1].flatten(0, 1), torch.from_numpy(tokens)[:, 1:].flatten()
    )
    exact_loss.backward()
    gradients = {name: np.zeros_like(weight) for name, weight in arrays(model).items()}
    gradients |= {name: weight.grad.numpy() for name, weight in model.named_parameters()}

    def loss_and_logits(p):
        logits = models.forward(p, tokens, cfg).logits
        return -token_log_probs(logits[:, :-1], tokens[:, 1:]).mean(), logits

    run = compiled(jax.value_and_grad(loss_and_logits, has_aux=True))
    (loss, logits), grads = run(to_params(arrays(model), cfg))
    np.testing.assert_allclose(logits, exact_logits.detach().numpy(), atol=1e-5, rtol=0)
    np.testing.assert_allclose(loss, exact_loss.item(), rtol=1e-6)
    exact_grads = jax.tree.leaves(to_params(gradients, cfg))
    for (path, grad), exact in zip(
        jax.tree_util.tree_leaves_with_path(grads), exact_grads, strict=True
    ):
        name, largest = jax.tree_util.keystr(path), np.abs(exact).max()
        np.testing.assert_allclose(grad, exact, atol=1e-5 * largest, rtol=0, err_msg=name)
