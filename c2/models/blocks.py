"""The two kinds of decoder layer: attention with a dense block, and with a mixture of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import struct

from c2.models import gqa, mla, moe
from c2.models.cache import Tokens
from c2.models.config import MLAConfig, ModelConfig
from c2.models.layers import MLP, mlp, mlp_spec, norm_spec, rms_norm
from pallas_kernels.expert_mlp.grouped import ROUTING


@struct.dataclass
class DenseLayer:
    """Attention and a dense feed-forward block; stacked over "layer" in `Params`."""

    attention_norm: jax.Array
    attention: mla.Attention | gqa.Attention
    mlp_norm: jax.Array
    mlp: MLP


@struct.dataclass
class MoELayer:
    """Attention and a mixture-of-experts block; stacked over "layer" in `Params`."""

    attention_norm: jax.Array
    attention: mla.Attention | gqa.Attention
    moe_norm: jax.Array
    moe: moe.MoE


def kind_of_attention(cfg: ModelConfig):
    """The module that implements ``cfg.attention``: `c2.models.mla` or `c2.models.gqa`."""
    return mla if isinstance(cfg.attention, MLAConfig) else gqa


def attention(x: jax.Array, p: Any, tokens: Tokens, cfg: ModelConfig, past: Any):
    """The configured attention, see `c2.models.mla.attention`."""
    return kind_of_attention(cfg).attention(x, p, tokens, cfg, past)


def whole(params: Any, specs: Any) -> Any:
    """What is done to parameters, given with their table, just before they are used: nothing.

    Put in its place `c2.parallel.rules.unshard`, and a layer's parameters can lie on many devices
    and exist as a whole only while the layer is computed.
    """
    return params


def remat(layer: Callable, mode: str, *, scanned: bool) -> Callable:
    """A layer's function that keeps for the backward pass what ``ModelConfig.remat`` says."""
    if mode == "none":
        return layer
    routing = jax.checkpoint_policies.save_only_these_names(ROUTING)  # a few bytes a token
    policies = {"full": routing, "dots": jax.checkpoint_policies.dots_saveable}
    # a scan keeps XLA from merging the two computations by itself
    return jax.checkpoint(layer, policy=policies[mode], prevent_cse=not scanned)


def _gain_out(cfg: ModelConfig) -> float:
    """Residual branches start smaller the deeper the model is."""
    return (2 * cfg.layers) ** -0.5


def dense_spec(cfg: ModelConfig) -> DenseLayer:
    """Parameter table of one dense layer."""
    return DenseLayer(
        attention_norm=norm_spec(cfg.hidden),
        attention=kind_of_attention(cfg).spec(cfg, _gain_out(cfg)),
        mlp_norm=norm_spec(cfg.hidden),
        mlp=mlp_spec(cfg.hidden, cfg.dense_intermediate, _gain_out(cfg)),
    )


def moe_spec(cfg: ModelConfig) -> MoELayer:
    """Parameter table of one mixture-of-experts layer."""
    return MoELayer(
        attention_norm=norm_spec(cfg.hidden),
        attention=kind_of_attention(cfg).spec(cfg, _gain_out(cfg)),
        moe_norm=norm_spec(cfg.hidden),
        moe=moe.spec(cfg, _gain_out(cfg)),
    )


@dataclass(frozen=True)
class Blocks:
    """What all layers of one forward pass share, and the functions that may be replaced.

    Attributes:
      cfg: model configuration.
      tokens: positions and segments.
      attention: with the signature of `c2.models.mla.attention`.
      experts: with the signature of `c2.models.moe.moe`.
      unshard: see `whole`.
    """

    cfg: ModelConfig
    tokens: Tokens
    attention: Callable
    experts: Callable
    unshard: Callable

    def dense(self, x: jax.Array, layer: DenseLayer, past: Any) -> tuple[jax.Array, Any]:
        """One dense layer: x [batch, seq, embed] -> x, cache entry."""
        layer = self.unshard(layer, dense_spec(self.cfg))
        x, entry = self._attend(x, layer, past)
        return x + mlp(rms_norm(x, layer.mlp_norm, self.cfg.norm_eps), layer.mlp), entry

    def moe(
        self, x: jax.Array, layer: MoELayer, past: Any, routes: jax.Array | None
    ) -> tuple[jax.Array, Any, jax.Array]:
        """One mixture layer: x [batch, seq, embed] -> x, cache entry, routes used."""
        layer = self.unshard(layer, moe_spec(self.cfg))
        x, entry = self._attend(x, layer, past)
        normed = rms_norm(x, layer.moe_norm, self.cfg.norm_eps)
        real = self.tokens.segment_ids > 0
        mixed, used = self.experts(normed, layer.moe, real, routes, self.cfg)
        return x + mixed, entry, used

    def _attend(self, x, layer, past):
        normed = rms_norm(x, layer.attention_norm, self.cfg.norm_eps)
        mixed, entry = self.attention(normed, layer.attention, self.tokens, self.cfg, past)
        return x + mixed, entry
