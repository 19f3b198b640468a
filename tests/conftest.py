"""What all tests share: full-precision matmuls on a CPU, one small model, hand-made packed rows."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported; subprocesses inherit it

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from c2 import models
from c2.models import MLAConfig, ModelConfig, MoEConfig, RopeConfig, YarnConfig

jax.config.update("jax_default_matmul_precision", "highest")
# a background job ignores Ctrl-C, and so would the children that tests send it to
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Every part of the architecture, with unequal sizes so that mixed-up axes can't go unseen."""
    return ModelConfig(
        vocab=61,
        hidden=32,
        layers=3,
        dense_layers=1,
        dense_intermediate=48,
        attention=MLAConfig(heads=2, q_lora=24, kv_lora=20, nope=12, rope=8, v=10),
        moe=MoEConfig(experts=8, top_k=3, intermediate=16, groups=4, top_groups=2, scale=2.5),
        # short enough for YaRN to bend several of the four frequencies
        rope=RopeConfig(theta=100.0, yarn=YarnConfig(factor=4.0, original_context=16)),
    )


@pytest.fixture(scope="session")
def random_params():
    """Parameters in which nothing is neutral: random norm scales, selection biases below -1.

    Queries are small: sharp attention would amplify rounding beyond the tolerances we want. Drawn
    with numpy, which unlike `c2.models.init` needs no compilation.
    """

    def build(cfg: ModelConfig, seed: int = 0) -> models.Params:
        rng = np.random.default_rng(seed)

        def draw(spec):
            gain = spec.gain * (0.4 if "qk" in spec.axes else 1.0)
            values = {
                "normal": lambda: rng.normal(size=spec.shape) * gain * spec.fan_in**-0.5,
                "ones": lambda: rng.uniform(0.5, 1.5, spec.shape),
                "zeros": lambda: rng.uniform(-1.6, -1.2, spec.shape),
            }[spec.init]()
            return jnp.asarray(values, spec.dtype)

        return jax.tree.map(draw, models.spec(cfg))

    return build


@pytest.fixture(scope="session")
def packed_rows():
    """Builds a batch from the lengths of the documents in each row, with random tokens."""

    def build(rows: list[list[int]], seq: int, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        shape = (len(rows), seq)
        integers = ("tokens", "targets", "positions", "segment_ids")
        batch = {name: np.zeros(shape, np.int32) for name in integers}
        batch["loss_mask"] = np.zeros(shape, np.float32)
        for row, lengths in enumerate(rows):
            start = 0
            for segment, length in enumerate(lengths, start=1):
                here = slice(start, start + length)
                tokens = rng.geometric(0.1, size=length) % vocab  # few are frequent, as in text

                batch["tokens"][row, here] = tokens
                batch["targets"][row, here] = np.append(tokens[1:], 0)
                batch["positions"][row, here] = np.arange(length)
                batch["segment_ids"][row, here] = segment
                batch["loss_mask"][row, start : start + length - 1] = 1
                start += length
            assert start <= seq
        return batch

    return build
