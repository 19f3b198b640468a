"""What a step changes."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from c2 import models


@struct.dataclass
class TrainState:
    """Everything a step changes; a checkpoint holds it and the data iterator."""

    step: jax.Array  # int32 scalar, steps taken
    params: models.Params
    opt_state: Any


def init_state(
    key: jax.Array, cfg: models.ModelConfig, optimizer: optax.GradientTransformation
) -> TrainState:
    """A state at step 0 with random parameters."""
    params = models.init(key, cfg)
    return TrainState(jnp.int32(0), params, optimizer.init(params))
