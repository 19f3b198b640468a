"""What is published against what the trainer's forward pass rounds to."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from c2 import models
from c2.config import ConfigError
from c2.weights import serving
from c2.weights.manifest import MismatchError
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.shards import wants, whole
from c2.weights.store import open_store
from c2.weights.subscriber import Subscriber
from pallas_kernels import nvfp4
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.nvfp4 import reference


@pytest.fixture
def config(tiny_config):
    return dataclasses.replace(tiny_config, layers=2, dtype="bfloat16", mtp=1)


def published(store, params):
    """What a subscriber holds of parameters after a delta."""
    want = wants(jax.eval_shape(lambda: params))
    with Publisher(store, PublisherConfig(), owner="test") as publisher:
        publisher.publish(
            0, whole({name: np.zeros(x.shape, x.dtype) for name, x in params.items()})
        )
        publisher.publish(1, whole(params))
    subscriber = Subscriber(store, want)
    subscriber.poll()
    return subscriber.current.tensors


def test_the_forward_pass_is_that_of_the_published_numbers(config, random_params, tmp_path):
    """One program, so that nothing but the numbers can make a difference."""
    config = dataclasses.replace(config, layers=1, dense_layers=0, mtp=0)
    masters = random_params(config)
    form = serving.make_serving_form(models.spec(config), config.dtype)
    tensors = published(open_store(str(tmp_path)), form(masters))
    served = serving.restore(tensors, models.spec(config))
    assert served.head.dtype == served.moe.moe.gate_up.dtype == jnp.bfloat16
    assert served.norm.dtype == served.moe.moe.router.dtype == jnp.float32
    tokens = jnp.arange(12).reshape(2, 6)
    forward = jax.jit(models.forward, static_argnums=2)
    trainer = forward(masters, tokens, config)
    engine = forward(jax.tree.map(lambda x: x.astype(jnp.float32), served), tokens, config)
    assert trainer.logits.tobytes() == engine.logits.tobytes()
    assert trainer.routes.tobytes() == engine.routes.tobytes()


def test_rounding_is_to_nearest_even_and_keeps_what_is_used_in_f32(config, random_params):
    masters = random_params(config)
    tensors = serving.make_serving_form(models.spec(config), config.dtype)(masters)
    head = np.asarray(masters.head).astype(ml_dtypes.bfloat16)
    assert np.asarray(tensors["head"]).tobytes() == head.tobytes()
    layer = np.asarray(masters.moe.moe.gate_up)[0].astype(ml_dtypes.bfloat16)
    assert np.asarray(tensors["moe.moe.gate_up.0"]).tobytes() == layer.tobytes()
    for name in ("norm", "moe.moe.router.0", "moe.moe.bias.0", "moe.attention.kv_norm.0"):
        assert tensors[name].dtype == jnp.float32, name


@pytest.fixture(scope="module")
def with_nvfp4(tiny_config, random_params):
    """The parameter table, masters of a model with NVFP4 experts, and what is published."""
    moe = dataclasses.replace(tiny_config.moe, intermediate=32, precision="nvfp4_fwd_mxfp8_bwd")
    config = dataclasses.replace(tiny_config, layers=2, dtype="bfloat16", moe=moe)
    specs, masters = models.spec(config), random_params(config)
    return specs, masters, serving.make_serving_form(specs, "bfloat16", "nvfp4")(masters)


def test_nvfp4_bytes_are_those_of_the_reference(with_nvfp4):
    _, masters, tensors = with_nvfp4
    for field, axes in (("gate_up", (0, 2, 3, 1)), ("down", (0, 2, 1))):
        matrix = np.asarray(getattr(masters.moe.moe, field))[0].transpose(axes)
        matrix = matrix.reshape(len(matrix), -1, matrix.shape[-1]).astype(ml_dtypes.bfloat16)
        expected = reference.quantize(matrix, "token")
        for part, value in zip(nvfp4.NVFP4._fields, expected, strict=True):
            ours = np.asarray(tensors[f"moe.moe.{field}.0.{part}"])
            assert ours.tobytes() == np.asarray(value).tobytes(), (field, part)
    assert "moe.moe.gate_up.0" not in tensors


@pytest.mark.slow  # compiles quantisers for a quarter of a minute
def test_grouped_matmul_multiplies_the_published_nvfp4_numbers(with_nvfp4):
    """Rows with a single one in them read the matrix out of the trainer's product."""
    specs, masters, tensors = with_nvfp4
    gate_up = masters.moe.moe.gate_up[0]
    experts, inner = gate_up.shape[:2]
    rows = jnp.tile(jnp.eye(inner, dtype=jnp.bfloat16), (experts, 1))
    sizes = jnp.full(experts, inner, jnp.int32)
    matrix = gate_up.reshape(experts, inner, -1)
    used = grouped_matmul(rows, matrix, sizes, precision="nvfp4").reshape(matrix.shape)
    served = serving.restore(tensors, specs).moe.moe.gate_up
    ours = nvfp4.dequantize(jax.tree.map(lambda x: x[0], served)).swapaxes(1, 2)
    np.testing.assert_allclose(used.astype(jnp.float32), ours, rtol=2**-8)
    assert np.mean(ours == 0) < 0.2  # zeros are equal without any rounding being right


def test_parameters_may_be_donated_while_they_are_published(config, random_params, tmp_path):
    masters = random_params(config)
    expected = jax.tree.map(np.array, masters)
    form = serving.make_serving_form(models.spec(config), "float32")  # nothing needs rounding
    with Publisher(open_store(str(tmp_path)), PublisherConfig(), owner="test") as publisher:
        publisher.publish(0, whole(form(masters)))
        jax.jit(lambda p: jax.tree.map(lambda x: x * 0, p), donate_argnums=0)(masters)
        publisher.wait()
    assert masters.norm.is_deleted()
    subscriber = Subscriber(open_store(str(tmp_path)), wants(form(expected)))
    subscriber.poll()
    served = serving.restore(subscriber.current.tensors, models.spec(config))
    jax.tree.map(np.testing.assert_array_equal, served, expected)


def test_missing_and_unknown_tensors_are_named(config, random_params):
    specs = models.spec(config)
    tensors = serving.make_serving_form(specs, "bfloat16")(random_params(config))
    with pytest.raises(MismatchError, match=r"dense\.mlp\.down\.0: missing"):
        serving.restore({n: x for n, x in tensors.items() if n != "dense.mlp.down.0"}, specs)
    with pytest.raises(MismatchError, match=r"unknown to this model: extra"):
        serving.restore({**tensors, "extra": tensors["norm"]}, specs)


def test_other_forms_of_experts_are_refused(config):
    with pytest.raises(ConfigError, match="experts: 'fp4'; legal: native, nvfp4"):
        serving.make_serving_form(models.spec(config), "bfloat16", "fp4")
