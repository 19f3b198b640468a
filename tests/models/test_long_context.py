"""32k tokens in one row of the tiny model: what training needs, as the compiler plans it."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from c2 import models
from c2.losses.cross_entropy import linear_cross_entropy

TOKENS = 32_768


def test_a_long_row_trains_in_less_than_four_gigabytes():
    cfg = replace(models.presets.get("tiny_mla_moe"), remat="full")

    def loss(p, tokens):
        hidden = models.trunk(p, tokens, cfg).hidden
        return linear_cross_entropy(hidden, models.head(p), tokens, jnp.ones(tokens.shape))

    tokens = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    lowered = jax.jit(jax.value_and_grad(loss)).lower(models.abstract(cfg), tokens)
    memory = lowered.compile({"xla_backend_optimization_level": 0}).memory_analysis()
    planned = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    # the process itself, with jax, takes another half; one f32 score matrix of a head alone is 4.3
    assert planned < 2e9
