"""Sampling 64 tokens after each of 32 prompts of 64, with a small DeepSeek-V3-style model.

Ours is an engine for every core of this process, the prompts shared among them, and the weights
too: one copy stays in the cores' common cache where several would not. The peer is
Hugging Face transformers' `generate` with the same weights, its fastest expert implementation on
CPU (`grouped_mm`) and a key-value cache, sampling from the whole distribution too.
"""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from launch.bench_case import Case, Step, timed
from launch.bench_train_step import VOCAB, model_config, require_peer

PROMPTS, PROMPT, NEW = 32, 64, 64
PEER, UNIT, SAME_WORK = "transformers", "tokens", True


def cases(dtypes: Sequence[str]) -> dict[str, Case]:
    """A case per precision."""
    require_peer()
    return {
        dtype: Case(partial(_ours, dtype), partial(_peer, dtype), PROMPTS * NEW) for dtype in dtypes
    }


def _prompts() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (PROMPTS, PROMPT), dtype=np.int32)


def _model(dtype: str):
    """The model of `launch.bench_train_step`, and its initial weights."""
    import jax

    from c2 import models

    cfg = model_config(dtype)
    return cfg, models.init(jax.random.key(0), cfg)


def _ours(dtype: str) -> Step:
    from c2.rollout.config import EngineConfig, Request
    from c2.rollout.device import Device
    from c2.rollout.scheduler import Scheduler, run

    cfg, params = _model(dtype)
    cores = max(n for n in range(1, len(os.sched_getaffinity(0)) + 1) if PROMPTS % n == 0)
    share = PROMPTS // cores
    engine = EngineConfig(
        slots=share, capacity=PROMPT + NEW, prefill_rows=share, prefill_chunk=PROMPT, steps=NEW
    )
    devices = [Device(params, cfg, engine) for _ in range(cores)]
    for device in devices[1:]:
        device.swap(devices[0].params)
    schedulers = [Scheduler(device, engine, VOCAB) for device in devices]
    requests = [
        Request(prompt=prompt.tolist(), max_tokens=NEW, id=i) for i, prompt in enumerate(_prompts())
    ]
    shares = [requests[i : i + share] for i in range(0, PROMPTS, share)]
    threads = ThreadPoolExecutor(cores)

    def step():
        done = [c for some in threads.map(run, schedulers, shares) for c in some]
        assert all(len(c.tokens) == NEW for c in done)

    return timed(step)


def _peer(dtype: str) -> Step:
    import torch
    from transformers import AutoModelForCausalLM

    from c2.models import hf

    cfg, params = _model(dtype)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        hf.save(params, cfg, f"{folder}/model", dtype="float32")
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/model",
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        ).eval()
    prompts = torch.from_numpy(_prompts()).long()

    def step():
        new = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, **new
        )
        assert out.shape == (PROMPTS, PROMPT + NEW)

    return timed(step)
