"""FLOPs against published figures, parameter counts and XLA's own count."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from c2 import models
from c2.models import presets
from c2.models.flops import forward_cost


def test_a_mixture_layer_of_kimi_k2():
    """2 * 500,236,288 multiply-adds a token; attention costs as much at 48,851 tokens."""
    cfg = presets.get("kimi_k2")
    more, less = forward_cost(replace(cfg, layers=62)), forward_cost(cfg)
    linear, quadratic = more.linear - less.linear, more.quadratic - less.quadratic
    assert (linear, quadratic) == (1_000_472_576, 20_480)
    assert linear / quadratic == pytest.approx(48_851, abs=0.5)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_token_meets_every_active_matrix_once(name):
    cfg = replace(presets.get(name), mtp=0)
    vectors = sum(
        spec.size
        for spec in jax.tree.leaves(models.spec(cfg))
        if spec.trainable and len(spec.axes) - ("layer" in spec.axes) == 1
    )
    embedding = 0 if cfg.tied else cfg.vocab * cfg.hidden
    assert forward_cost(cfg).linear == 2 * (models.count(cfg).active - vectors - embedding)


@pytest.mark.parametrize("name", ["tiny_mla_moe", "tiny_gqa_moe"])
def test_dense_layers_equal_what_xla_counts(name):
    """Without loops, whose bodies XLA counts once: a layer, full attention, no experts."""
    cfg = presets.get(name)
    cfg = replace(cfg, layers=1, dense_layers=1, moe=None)
    seq = 64  # one strip: attention computes the whole square
    params = models.abstract(cfg)
    tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    compiled = jax.jit(models.forward, static_argnums=2).lower(params, tokens, cfg).compile()
    cost = forward_cost(cfg)
    square = 2 * cost.quadratic * seq**2
    counted = compiled.cost_analysis()["flops"]
    assert cost.linear * seq < counted < 1.1 * (cost.linear * seq + square)
