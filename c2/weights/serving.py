"""The form in which weights are published: the numbers that the trainer's forward pass uses.

The trainer keeps f32 masters and rounds them where they are multiplied; an engine that gets the
rounded numbers computes with the same ones (report section 6.1: the forward pass must match
inference). What is used in f32 - norms, routers, selection biases - stays f32.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError
from c2.weights.manifest import MismatchError
from pallas_kernels import nvfp4

Experts = Literal["native", "nvfp4"]

_IN_F32 = (("embed", "expert"),)  # axes of the router's matrix, see `c2.models.moe.score`


def make_serving_form(
    specs: Any, dtype: str, experts: Experts = "native"
) -> Callable[[Any], dict[str, jax.Array]]:
    """Builds the function that turns master parameters into what is published.

    Args:
      specs: the parameter table, a tree of `ParamSpec`s as of `c2.models.spec`.
      dtype: in which the forward pass multiplies, the model's ``dtype``.
      experts: "nvfp4" publishes the routed experts' matrices as codes and scales, the bytes that
        the grouped matmul makes of them in the precision "nvfp4_fwd_mxfp8_bwd".

    Returns:
      A jitted function of the parameters. Its result has a tensor per layer, named by the path
      and, where layers are stacked, the layer: ``moe.attention.q_up.3``. An NVFP4 matrix
      [expert, in, ...] is ``NAME.codes`` uint8 [expert, out, in / 2] with ``NAME.block_scales``
      and ``NAME.outer_scale``, quantised along the axis that is summed over. Rows of the leading
      axis, experts in the latter case, can be shared among ranks. All arrays are fresh: the
      parameters may be donated to the next step at once.

    Raises:
      ConfigError: for another ``experts``.
    """
    if experts not in ("native", "nvfp4"):
        raise ConfigError(f"experts: {experts!r}; legal: native, nvfp4")
    paths, _ = jax.tree_util.tree_flatten_with_path(specs)

    @jax.jit
    def serving_form(params: Any) -> dict[str, jax.Array]:
        tensors = {}
        for (path, spec), leaf in zip(paths, jax.tree.leaves(params), strict=True):
            stacked = spec.axes[:1] == ("layer",)
            for field, values in _rounded(spec.axes[stacked:], leaf, dtype, experts).items():
                layers = {f".{i}": x for i, x in enumerate(values)} if stacked else {"": values}
                tensors |= {f"{_name(path)}{i}{field}": x for i, x in layers.items()}
        # without the copy, jit would hand out f32 parameters themselves, soon to be donated
        return jax.tree.map(jnp.copy, tensors)

    return serving_form


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


def _rounded(
    axes: tuple[str, ...], values: jax.Array, dtype: str, experts: Experts
) -> dict[str, jax.Array]:
    """What is published of a tensor with these axes, or of a stack of such, by suffix of name."""
    if len(axes) < 2 or axes in _IN_F32:
        return {"": values}
    if axes[0] != "expert" or experts == "native":
        return {"": values.astype(dtype)}
    lead = values.ndim - len(axes) + 2  # with expert and the axis that is summed over
    matrix = values.astype(jnp.bfloat16).reshape(*values.shape[:lead], -1).swapaxes(-1, -2)
    return {f".{field}": part for field, part in nvfp4.quantize(matrix)._asdict().items()}
