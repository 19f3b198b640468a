"""Parameter tables: one `ParamSpec` per tensor, from which everything about it is derived.

A model describes its parameters once, as a tree of `ParamSpec` in the same dataclasses that hold
the weights. Initial values, abstract shapes for checkpoints and parameter counts are maps over
that tree, so they can't disagree with each other.
"""

import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ParamSpec:
    """What is known of one tensor before it has values.

    Attributes:
      shape: its shape.
      axes: one logical axis name per dimension ("layer", "embed", "expert", ...), the vocabulary
        that sharding rules speak; the glossary is in WORKSPACE.md.
      fan_in: number of inputs summed into one output; the initial standard deviation of a
        matrix is ``gain / sqrt(fan_in)``.
      gain: multiplies the initial standard deviation.
      init: family of initial values.
      dtype: storage type.
      exact: the model reads it as it is stored; other matrices are cast to the compute dtype
        by the product they are in, so that it makes no difference to cast them earlier.
      trainable: False for values that are updated by a rule of their own instead of a gradient.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: int = 1
    gain: float = 1.0
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: Any = jnp.float32
    exact: bool = False
    trainable: bool = True

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def used_as(self, dtype: Any) -> Any:
        """The type that the forward pass reads this tensor in if it multiplies in ``dtype``.

        To round a parameter to it early changes no result: publishers and engines do.
        """
        matrix = len(self.axes) - ("layer" in self.axes) > 1
        return dtype if matrix and not self.exact else self.dtype


def stack(tree: Any, layers: int) -> Any:
    """The same table with a leading "layer" axis on every tensor, for `jax.lax.scan`."""

    def add_axis(spec: ParamSpec) -> ParamSpec:
        fields = {**spec.__dict__, "shape": (layers, *spec.shape), "axes": ("layer", *spec.axes)}
        return ParamSpec(**fields)

    return jax.tree.map(add_axis, tree)


def init(key: jax.Array, specs: Any) -> Any:
    """Draws initial values for a table of specs.

    The key of each tensor is folded from its path, so adding a parameter to a model never
    changes the initial values of the others.
    """

    def draw(path, spec: ParamSpec) -> jax.Array:
        if spec.init != "normal":
            return getattr(jnp, spec.init)(spec.shape, spec.dtype)
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        values = jax.random.normal(jax.random.fold_in(key, name), spec.shape, jnp.float32)
        return (values * (spec.gain * spec.fan_in**-0.5)).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(draw, specs)


def abstract(specs: Any) -> Any:
    """The table as `jax.ShapeDtypeStruct`s: a checkpoint target, or input of `jax.eval_shape`."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)


def trainable_mask(specs: Any) -> Any:
    """The table as booleans: True where a gradient step may change the tensor."""
    return jax.tree.map(lambda s: s.trainable, specs)


def size(specs: Any) -> int:
    """Number of trainable elements in a table."""
    return sum(s.size for s in jax.tree.leaves(specs) if s.trainable)
