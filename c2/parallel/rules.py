"""Which dimension of a parameter lies over which axes of the mesh, and how it is made whole again.

A rule table maps the logical axes of parameters to axes of the mesh. There is one for each kind of
tensor, and a tensor belongs to exactly one: rules never compete. Vectors are whole on every device;
they are small, and their gradients are summed once a step.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from c2.config import ConfigError
from c2.parallel.mesh import AXES, EXPERTS, REST, MeshConfig, size

Rules = Mapping[str, tuple[str, ...]]

# The expert view: weights of routed experts.
EXPERT_RULES: Rules = {"expert": EXPERTS, "embed": REST}
# The dense view: everything with the width of the residual stream.
DENSE_RULES: Rules = {"embed": AXES}
# Projections up from the latents of attention have no such dimension, and few that divide by a
# thousand: three dimensions share the axes.
LATENT_RULES: Rules = {
    "q_latent": ("data",),
    "kv_latent": ("data",),
    "heads": ("data_ep",),
    "qk": ("context", "context_ep"),
    "kv": ("context", "context_ep"),
}


class Table(Protocol):
    """What is read of an entry of a parameter table (`c2.models.params.ParamSpec`)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    exact: bool


def is_vector(spec: Table) -> bool:
    """Whether a tensor is a vector, or a stack of vectors."""
    return sum(axis != "layer" for axis in spec.axes) < 2


def is_routed(spec: Table) -> bool:
    """Whether a tensor holds matrices of routed experts."""
    return not is_vector(spec) and next(a for a in spec.axes if a != "layer") == "expert"


def partition(spec: Table, cfg: MeshConfig, mesh: Mesh) -> PartitionSpec:
    """How one parameter lies on the mesh.

    Raises:
      ConfigError: if a dimension does not divide over its axes, with the numbers.
    """
    if is_vector(spec):
        return PartitionSpec()
    if is_routed(spec):
        rules = EXPERT_RULES
    else:
        rules = DENSE_RULES if "embed" in spec.axes else LATENT_RULES
    if cfg.weights == "replicated":
        rules = {"expert": EXPERTS} if is_routed(spec) else {}
    return _resolve(spec, rules, mesh)


def _resolve(spec: Table, rules: Rules, mesh: Mesh) -> PartitionSpec:
    chosen = [rules.get(axis, ()) for axis in spec.axes]
    used = sum(chosen, ())
    if len(set(used)) < len(used):
        raise ConfigError(
            f"mesh: the rules {dict(rules)} give an axis to two dimensions of {spec.axes}"
        )
    for length, axis, over in zip(spec.shape, spec.axes, chosen, strict=True):
        if length % size(mesh, over):
            lengths = " x ".join(f"{name} {mesh.shape[name]}" for name in over)
            raise ConfigError(
                f"mesh: {axis} = {length} of a parameter {spec.axes} does not divide over {lengths}"
            )
    return PartitionSpec(*(over or None for over in chosen))


def _axes(partition: PartitionSpec) -> list[tuple[str, ...]]:
    """Axes of the mesh over which each dimension lies."""
    return [
        entry if isinstance(entry, tuple) else (entry,) * (entry is not None) for entry in partition
    ]


def unshard(params: Any, specs: Any, cfg: MeshConfig, mesh: Mesh, dtype: Any) -> Any:
    """Gathers parameters from all devices, inside a manual region, where they are used.

    They travel in the type in which products are computed, and their gradients come back summed in
    f32 and scattered. Routed experts stay with their ranks.

    Args:
      params: this device's pieces.
      specs: their table, of the same structure.
      cfg: what lies where.
      mesh: the mesh.
      dtype: of products.
    """

    def whole(x: jax.Array, spec: Table) -> jax.Array:
        over = _axes(partition(spec, cfg, mesh))
        if is_routed(spec):
            over[0] = ()
        gathers = tuple(
            (dim, axes)
            for dim, all_axes in enumerate(over)
            for axes in _two_steps(all_axes)
            if size(mesh, axes) > 1
        )
        if not gathers:
            return x
        return _gather(x, (x.dtype, x.dtype if spec.exact else jnp.dtype(dtype)), gathers)

    return jax.tree.map(whole, params, specs)


def _two_steps(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Groups of axes to gather over one after another, the minor ones first.

    XLA's TPU compiler makes an all-reduce, of twice the traffic, of a gather or scatter over a
    whole slice; the data axis alone is not the whole slice where there is another.
    """
    return [tuple(axis for axis in axes if axis != "data"), ("data",) * ("data" in axes)]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x, dtypes, gathers):
    x = x.astype(dtypes[1])
    for dim, axes in gathers:
        gathered = jax.lax.all_gather(_flat(x, dim), axes, axis=dim, tiled=True)
        x = gathered.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    return x


def _gather_forward(x, dtypes, gathers):
    return _gather(x, dtypes, gathers), None


def _gather_backward(dtypes, gathers, _, d_whole):
    d = d_whole.astype(jnp.float32)
    for dim, axes in reversed(gathers):
        scattered = jax.lax.psum_scatter(_flat(d, dim), axes, scatter_dimension=dim, tiled=True)
        d = scattered.reshape(*d.shape[:dim], -1, *d.shape[dim + 1 :])
    return (d.astype(dtypes[0]),)


_gather.defvjp(_gather_forward, _gather_backward)


def _flat(x: jax.Array, dim: int) -> jax.Array:
    """Merges the dimensions behind ``dim``.

    XLA's TPU compiler scatters what is wide behind the scattered dimension; of a dimension of 2
    there, as in SwiGLU's weights, it would make an all-reduce.
    """
    after = math.prod(x.shape[dim + 1 :])
    return x.reshape(*x.shape[: dim + 1], *[after] * (after > 1))


def sum_gradients(grads: Any, partitions: Any) -> Any:
    """Adds gradients over the devices among which their parameters are not divided.

    Over the others the sum is already taken, by `unshard` and by the exchange with experts.
    """

    def total(grad: jax.Array, spec: PartitionSpec) -> jax.Array:
        divided = sum(_axes(spec), ())
        return jax.lax.psum(grad, tuple(axis for axis in AXES if axis not in divided))

    return jax.tree.map(total, grads, partitions)
