"""What a step minimises, and which part of the parameters it may change for that.

Report section 3.1: a multi-token-prediction module is trained from scratch beside a finished model,
first alone, by distillation of the model's own next-token distribution, then jointly.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from c2 import models
from c2.config import ConfigError
from c2.losses.cross_entropy import linear_cross_entropy
from c2.losses.distillation import linear_distillation
from c2.models import ModelConfig, Params, blocks, moe, mtp
from c2.parallel import context

Batch = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """How a phase trains the multi-token-prediction module.

    Attributes:
      loss: the module's. "forward_kl" and "reverse_kl" compare its distribution with the model's
        own over the whole vocabulary, "hard_labels" is cross-entropy on the token of the text.
      joint_weight: none freezes the main model. A number trains both: the model's loss plus this
        times the module's (lambda of DeepSeek-V3 section 2.2).
      into_trunk: with joint training, whether the module's loss also reaches the main model
        through hidden states, embedding and head. The target of a divergence never moves.
    """

    loss: Literal["forward_kl", "reverse_kl", "hard_labels"] = "forward_kl"
    joint_weight: float | None = None
    into_trunk: bool = False

    def __post_init__(self):
        if self.joint_weight is None and self.into_trunk:
            raise ConfigError("into_trunk: the main model is frozen; legal: true with joint_weight")
        if self.joint_weight is not None and self.joint_weight <= 0:
            raise ConfigError(f"joint_weight: {self.joint_weight} is not legal; legal: above 0")


def trained_part(params: Params, module: MTPConfig | None) -> Params:
    """The part of the parameters that a phase trains: the same tree without the rest.

    What is not in it has neither gradient nor update.
    """
    if module is None:
        return params.replace(mtp=())
    if module.joint_weight is None:
        return Params(embed=None, dense=None, moe=None, norm=None, head=None, mtp=params.mtp)
    return params


def put(params: Params, part: Params) -> Params:
    """The parameters with a `trained_part` in its place."""
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return params.replace(**{name: f for name, f in fields.items() if jax.tree.leaves(f)})


@dataclass(frozen=True)
class Functions:
    """Pieces of the forward pass that a mesh replaces, see `c2.training.sharding.functions`."""

    attention: Callable = blocks.attention
    experts: Callable = moe.moe
    unshard: Callable = blocks.whole


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    module: MTPConfig | None,
    functions: Functions = Functions(),
) -> tuple[jax.Array, dict[str, Any]]:
    """The objective of a phase, summed over a micro-batch, in nats.

    Both terms are meant to be divided by the number of target tokens, as in DeepSeek-V3 eq. 24.

    Args:
      params: parameters.
      batch: see `c2.data.packing` for the fields; ``routes``, if there are any, are replayed, and
        tokens may be in the order of `c2.parallel.context.arrange`.
      cfg: model configuration.
      module: how the multi-token-prediction module is trained; None ignores it.
      functions: pieces of the forward pass.

    Returns:
      The sum, and sums to report: ``losses`` has ``loss``, the main model's or, where it is frozen,
      the module's, and ``mtp_loss``, the module's without its weight; ``expert_load`` [moe_layer,
      expert] and, for the module, ``mtp_expert_load`` [1, expert].
    """
    params = outside_layers(params, cfg, functions.unshard)
    out = models.trunk(
        params,
        batch["tokens"],
        cfg,
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        routes=batch.get("routes"),
        attention=functions.attention,
        experts=functions.experts,
        unshard=functions.unshard,
    )
    sums: dict[str, Any] = {"expert_load": out.expert_load}
    if module is None:
        main = _main_loss(params, out.hidden, batch)
        return main, sums | {"losses": {"loss": main}}
    extra, used = _module_loss(params, out.hidden, batch, cfg, module, functions)
    if cfg.moe_layers:
        sums["mtp_expert_load"] = moe.expert_load(used, cfg.moe.experts)[None]
    if module.joint_weight is None:
        return extra, sums | {"losses": {"loss": extra, "mtp_loss": extra}}
    main = _main_loss(params, out.hidden, batch)
    total = main + module.joint_weight * extra
    return total, sums | {"losses": {"loss": main, "mtp_loss": extra}}


def draft_mask(batch: Batch) -> jax.Array:
    """Where the module's prediction counts, f32 [batch, seq].

    At token i it predicts what the model does at token i + 1: that one must be of the same segment
    and have a target that counts.
    """
    following = _following(batch)
    has_next = mtp.has_next(batch["segment_ids"], following)
    return jnp.where(has_next, following(batch["loss_mask"]), 0)


def _main_loss(params, hidden, batch):
    return linear_cross_entropy(hidden, models.head(params), batch["targets"], batch["loss_mask"])


def _module_loss(params, hidden, batch, cfg, module, functions):
    following = _following(batch)
    shared = hidden, params.embed, models.head(params)
    if not module.into_trunk:
        shared = jax.lax.stop_gradient(shared)
    below, embed, head = shared
    draft, used = mtp.trunk(
        params.mtp[0],
        embed,
        below,
        batch["tokens"],
        cfg,
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        attention=functions.attention,
        experts=functions.experts,
        unshard=functions.unshard,
        following=following,
    )
    mask = draft_mask(batch)
    with jax.named_scope("mtp_loss"):
        if module.loss == "hard_labels":
            return linear_cross_entropy(draft, head, following(batch["targets"]), mask), used
        target = following(hidden)
        return linear_distillation(draft, target, head, mask, divergence=module.loss), used


def _following(batch: Batch) -> Callable[[jax.Array], jax.Array]:
    """See `mtp.following`."""
    if context.CHUNKS in batch:
        return partial(context.following, chunks=batch[context.CHUNKS])
    return mtp.following


def outside_layers(params: Params, cfg: ModelConfig, unshard: Callable) -> Params:
    """Makes whole what is not part of a layer; layers do that for themselves."""

    def without_layers(tree: Params) -> Params:
        return tree.replace(
            dense=None, moe=None, mtp=tuple(module.replace(layer=None) for module in tree.mtp)
        )

    whole = unshard(without_layers(params), without_layers(models.spec(cfg)))
    modules = zip(whole.mtp, params.mtp, strict=True)
    return whole.replace(
        dense=params.dense,
        moe=params.moe,
        mtp=tuple(module.replace(layer=old.layer) for module, old in modules),
    )
