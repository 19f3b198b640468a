"""Building blocks shared by all layers: projection, RMS norm and the dense SwiGLU block."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from c2.models.params import ParamSpec


def project(x: jax.Array, w: jax.Array, contract: int = 1) -> jax.Array:
    """Multiplies the last ``contract`` axes of ``x`` with the first of ``w``, in ``x.dtype``.

    Both are flattened to matrices first: a plain GEMM is what every backend runs fastest.
    """
    lead, inner = x.shape[: x.ndim - contract], math.prod(w.shape[:contract])
    rows, matrix = x.reshape(-1, inner), w.astype(x.dtype).reshape(inner, -1)
    if w.ndim == 2:
        return (rows @ matrix).reshape(*lead, -1)
    # XLA's TPU compiler undoes reshapes around a product and makes a convolution over heads of it,
    # in minutes; barriers, in both passes, keep it a product of matrices.
    rows, matrix = jax.lax.optimization_barrier((rows, matrix))
    out = jax.lax.optimization_barrier(rows @ matrix)
    return out.reshape(*lead, *w.shape[contract:])


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in f32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale).astype(x.dtype)


@struct.dataclass
class MLP:
    """A SwiGLU feed-forward block."""

    gate_up: jax.Array  # [embed, 2, ffw], gate first
    down: jax.Array  # [ffw, embed]


def mlp_spec(embed: int, ffw: int, gain_out: float) -> MLP:
    """Parameter table of a SwiGLU block."""
    return MLP(
        gate_up=ParamSpec((embed, 2, ffw), ("embed", "gate_up", "ffw"), fan_in=embed),
        down=ParamSpec((ffw, embed), ("ffw", "embed"), fan_in=ffw, gain=gain_out),
    )


def mlp(x: jax.Array, p: MLP) -> jax.Array:
    """Computes ``down(silu(gate x) * up x)`` for x [..., embed]."""
    gate_up = project(x, p.gate_up)
    return project(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], p.down)


def norm_spec(features: int, axis: str = "embed") -> ParamSpec:
    """Parameter table entry of an RMS norm scale."""
    return ParamSpec((features,), (axis,), init="ones")
