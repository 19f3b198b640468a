"""The form in which weights are published: the numbers that the trainer's forward pass uses.

The trainer keeps f32 masters and rounds them where they are multiplied; an engine that gets the
rounded numbers computes with the same ones (report section 6.1: the forward pass must match
inference). `ParamSpec.used_as` says what is rounded: matrices are, but for routers; norms and
selection biases are not.

    form = make_serving_form(specs, cfg.dtype, mesh=mesh)       # the trainer, once
    publisher.publish(step, devices.parts(form(state.params)))  # every rank, after a step
    subscriber = Subscriber(store, wanted(specs, cfg.dtype))    # an engine
    params = restore(subscriber.current.tensors, specs)
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from c2.config import ConfigError
from c2.weights.devices import spread
from c2.weights.manifest import MismatchError
from c2.weights.shards import Want, wants
from pallas_kernels import nvfp4

Experts = Literal["native", "nvfp4"]


def experts_for(precision: str) -> Experts:
    """How the routed experts of a model with this `MoEConfig.precision` are published."""
    return "nvfp4" if precision == "nvfp4_fwd_mxfp8_bwd" else "native"


def make_serving_form(
    specs: Any, dtype: str, experts: Experts = "native", *, mesh: Mesh | None = None
) -> Callable[[Any], dict[str, jax.Array]]:
    """Builds the function that turns master parameters into what is published.

    Args:
      specs: the parameter table, a tree of `ParamSpec`s as of `c2.models.spec`.
      dtype: in which the forward pass multiplies, the model's ``dtype``.
      experts: "nvfp4" publishes the routed experts' matrices as codes and scales, the bytes that
        the grouped matmul makes of them in the precision "nvfp4_fwd_mxfp8_bwd".
      mesh: where parameters lie; rows are spread over it, so that every device has a share.

    Returns:
      A jitted function of the parameters. Its result has a tensor per layer, named by the path
      and, where layers are stacked, the layer: ``moe.attention.q_up.3``. An NVFP4 matrix
      [expert, in, ...] is ``NAME.codes`` uint8 [expert, out, in / 2] with ``NAME.block_scales``
      and ``NAME.outer_scale``, quantised along the axis that is summed over. Rows, experts in the
      latter case, can be shared among ranks, see `devices`. All arrays are fresh: the parameters
      may be donated to the next step at once.

    Raises:
      ConfigError: for another ``experts``.
    """
    if experts not in ("native", "nvfp4"):
        raise ConfigError(f"experts: {experts!r}; legal: native, nvfp4")
    paths, _ = jax.tree_util.tree_flatten_with_path(specs)

    def serving_form(params: Any) -> dict[str, jax.Array]:
        tensors = {}
        for (path, spec), leaf in zip(paths, jax.tree.leaves(params), strict=True):
            stacked = spec.axes[:1] == ("layer",)
            for field, values in _fields(rounded(spec, leaf, dtype, experts)).items():
                layers = {f".{i}": x for i, x in enumerate(values)} if stacked else {"": values}
                tensors |= {f"{_name(path)}{i}{field}": x for i, x in layers.items()}
        # without the copy, jit would hand out f32 parameters themselves, soon to be donated
        return jax.tree.map(jnp.copy, tensors)

    if mesh is None:
        return jax.jit(serving_form)
    shapes = jax.eval_shape(serving_form, _abstract(specs))
    return jax.jit(serving_form, out_shardings=jax.tree.map(lambda x: spread(x, mesh), shapes))


def wanted(specs: Any, dtype: str, experts: Experts = "native") -> dict[str, Want]:
    """All that a function of `make_serving_form` publishes, for a subscriber that serves it."""
    return wants(jax.eval_shape(make_serving_form(specs, dtype, experts), _abstract(specs)))


def restore(tensors: Mapping[str, np.ndarray], specs: Any) -> Any:
    """The parameter tree out of what was published, for an engine.

    Args:
      tensors: from `c2.weights.subscriber.Snapshot`.
      specs: the parameter table.

    Returns:
      A tree like ``specs`` with layers stacked. An NVFP4 matrix is a `pallas_kernels.nvfp4.NVFP4`
      of [layer, expert, out, in].

    Raises:
      MismatchError: for tensors that are missing or left over.
    """
    left = dict(tensors)

    def take(name: str) -> jax.Array:
        try:
            return jnp.asarray(left.pop(name))
        except KeyError:
            raise MismatchError(f"{name}: missing in this version") from None

    def layer(name: str) -> jax.Array | nvfp4.NVFP4:
        if f"{name}.codes" not in left:
            return take(name)
        return nvfp4.NVFP4(*(take(f"{name}.{field}") for field in nvfp4.NVFP4._fields))

    def tensor(path: tuple, spec: Any) -> jax.Array | nvfp4.NVFP4:
        if spec.axes[:1] != ("layer",):
            return layer(_name(path))
        layers = [layer(f"{_name(path)}.{i}") for i in range(spec.shape[0])]
        return jax.tree.map(lambda *x: jnp.stack(x), *layers)

    tree = jax.tree_util.tree_map_with_path(tensor, specs)
    if left:
        raise MismatchError(f"unknown to this model: {', '.join(sorted(left)[:5])} ({len(left)})")
    return tree


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _abstract(specs: Any) -> Any:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)


def rounded(spec: Any, values: jax.Array, dtype: str, experts: Experts) -> jax.Array | nvfp4.NVFP4:
    """One tensor, or a stack of layers, as it is published; arguments as of `make_serving_form`."""
    axes = [axis for axis in spec.axes if axis != "layer"]
    if experts == "native" or axes[:1] != ["expert"] or len(axes) == 1:
        return values.astype(spec.used_as(dtype))
    lead = values.ndim - len(axes) + 2  # with expert and the axis that is summed over
    matrix = values.astype(jnp.bfloat16).reshape(*values.shape[:lead], -1).swapaxes(-1, -2)
    return nvfp4.quantize(matrix)


def _fields(values: jax.Array | nvfp4.NVFP4) -> dict[str, jax.Array]:
    """The arrays of a tensor by suffix of name."""
    if not isinstance(values, nvfp4.NVFP4):
        return {"": values}
    return {f".{field}": part for field, part in values._asdict().items()}
