"""Parity with transformers without torch: the same checkpoints, and logits that it computed.

`test_transformers.py` says how they are written, and holds them to be transformers' own.
"""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from c2 import models
from c2.models import hf, mtp


def test_logits(case, checkpoint, tokens, recorded):
    cfg, params = hf.load(checkpoint(case))

    def forward(p):
        out = models.forward(p, tokens, cfg)
        if not p.mtp:
            return out.logits, None
        at = {"positions": np.arange(tokens.shape[1])[None], "segment_ids": np.ones_like(tokens)}
        hidden, _ = mtp.trunk(p.mtp[0], p.embed, out.hidden, tokens, cfg, **at)
        return out.logits, hidden @ models.head(p)

    run = jax.jit(forward, compiler_options={"xla_backend_optimization_level": 0})  # it runs once
    logits, module_logits = run(params)
    np.testing.assert_allclose(logits, recorded(case), atol=1e-5, rtol=0)
    if case == "v3":
        np.testing.assert_allclose(module_logits[:, :-1], recorded("v3_module"), atol=1e-5, rtol=0)


def tensors(folder):
    """Bytes, type and shape of all text tensors of a checkpoint."""
    merged = {}
    for file in folder.glob("*.safetensors"):
        merged |= load_file(file)
    return {
        name.removeprefix("language_model."): (value.tobytes(), value.dtype, value.shape)
        for name, value in merged.items()
        if not name.startswith(("vision_tower.", "mm_projector."))
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bitwise(case, dtype, checkpoint, tmp_path):
    cfg, params = hf.load(checkpoint(case, dtype))
    hf.save(jax.device_get(params), cfg, tmp_path / "saved", dtype=dtype, shard_bytes=20_000)
    assert tensors(tmp_path / "saved") == tensors(checkpoint(case, dtype))
    again_cfg, again = hf.load(tmp_path / "saved", dtype=dtype)
    assert again_cfg == dataclasses.replace(cfg, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, again, params)
