"""What a forward pass costs, counted from the parameter table."""

from typing import Any

import jax

from c2.models import transformer
from c2.models.config import MLAConfig, ModelConfig
from c2.models.params import ParamSpec
from c2.parallel.balance import Cost


def forward_cost(cfg: ModelConfig) -> Cost:
    """FLOPs of a forward pass over one sequence, prediction modules left out.

    Two per multiply-add of every matrix that a token meets: of the routed experts its ``top_k``,
    the head, and not the embedding, which is a look-up. Causal attention multiplies s**2 / 2 pairs
    by ``qk + v`` features of every head.
    """
    table, attention = transformer.spec(cfg), cfg.attention
    head = table.embed if cfg.tied else table.head
    linear = _per_token((table.dense, table.moe), cfg) + 2 * head.size
    v = attention.v if isinstance(attention, MLAConfig) else attention.head_dim
    return Cost(cfg.layers * attention.heads * (attention.qk + v), linear)


def _per_token(tables: Any, cfg: ModelConfig) -> int:
    def flops(spec: ParamSpec) -> float:
        if len(spec.axes) < 3:  # stacked norm scales and biases
            return 0
        active = cfg.moe.top_k / cfg.moe.experts if spec.axes[1] == "expert" else 1
        return 2 * spec.size * active

    return round(sum(flops(spec) for spec in jax.tree.leaves(tables)))
