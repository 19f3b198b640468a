"""Decoding with a cache against one pass over the whole sequence."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.models import GQAConfig, mla, rope
from c2.models.cache import Tokens

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
LENGTHS = np.array([70, 33, 1])
ROWS, SEQ, CAPACITY = len(LENGTHS), 70, 80


@pytest.fixture(scope="module", params=["mla", "mla_without_q_lora", "gqa"])
def world(request, tiny_config, random_params):
    """A model, sequences of unequal length and the result of one pass over them."""
    attention = {
        "mla": tiny_config.attention,
        "mla_without_q_lora": replace(tiny_config.attention, q_lora=None),
        "gqa": GQAConfig(heads=4, kv_heads=2, head_dim=8, qk_norm=True),
    }[request.param]
    layout = "halves" if request.param == "gqa" else "neighbours"
    cfg = replace(tiny_config, attention=attention, rope=replace(tiny_config.rope, layout=layout))
    p = random_params(cfg)
    tokens = np.random.default_rng(0).integers(cfg.vocab, size=(ROWS, SEQ)).astype(np.int32)
    real = (np.arange(SEQ) < LENGTHS[:, None]).astype(np.int32)
    whole = jax.jit(models.forward, static_argnames="cfg", compiler_options=FAST_COMPILE)(
        p, tokens, cfg, segment_ids=real
    )

    @cache
    def step(routes_given: bool):
        def run(p, tokens, real, past, routes=None):
            given = routes if routes_given else None
            return models.forward(p, tokens, cfg, segment_ids=real, cache=past, routes=given)

        return jax.jit(run, donate_argnums=3, compiler_options=FAST_COMPILE)

    return cfg, p, tokens, whole, step


def decode(world, sizes, *, left=False, routes=None, capacity=CAPACITY):
    """Feeds ``sizes`` tokens at a time; a row that has ended, or has fewer left, is padded.

    Returns:
      Logits and routes of the real tokens, one array per row, and the cache.
    """
    cfg, p, tokens, _, step = world
    past = models.init_cache(cfg, ROWS, capacity)
    garbage = np.random.default_rng(1)
    logits, used = [[] for _ in LENGTHS], [[] for _ in LENGTHS]
    fed = np.zeros(ROWS, int)
    for size in sizes:
        chunk = garbage.integers(cfg.vocab, size=(ROWS, size)).astype(np.int32)
        real = np.zeros((ROWS, size), np.int32)
        given = np.full((ROWS, size, cfg.moe_layers, cfg.moe.top_k), -2, np.int16)
        where = []
        for row, length in enumerate(LENGTHS):
            count = min(size, length - fed[row])
            here = slice(size - count, size) if left else slice(0, count)
            there = slice(fed[row], fed[row] + count)
            chunk[row, here], real[row, here] = tokens[row, there], 1
            if routes is not None:
                given[row, here] = routes[row, there]
            where.append(here)
            fed[row] += count
        out = step(routes is not None)(p, chunk, real, past, given)
        past = out.cache
        for row, here in enumerate(where):
            logits[row].append(np.asarray(out.logits[row, here]))
            used[row].append(np.asarray(out.routes[row, here]))
    assert (fed == LENGTHS).all()
    return [np.concatenate(x) for x in logits], [np.concatenate(x) for x in used], past


def assert_equal_to_whole(world, logits, routes):
    whole = world[3]
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row], whole.logits[row, :length], atol=1e-5)
        np.testing.assert_array_equal(routes[row], whole.routes[row, :length])


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([1] * 70, id="token by token"),
        pytest.param([7] * 10, id="chunks of 7"),
        pytest.param([64] + [1] * 6, id="prefill of 64, then tokens"),
    ],
)
def test_cached_equals_one_pass(world, sizes):
    logits, routes, past = decode(world, sizes)
    assert_equal_to_whole(world, logits, routes)
    np.testing.assert_array_equal(past.length, LENGTHS)


def test_padding_may_stand_on_the_left(world):
    logits, routes, _ = decode(world, [7] * 10, left=True)
    assert_equal_to_whole(world, logits, routes)


def test_routes_go_in_while_decoding(world):
    """Replaying other routes than the model's own gives what replaying them in one pass gives."""
    cfg, p, tokens, whole, _ = world
    real = np.arange(SEQ) < LENGTHS[:, None]
    own = np.asarray(whole.routes)
    given = np.where(own >= 0, (own + 1) % cfg.moe.experts, own)
    exact = jax.jit(models.forward, static_argnames="cfg", compiler_options=FAST_COMPILE)(
        p, tokens, cfg, segment_ids=real.astype(np.int32), routes=given
    )
    logits, used, _ = decode(world, [7] * 10, routes=given)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(used[row], given[row, :length])
        np.testing.assert_allclose(logits[row], exact.logits[row, :length], atol=1e-5)


def test_what_does_not_fit_is_not_stored_but_counted(world):
    """And harms neither the row's earlier tokens nor other rows."""
    *_, small = decode(world, [7] * 10, capacity=40)
    *_, large = decode(world, [7] * 10)
    np.testing.assert_array_equal(small.length, LENGTHS)  # row 0: 70 > 40, so it is seen
    for a, b in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True):
        if a.ndim > 1:
            np.testing.assert_allclose(a[:, 1:], b[:, 1:, :40], atol=1e-5)
    # the first layer's entries depend on the token alone, so that those of row 0 are the same
    first_small, first_large = (jax.tree.leaves(c.dense)[0][0, 0, :40] for c in (small, large))
    np.testing.assert_allclose(first_small, first_large, atol=1e-6)


def test_a_latent_is_all_that_is_kept():
    """576 numbers per token and layer for Kimi K2.5, against 20,480 of keys and values."""
    cfg = models.presets.get("kimi_k25")
    held = jax.eval_shape(lambda: models.init_cache(cfg, 3, 5))
    assert held.dense.shape == (1, 3, 5, 576) and held.moe.shape == (60, 3, 5, 576)
    assert held.moe.dtype == jnp.bfloat16


def test_absorbed_weights_equal_expanded_keys_and_values(tiny_config, random_params):
    layer = jax.tree.map(lambda x: x[0], random_params(tiny_config).dense.attention)
    x = np.random.default_rng(2).normal(size=(2, 12, tiny_config.hidden)).astype(np.float32)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    segments = jnp.asarray([[1] * 12, [1] * 8 + [0] * 4])
    angles = rope.tables(positions, tiny_config.rope, tiny_config.attention.rotary)
    expanded, nothing = mla.attention(
        x, layer, Tokens(*angles, positions, segments), tiny_config, None
    )
    empty = jnp.zeros((2, 0, *mla.cache_entry(tiny_config).shape))
    tokens = Tokens(*angles, positions, segments, jnp.zeros(2, jnp.int32))
    absorbed, entries = mla.attention(x, layer, tokens, tiny_config, empty)
    real = np.asarray(segments) > 0
    np.testing.assert_allclose(absorbed[real], expanded[real], atol=2e-6)
    assert nothing is None and entries.shape == (2, 12, 28)
