"""Llama-style models in GGUF, the file format of llama.cpp, as far as SmolLM2 needs it.

Needs the extra `gguf`. Every quantisation that the `gguf` package knows is dequantised.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from c2.config import ConfigError
from c2.models.config import GQAConfig, ModelConfig, RopeConfig
from c2.models.hf import loader, names
from c2.models.hf.read_config import Fields
from c2.models.transformer import Params

_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "layer.attention_norm": "blk.{layer}.attn_norm.weight",
    "layer.attention.q": "blk.{layer}.attn_q.weight",
    "layer.attention.k": "blk.{layer}.attn_k.weight",
    "layer.attention.v": "blk.{layer}.attn_v.weight",
    "layer.attention.out": "blk.{layer}.attn_output.weight",
    "layer.mlp_norm": "blk.{layer}.ffn_norm.weight",
    "layer.mlp.gate_up": "blk.{layer}.ffn_{gate_up}.weight",
    "layer.mlp.down": "blk.{layer}.ffn_down.weight",
}
_ROTATED = ("attn_q.weight", "attn_k.weight")


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A stored tensor; indexing dequantises the rows it needs."""

    file: Path
    stored: gguf.ReaderTensor
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self.stored.shape))

    def __getitem__(self, index: Sequence[slice]) -> np.ndarray:
        rows, *columns = index
        values = gguf.quants.dequantize(self.stored.data[rows], self.stored.tensor_type)
        if self.stored.name.endswith(_ROTATED):
            # features that rotate together are neighbours in the file, half a head apart for us
            pairs = values.reshape(-1, self.head_dim // 2, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        return values[:, *columns]


def load(path: str | os.PathLike[str], *, dtype: Any = jnp.float32) -> tuple[ModelConfig, Params]:
    """Reads a GGUF file of architecture "llama".

    The result is that of the Hugging Face checkpoint that the file was made from, up to
    quantisation: it can be trained and exported with `c2.models.hf.save`.

    Args:
      path: the file.
      dtype: f32 or bf16, of the parameters and of computation.

    Returns:
      The configuration and the parameters.

    Raises:
      ConfigError: one line with the file and the field or tensor, for anything that is damaged,
        missing, superfluous or not implemented.
    """
    file = Path(path)
    try:
        reader = gguf.GGUFReader(file)
        fields = {
            key: field.contents()
            for key, field in reader.fields.items()
            if key.startswith(("general.architecture", "llama."))  # vocabularies take seconds
        }
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{file}: damaged or not GGUF: {error}") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"token_embd.weight: missing in {file}")
    cfg = _config(fields, file, tensors, np.dtype(dtype).name)
    stored = {n: _Tensor(file, t, cfg.attention.head_dim) for n, t in tensors.items()}
    sources = names.sources(cfg, _NAMES)
    loader.check(sources, stored, file)
    return cfg, loader.fill(sources, stored, dtype, sharding=None)


def _config(
    data: dict[str, Any], file: Path, tensors: dict[str, gguf.ReaderTensor], dtype: str
) -> ModelConfig:
    """Translates the fields of the architecture, all of which must be known."""
    if data.get("general.architecture") != "llama":
        raise ConfigError(
            f"{file}: general.architecture: {data.get('general.architecture')!r} is not supported, "
            "only 'llama'"
        )
    llama = {k.removeprefix("llama."): v for k, v in data.items() if k.startswith("llama.")}
    fields = Fields(llama, f"{file}: llama")
    fields.left -= {"context_length", "vocab_size"}
    layers = fields.take("block_count", int)
    hidden = fields.take("embedding_length", int)
    heads = fields.take("attention.head_count", int)
    head_dim = fields.take("attention.key_length", int, hidden // heads)
    fields.only(head_dim, "attention.value_length", "rope.dimension_count")
    cfg = ModelConfig(
        vocab=int(tensors["token_embd.weight"].shape[1]),
        hidden=hidden,
        layers=layers,
        dense_layers=layers,
        dense_intermediate=fields.take("feed_forward_length", int),
        attention=GQAConfig(
            heads=heads,
            kv_heads=fields.take("attention.head_count_kv", int, heads),
            head_dim=head_dim,
        ),
        moe=None,
        rope=RopeConfig(theta=fields.take("rope.freq_base", float, 10_000.0), layout="halves"),
        norm_eps=_decimal(fields.take("attention.layer_norm_rms_epsilon", float)),
        tied="output.weight" not in tensors,
        dtype=dtype,
    )
    fields.finish()
    return cfg


def _decimal(value: float) -> float:
    """The number that an f32 was written for: 1e-5 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
