"""Forward, backward and AdamW of a small DeepSeek-V3-style model, batch 8 x 512.

The peer is Hugging Face transformers' `DeepseekV3ForCausalLM` with its fastest expert
implementation on CPU (`grouped_mm`) and fused AdamW: same architecture, batch and precision.
"""

import importlib.util
import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from launch.bench_case import Case, Step, timed

ROWS, CONTEXT, VOCAB = 8, 512, 4096
PEER, UNIT, SAME_WORK = "transformers", "tokens", True


def cases(dtypes: Sequence[str]) -> dict[str, Case]:
    """A case per precision."""
    require_peer()
    return {
        dtype: Case(partial(_ours, dtype), partial(_peer, dtype), ROWS * CONTEXT)
        for dtype in dtypes
    }


def require_peer() -> None:
    """Raises ImportError unless transformers and torch can be imported.

    They are not imported: torch must not count as memory of our side.
    """
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"no module named {name!r}")


def model_config(dtype: str):
    """The small DeepSeek-V3-style model that both sides run."""
    from c2 import models

    return models.ModelConfig(
        vocab=VOCAB,
        hidden=256,
        layers=4,
        dense_layers=1,
        dense_intermediate=1024,
        attention=models.MLAConfig(heads=8, q_lora=128, kv_lora=64, nope=32, rope=16, v=32),
        moe=models.MoEConfig(experts=16, top_k=4, intermediate=128, scale=2.5),
        dtype=dtype,
    )


def _tokens() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCAB, (ROWS, CONTEXT + 1), dtype=np.int32)


def _ours(dtype: str) -> Step:
    import jax

    from c2 import models
    from c2.parallel import mesh as meshes
    from c2.training import optimizer as optimizers
    from c2.training.state import init_state
    from c2.training.step import make_train_step

    cfg = model_config(dtype)
    mesh = meshes.data_mesh(max(n for n in range(1, jax.device_count() + 1) if ROWS % n == 0))
    optimizer = optimizers.make(optimizers.OptimizerConfig(), 1e-3, models.spec(cfg))
    state = meshes.replicate(init_state(jax.random.key(0), cfg, optimizer), mesh)
    train_step = make_train_step(cfg, optimizer, mesh)
    tokens = _tokens()
    shape = (ROWS, CONTEXT)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }

    def step():
        nonlocal state
        state, metrics = train_step(state, meshes.place(batch, mesh))
        jax.block_until_ready((state, metrics))

    return timed(step)


def _peer(dtype: str) -> Step:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    cfg = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    model = DeepseekV3ForCausalLM(cfg).to(getattr(torch, dtype)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.from_numpy(_tokens()[:, :-1]).long()

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)
