"""The decoder: parameter counts, extension points, route replay and rematerialisation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2 import models
from c2.models import blocks, mla, moe, params, presets

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run once or twice


# Derived by hand from the published shapes; equal to the unit to transformers' own count.
@pytest.mark.parametrize(
    ("name", "total", "active", "mtp"),
    [
        ("kimi_k2", 1_026_408_209_408, 32_861_477_888, 17_162_146_816),
        ("kimi_k25", 1_026_408_209_408, 32_861_477_888, 17_162_146_816),
        ("deepseek_v3", 671_026_404_352, 37_552_282_624, 11_610_067_968),
        ("qwen3_30b_a3b", 30_532_122_624, 3_353_032_704, 631_515_392),
        ("smollm2_135m", 134_515_008, 134_515_008, 4_205_376),
    ],
)
def test_counts_of_published_models(name, total, active, mtp):
    assert models.count(presets.get(name)) == (total, active, mtp)


@pytest.mark.parametrize(
    ("name", "attention", "mixture", "mixture_active", "biases"),
    [
        ("kimi_k25", 101_124_096, 16_958_226_432, 399_114_240, 23_040),
        ("deepseek_v3", 187_107_328, 11_320_164_352, 398_196_736, 14_848),
    ],
)
def test_counts_of_published_layers(name, attention, mixture, mixture_active, biases):
    cfg = presets.get(name)
    block = models.spec(cfg).moe
    routed = block.moe.gate_up.size + block.moe.down.size
    one_expert = routed // cfg.moe_layers // cfg.moe.experts
    assert one_expert == 44_040_192
    assert params.size(block.attention) == cfg.moe_layers * attention
    assert params.size(block.moe) == cfg.moe_layers * mixture
    assert mixture - (cfg.moe.experts - cfg.moe.top_k) * one_expert == mixture_active
    assert block.moe.bias.size == biases


@pytest.mark.parametrize("name", ["tiny_mla_moe", None])
def test_count_is_the_number_of_elements_that_init_makes(name, tiny_config):
    cfg = presets.get(name) if name else tiny_config
    made = jax.eval_shape(lambda: models.init(jax.random.key(0), cfg))
    elements = sum(leaf.size for leaf in jax.tree.leaves(made))
    count = models.count(cfg)
    assert count.total == elements - made.moe.moe.bias.size
    idle_share = 1 - cfg.moe.top_k / cfg.moe.experts
    routed = made.moe.moe.gate_up.size + made.moe.moe.down.size
    assert count.active == count.total - idle_share * routed


@pytest.fixture(scope="module")
def world(tiny_config, random_params, packed_rows):
    """Parameters, a packed batch with padding, and a compiled forward that replays routes."""
    batch = packed_rows([[9, 14], [20], [3, 3, 16]], 24, tiny_config.vocab)
    inputs = {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}

    def run(cfg=tiny_config, **extensions):
        @jax.jit
        def compiled(p, routes=None):
            return models.forward(p, batch["tokens"], cfg, **inputs, routes=routes, **extensions)

        return compiled

    p = random_params(tiny_config)
    forward = run()
    return p, batch, run, forward, forward(p)


def test_output_shapes(world, tiny_config):
    _, batch, _, _, out = world
    real = batch["segment_ids"] > 0
    m = tiny_config.moe
    assert out.logits.shape == (3, 24, 61) and out.logits.dtype == jnp.float32
    assert out.hidden.shape == (3, 24, 32) and out.hidden.dtype == jnp.float32
    assert out.routes.shape == (3, 24, 2, m.top_k) and out.routes.dtype == jnp.int16
    routes = np.asarray(out.routes)
    assert (routes[~real] == moe.NO_TOKEN).all()
    assert ((routes[real] >= 0) & (routes[real] < m.experts)).all()
    counted = [[(routes[:, :, layer] == e).sum() for e in range(m.experts)] for layer in (0, 1)]
    assert out.metrics["expert_load"].tolist() == counted


def test_replaying_own_routes_changes_no_bit(world):
    p, _, _, forward, out = world
    again = forward(p, out.routes)
    np.testing.assert_array_equal(again.routes, out.routes)
    np.testing.assert_array_equal(again.logits, out.logits)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_replay_changes_no_bit_while_training(world, tiny_config, remat):
    p, batch, _, _, out = world
    cfg = replace(tiny_config, remat=remat)
    inputs = {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}

    def loss(p, routes):
        logits = models.forward(p, batch["tokens"], cfg, routes=routes, **inputs).logits
        return jnp.square(logits).mean(), logits

    train = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=FAST_COMPILE)
    nothing = np.full(out.routes.shape, moe.OWN_ROUTE, np.int16)
    (_, own), own_grads = train(p, nothing)
    (_, replayed), grads = train(p, out.routes)
    np.testing.assert_array_equal(own, replayed)
    jax.tree.map(np.testing.assert_array_equal, own_grads, grads)
    assert np.asarray(grads.moe.moe.router).any()


def test_replaying_other_routes_changes_the_result(world, tiny_config):
    p, batch, _, forward, out = world
    real = batch["segment_ids"] > 0
    routes = np.asarray(out.routes).copy()
    given = np.where(routes >= 0, (routes + 1) % tiny_config.moe.experts, routes)
    other = forward(p, given)
    np.testing.assert_array_equal(other.routes, given)
    changed = (np.asarray(other.logits) != out.logits).any(-1)
    assert changed[real].all()


def test_rows_without_captured_route_take_their_own(world):
    p, batch, _, forward, out = world
    real = batch["segment_ids"] > 0
    nothing = np.where(real[..., None, None], moe.OWN_ROUTE, np.asarray(out.routes))
    np.testing.assert_array_equal(forward(p, nothing).logits, out.logits)
    # one captured slot of three is no route either
    some = np.asarray(out.routes).copy()
    some[0, ::2, :, 1] = moe.OWN_ROUTE
    some[1, :, 0] = moe.OWN_ROUTE
    some[~real] = moe.NO_TOKEN
    np.testing.assert_array_equal(forward(p, some).logits, out.logits)


def test_own_attention_and_experts_take_the_place_of_the_built_in(world):
    p, _, run, forward, out = world

    def doubled(x, layer, info, cfg, past):
        mixed, entry = mla.attention(x, layer, info, cfg, past)
        return 2 * mixed, entry

    def halved(x, layer, real, routes, cfg):
        mixed, used = moe.moe(x, layer, real, routes, cfg)
        return 0.5 * mixed, used

    extended = run(attention=doubled, experts=halved)(p)

    # powers of two commute with rounding, so scaling the output matrices is the same to the bit
    def scaled(layer):
        attention = layer.attention
        layer = layer.replace(attention=attention.replace(out=2 * attention.out))
        if isinstance(layer, blocks.DenseLayer):
            return layer
        block, shared = layer.moe, layer.moe.shared
        shared = shared.replace(down=shared.down / 2)
        return layer.replace(moe=block.replace(down=block.down / 2, shared=shared))

    by_weights = forward(p.replace(dense=scaled(p.dense), moe=scaled(p.moe)))
    np.testing.assert_array_equal(extended.logits, by_weights.logits)
    assert (np.asarray(extended.logits) != out.logits).any()


def test_a_model_may_be_all_dense_or_all_mixture(world, tiny_config):
    p, _, run, _, _ = world
    dense = jax.eval_shape(run(replace(tiny_config, layers=1)), p.replace(moe=None))
    assert dense.routes.shape == (3, 24, 0, 3) and dense.metrics["expert_load"].shape == (0, 8)
    assert dense.logits.shape == (3, 24, 61)
    mixture = run(replace(tiny_config, dense_layers=0, layers=2))
    assert jax.eval_shape(mixture, p.replace(dense=None)).routes.shape == (3, 24, 2, 3)


def test_the_config_chooses_the_kernels(tiny_config):
    """Lowered for a TPU: attention of both stacks, two products of the experts; their gradients."""
    cfg = replace(tiny_config, dtype="bfloat16", kernels="tpu")

    def loss(p, tokens):
        return models.forward(p, tokens, cfg).logits.sum()

    args = models.abstract(cfg), jax.ShapeDtypeStruct((1, 256), jnp.int32)
    for f, calls in ((loss, 2 + 2), (jax.grad(loss), 2 * 3 + 2 * 3)):
        text = jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == calls
    xla = replace(cfg, kernels="xla")
    text = jax.jit(models.forward, static_argnums=2).trace(*args, xla)
    assert "tpu_custom_call" not in text.lower(lowering_platforms=("tpu",)).as_text()
