"""Which stored tensors, in which layout, each of our parameters comes from and goes to.

Our parameters are stacked over layers and experts and keep heads apart; checkpoints have one
matrix [out, in] per layer, expert and projection. One table of names connects them. The layout
follows from the `ParamSpec`: inputs are the leading axes that make up its ``fan_in``.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from c2.models import transformer
from c2.models.config import MLAConfig, ModelConfig
from c2.models.params import ParamSpec
from c2.models.transformer import Params

# {layer}, {expert} and {gate_up} stand for the axes along which a parameter is a stack of tensors
_COMMON = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layer.attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "layer.attention.out": "model.layers.{layer}.self_attn.o_proj.weight",
    "layer.mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layer.mlp.gate_up": "model.layers.{layer}.mlp.{gate_up}_proj.weight",
    "layer.mlp.down": "model.layers.{layer}.mlp.down_proj.weight",
    "layer.moe_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layer.moe.router": "model.layers.{layer}.mlp.gate.weight",
    "layer.moe.bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "layer.moe.gate_up": "model.layers.{layer}.mlp.experts.{expert}.{gate_up}_proj.weight",
    "layer.moe.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    "layer.moe.shared.gate_up": "model.layers.{layer}.mlp.shared_experts.{gate_up}_proj.weight",
    "layer.moe.shared.down": "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
    "mtp.token_norm": "model.layers.{layer}.enorm.weight",
    "mtp.hidden_norm": "model.layers.{layer}.hnorm.weight",
    "mtp.merge": "model.layers.{layer}.eh_proj.weight",
    "mtp.norm": "model.layers.{layer}.shared_head.norm.weight",
}
_MLA = {
    "layer.attention.q_down": "model.layers.{layer}.self_attn.q_a_proj.weight",
    "layer.attention.q_norm": "model.layers.{layer}.self_attn.q_a_layernorm.weight",
    "layer.attention.q_up": "model.layers.{layer}.self_attn.q_b_proj.weight",
    "layer.attention.kv_down": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight",
    "layer.attention.kv_norm": "model.layers.{layer}.self_attn.kv_a_layernorm.weight",
    "layer.attention.kv_up": "model.layers.{layer}.self_attn.kv_b_proj.weight",
}
_NO_QUERY_LATENT = {"layer.attention.q_up": "model.layers.{layer}.self_attn.q_proj.weight"}
_GQA = {
    "layer.attention.q": "model.layers.{layer}.self_attn.q_proj.weight",
    "layer.attention.k": "model.layers.{layer}.self_attn.k_proj.weight",
    "layer.attention.v": "model.layers.{layer}.self_attn.v_proj.weight",
    "layer.attention.q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "layer.attention.k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
}


@dataclass(frozen=True)
class Source:
    """The stored tensors of one parameter.

    Attributes:
      spec: of the parameter.
      template: name of the tensors.
      first_layer: the layer in names at index 0 of the "layer" axis.
    """

    spec: ParamSpec
    template: str
    first_layer: int = 0

    @functools.cached_property
    def stacked(self) -> tuple[int, ...]:
        """The axes of the parameter along which it is a stack."""
        return tuple(i for i, axis in enumerate(self.spec.axes) if f"{{{axis}}}" in self.template)

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of each stored tensor."""
        inputs, outputs = self._split(self._rest(self.spec.shape))
        return (math.prod(outputs), math.prod(inputs)) if inputs else outputs

    def tensors(self, index: Sequence[slice] | None = None) -> Iterator[tuple[str, dict[int, int]]]:
        """The tensors that a part of the parameter is made of.

        Args:
          index: a slice per axis, or None for all of it.

        Yields:
          A tensor's name, and its place: axis -> index for the axes in ``stacked``.
        """
        sizes = [slice(0, n) for n in self.spec.shape] if index is None else index
        ranges = (range(sizes[axis].start, sizes[axis].stop) for axis in self.stacked)
        for numbers in itertools.product(*ranges):
            place = dict(zip(self.stacked, numbers, strict=True))
            labels = {self.spec.axes[axis]: number for axis, number in place.items()}
            if "layer" in labels:
                labels["layer"] += self.first_layer
            if "gate_up" in labels:
                labels["gate_up"] = ("gate", "up")[labels["gate_up"]]
            yield self.template.format(**labels), place

    def read(self, tensors: Mapping[str, Any], index: Sequence[slice], dtype: Any) -> np.ndarray:
        """A part of the parameter; of the tensors no more is read than contiguous rows need.

        Args:
          tensors: name -> something with slices.
          index: a slice with start and stop per axis.
          dtype: type of the result.
        """
        part = np.empty([_length(s) for s in index], dtype)
        wanted = self._rest(index)
        for name, place in self.tensors(index):
            at = [slice(None)] * part.ndim
            for axis, number in place.items():
                at[axis] = number - index[axis].start
            part[tuple(at)] = self._from_stored(tensors[name], wanted)
        return part

    def _from_stored(self, tensor: Any, index: Sequence[slice]) -> np.ndarray:
        inputs, outputs = self._split(index)
        if not inputs:
            return tensor[tuple(index)]
        in_shape, out_shape = self._split(self._rest(self.spec.shape))
        rows, columns = _flat(outputs, out_shape), _flat(inputs, in_shape)
        # all of the minor axes is read, and what is not wanted of them cut off here
        values = tensor[rows, columns]
        lead = _length(outputs[0]), _length(inputs[0])
        values = values.reshape(lead[0], *out_shape[1:], lead[1], *in_shape[1:])
        values = values[(slice(None), *outputs[1:], slice(None), *inputs[1:])]
        return values.transpose(np.roll(range(values.ndim), len(inputs)))

    def to_stored(self, values: np.ndarray) -> np.ndarray:
        """What one tensor of the stack, with our axes, looks like in a file."""
        if not self._split(values.shape)[0]:
            return values
        return values.reshape(self.stored_shape[::-1]).T

    def _rest(self, per_axis: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x for axis, x in enumerate(per_axis) if axis not in self.stacked)

    def _split(self, per_axis: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Separates inputs from outputs; what sums nothing (norms, embedding) has no inputs."""
        shape = self._rest(self.spec.shape)
        sizes = [math.prod(shape[:n]) for n in range(len(shape) + 1)]
        inputs = sizes.index(self.spec.fan_in)
        return tuple(per_axis[:inputs]), tuple(per_axis[inputs:])


def _flat(index: Sequence[slice], shape: Sequence[int]) -> slice:
    """The range of the flattened axes that covers ``index``, whole in all axes but the first."""
    minor = math.prod(shape[1:])
    return slice(index[0].start * minor, index[0].stop * minor)


def _length(index: slice) -> int:
    return index.stop - index.start


def sources(cfg: ModelConfig, names: Mapping[str, str]) -> Params:
    """Where every parameter of a model is stored: `Params` of `Source`.

    Args:
      cfg: model configuration.
      names: table of names, as `table` gives it.
    """

    def source(path: Any, spec: ParamSpec) -> Source:
        match jax.tree_util.keystr(path, simple=True, separator=".").split("."):
            case "dense", *rest:
                return Source(spec, names[".".join(["layer", *rest])])
            case "moe", *rest:
                return Source(spec, names[".".join(["layer", *rest])], cfg.dense_layers)
            case "mtp", module, *rest:
                key = ".".join(rest if rest[0] == "layer" else ["mtp", *rest])
                layer = str(cfg.layers + int(module))
                return Source(spec, names[key].replace("{layer}", layer))
            case rest:
                return Source(spec, names[".".join(rest)])

    return jax.tree_util.tree_map_with_path(source, transformer.spec(cfg))


def table(cfg: ModelConfig, prefix: str = "") -> dict[str, str]:
    """Names in Hugging Face checkpoints: parameter path -> template, ``prefix`` in front."""
    names = dict(_COMMON)
    if not isinstance(cfg.attention, MLAConfig):
        names |= _GQA
    elif cfg.attention.q_lora is None:
        names |= _MLA | _NO_QUERY_LATENT
    else:
        names |= _MLA
    return {path: prefix + name for path, name in names.items()}


def copies(cfg: ModelConfig, prefix: str = "") -> dict[str, str]:
    """Tensors that checkpoints may hold twice: name of the copy -> name of the original."""
    head = {prefix + _COMMON["head"]: prefix + _COMMON["embed"]} if cfg.tied else {}
    return head | module_copies(cfg, prefix)


def module_copies(cfg: ModelConfig, prefix: str = "") -> dict[str, str]:
    """Those of `copies` that published checkpoints and engines have in prediction modules."""
    embed, head = prefix + _COMMON["embed"], prefix + _COMMON["embed" if cfg.tied else "head"]
    twice = {}
    for module in range(cfg.mtp):
        layer = f"{prefix}model.layers.{cfg.layers + module}"
        twice[f"{layer}.embed_tokens.weight"] = embed
        twice[f"{layer}.shared_head.head.weight"] = head
    return twice
