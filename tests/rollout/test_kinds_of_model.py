"""Grouped-query attention, and bf16 with the engine's routes replayed."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.models import GQAConfig
from c2.rollout.config import Request
from c2.rollout.scheduler import Scheduler, run

GROUPED = GQAConfig(heads=4, kv_heads=2, head_dim=8, qk_norm=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "atol"),
    [
        pytest.param({"attention": GROUPED, "mtp": 0}, 1e-5, id="grouped queries"),
        pytest.param(
            {"dtype": "bfloat16"},
            1e-2,
            id="bf16",
            marks=pytest.mark.xfail(
                strict=True,  # the bound stands; whoever reaches it takes this out
                reason="latents decode without expanded keys, which rounds differently: up to .03",
            ),
        ),
        pytest.param({"moe": None, "dense_layers": 3, "mtp": 0}, 1e-5, id="dense"),
    ],
)
def test_log_probs_are_the_trainers(fields, atol, model, random_params, build_device):
    cfg = replace(model, **fields)
    params = random_params(cfg)
    device = build_device(cfg, params, prefix_entries=0)
    rng = np.random.default_rng(0)
    requests = [
        Request(prompt=rng.integers(61, size=n).tolist(), max_tokens=20, id=n, temperature=t)
        for n, t in ((1, 0.6), (9, 1.0), (30, 1.4))
    ]
    completions = run(Scheduler(device, device.engine, cfg.vocab), requests)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def forward(tokens, segment_ids, routes):
        return models.forward(params, tokens, cfg, segment_ids=segment_ids, routes=routes).logits

    for c in completions:
        tokens = np.concatenate([c.prompt, c.tokens])
        row, real = np.zeros((2, 1, 64), np.int32)
        row[0, : len(tokens)], real[0, : len(tokens)] = tokens, 1
        routes = np.full((1, 64, *c.routes.shape[1:]), -2, np.int16)
        routes[0, : len(tokens)] = c.routes
        replayed = routes if cfg.moe else None
        log_probs = jax.nn.log_softmax(forward(row, real, replayed)[0] / c.temperature)
        places = jnp.arange(len(c.prompt) - 1, len(tokens) - 1)
        np.testing.assert_allclose(c.log_probs, log_probs[places, c.tokens], atol=atol)
