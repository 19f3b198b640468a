"""Live parity with Hugging Face transformers, on the same checkpoints, through `hf.load`.

Needs the extra `parity`. The tolerance sits between rounding (some 5e-6 at a logit spread of 1)
and the smallest mutation that must be caught, another epsilon in the latent norms (2.4e-5).

    WRITE_FIXTURES=1 pytest tests/parity/test_transformers.py -k recorded

writes anew the logits with which `test_recorded_logits.py` compares where there is no torch.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from c2 import models
from c2.losses.cross_entropy import token_log_probs
from c2.models import hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()  # it reports what we test for
    transformers.logging.disable_progress_bar()


def their_model(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    kind = config.pop("model_type")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if kind == "kimi_k2":  # has no class of its own
        options["config"] = transformers.DeepseekV3Config(**config)
        return transformers.DeepseekV3ForCausalLM.from_pretrained(folder, **options).eval()
    if kind == "kimi_k25":
        cls = transformers.Kimi_K25ForConditionalGeneration
        return cls.from_pretrained(folder, **options).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def their_logits(model, tokens):
    return model(input_ids=torch.from_numpy(tokens), use_cache=False).logits


def their_gradients(model, folder: Path):
    """Gradients as parameters of ours: put into the weights, saved by transformers, and loaded."""
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                weight.zero_()
            elif weight.grad is not None:
                weight.copy_(weight.grad)
    model.save_pretrained(folder)
    return hf.load(folder)[1]


def compiled(f):
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})  # it runs once


def test_recorded_logits_are_theirs(case, checkpoint, tokens, recorded):
    with torch.no_grad():
        logits = their_logits(their_model(checkpoint(case)), tokens).numpy()
    np.testing.assert_allclose(recorded(case, logits), logits, atol=5e-6, rtol=0)


def test_recorded_module_logits_are_theirs(checkpoint, tokens, recorded):
    model = their_model(checkpoint("v3"))
    # their pattern knows modules of DeepSeek-V3's depth only, layer 61
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\..*"]
    module = transformers.modeling_layers.MtpModel.from_pretrained(model).eval()
    ids = torch.from_numpy(tokens)
    positions = torch.arange(ids.shape[1] - 1)[None]
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        inner = module.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        logits = module._project_to_logits(inner).numpy()
    np.testing.assert_allclose(recorded("v3_module", logits), logits, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("k2", marks=pytest.mark.slow),
        pytest.param("k25", marks=pytest.mark.slow),
        "v3",
        pytest.param("no_q_lora", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("qwen3_yarn", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def test_logits_and_gradients_equal_theirs(case, checkpoint, tokens, tmp_path):
    model = their_model(checkpoint(case))
    exact_logits = their_logits(model, tokens)
    exact_loss = torch.nn.functional.cross_entropy(
        exact_logits[:, :-1].flatten(0, 1), torch.from_numpy(tokens)[:, 1:].flatten()
    )
    exact_loss.backward()
    cfg, params = hf.load(checkpoint(case))

    def loss_and_logits(p):
        logits = models.forward(p, tokens, cfg).logits
        return -token_log_probs(logits[:, :-1], tokens[:, 1:]).mean(), logits

    run = jax.jit(
        jax.value_and_grad(loss_and_logits, has_aux=True),
        compiler_options={"xla_backend_optimization_level": 0},  # it runs once
    )
    (loss, logits), grads = run(replace(params, mtp=()))
    np.testing.assert_allclose(logits, exact_logits.detach().numpy(), atol=1e-5, rtol=0)
    np.testing.assert_allclose(loss, exact_loss.item(), rtol=1e-6)
    exact_grads = jax.tree.leaves(their_gradients(model, tmp_path / "gradients"))
    paths_and_grads = jax.tree_util.tree_leaves_with_path(grads)
    for (path, grad), exact in zip(paths_and_grads, exact_grads, strict=True):
        name, largest = jax.tree_util.keystr(path), np.abs(exact).max()
        np.testing.assert_allclose(grad, exact, atol=1e-5 * largest, rtol=0, err_msg=name)


def test_they_load_what_we_save(case, checkpoint, tokens, tmp_path):
    cfg, params = hf.load(checkpoint(case))
    for dtype in ("float32", "bfloat16"):
        hf.save(jax.device_get(params), cfg, tmp_path / dtype, dtype=dtype, shard_bytes=30_000)
    theirs, exported = their_model(checkpoint(case)), their_model(tmp_path / "float32")
    with torch.no_grad():
        assert torch.equal(their_logits(exported, tokens), their_logits(theirs, tokens))
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16")
    assert half.dtype == torch.bfloat16
    exact = exported.state_dict()
    for name, weight in half.state_dict().items():
        kept = name.endswith("e_score_correction_bias")
        assert torch.equal(weight, exact[name] if kept else exact[name].bfloat16().to(weight.dtype))
