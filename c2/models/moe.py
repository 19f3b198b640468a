"""Mixture of experts (DeepSeek-V3 section 2.1.2): routing, route replay and the weighted sum."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from c2.models.config import ModelConfig, MoEConfig
from c2.models.layers import MLP, mlp, mlp_spec
from c2.models.params import ParamSpec
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.expert_mlp.grouped import ROUTING

OWN_ROUTE = -1  # in given routes: no route was captured
NO_TOKEN = -2  # in given and returned routes: padding, routed nowhere

# the grouped matmul names a recipe after its forward pass
KERNEL_PRECISION = {"native": "native", "mxfp8": "mxfp8", "nvfp4_fwd_mxfp8_bwd": "nvfp4"}


@struct.dataclass
class MoE:
    """Parameters of one mixture-of-experts block."""

    router: jax.Array  # [embed, expert]
    bias: jax.Array | None  # [expert], moves selection only, never a weight; no gradient
    gate_up: jax.Array  # [expert, embed, 2, ffw]
    down: jax.Array  # [expert, ffw, embed]
    shared: MLP | None


def spec(cfg: ModelConfig, gain_out: float) -> MoE:
    """Parameter table of one mixture-of-experts block."""
    m, embed = cfg.moe, cfg.hidden
    expert_axes = ("expert", "embed", "gate_up", "ffw")
    shape = (m.experts, embed, 2, m.intermediate)
    return MoE(
        router=ParamSpec((embed, m.experts), ("embed", "expert"), fan_in=embed, exact=True),
        bias=ParamSpec((m.experts,), ("expert",), init="zeros", trainable=False)
        if m.bias
        else None,
        gate_up=ParamSpec(shape, expert_axes, fan_in=embed),
        down=ParamSpec(
            (m.experts, m.intermediate, embed),
            ("expert", "ffw", "embed"),
            fan_in=m.intermediate,
            gain=gain_out,
        ),
        shared=mlp_spec(embed, m.shared * m.intermediate, gain_out) if m.shared else None,
    )


def score(x: jax.Array, router: jax.Array, m: MoEConfig) -> jax.Array:
    """Scores of all experts, f32 [tokens, expert], for x [tokens, embed]."""
    # f32 on every backend: selection must not depend on the compute dtype's rounding
    logits = jnp.dot(
        x.astype(jnp.float32), router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return jax.nn.sigmoid(logits) if m.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def biased(scores: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The scores that experts are selected by; no gradient."""
    return jax.lax.stop_gradient(scores if bias is None else scores + bias)


def select(scores: jax.Array, bias: jax.Array | None, m: MoEConfig) -> jax.Array:
    """Chooses experts by biased score: scores [tokens, expert] -> ids int32 [tokens, top_k].

    With groups, only the ``top_groups`` groups with the highest sum of their two best experts
    are eligible.
    """
    choice = biased(scores, bias)
    if m.groups > 1:
        grouped = choice.reshape(-1, m.groups, m.experts // m.groups)
        group_score = jax.lax.top_k(grouped, 2)[0].sum(-1)
        best = jax.lax.top_k(group_score, m.top_groups)[1]
        eligible = jax.nn.one_hot(best, m.groups, dtype=bool).any(axis=1)
        # -inf and not 0: biased scores may be negative
        choice = jnp.where(eligible[..., None], grouped, -jnp.inf).reshape(choice.shape)
    return jax.lax.top_k(choice, m.top_k)[1].astype(jnp.int32)


def gate(scores: jax.Array, routes: jax.Array, m: MoEConfig) -> jax.Array:
    """Weights of the chosen experts, f32 [tokens, top_k], from unbiased scores."""
    weights = jnp.take_along_axis(scores, jnp.maximum(routes, 0), axis=-1)
    if m.norm_top_k:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * m.scale


def captured(given: jax.Array, experts: int) -> jax.Array:
    """Where given routes are complete, bool [..., 1], for ids int [..., top_k].

    A row is complete if it names ``top_k`` different experts that exist. Anything else - a slot
    without a captured route, padding, an id out of range, a duplicate - says that the engine's
    choice is not known, and a token is never routed by half of it.
    """
    exists = ((given >= 0) & (given < experts)).all(-1, keepdims=True)
    ascending = jnp.sort(given, axis=-1)
    return exists & (ascending[..., 1:] != ascending[..., :-1]).all(-1, keepdims=True)


def replay(given: jax.Array, own: jax.Array, experts: int) -> jax.Array:
    """The given routes where they are `captured`, else the token's own; ids int [tokens, top_k]."""
    return jnp.where(captured(given, experts), given, own)


def plausible(routes: jax.Array, own: jax.Array, choice: jax.Array, slack: float) -> jax.Array:
    """Routes without the experts that the router would never have chosen.

    An expert stays if its selection score is at most ``slack`` below that of the weakest expert of
    the token's own choice. The others give their slots to the token's own experts, the best first
    (report section 3). Selection scores, and not weights: a bias can select an expert of small
    weight. That its group is closed is no reason against an expert with a high score.

    Args:
      routes: complete ones, int [tokens, top_k].
      own: the router's choice, the best first, int [tokens, top_k].
      choice: scores that selected it, from `biased` [tokens, expert].
      slack: 0 leaves, without groups, none but the token's own experts; infinity leaves all.
    """
    weakest = jnp.take_along_axis(choice, own, axis=-1).min(-1, keepdims=True)
    stays = jnp.take_along_axis(choice, routes, axis=-1) >= weakest - slack
    taken = (own[:, :, None] == routes[:, None, :]).any(-1)  # an own expert always stays
    free = jnp.take_along_axis(own, jnp.argsort(taken, axis=-1, stable=True), axis=-1)
    number = jnp.maximum(jnp.cumsum(~stays, axis=-1) - 1, 0)
    return jnp.where(stays, routes, jnp.take_along_axis(free, number, axis=-1))


def replay_counts(given: jax.Array, used: jax.Array, experts: int) -> dict[str, jax.Array]:
    """What became of given routes, f32 scalars; both int [..., top_k], of all layers and tokens.

    ``routes`` counts the rows of real tokens, ``missing`` those of them that were not `captured`,
    and ``replaced`` the experts, in captured ones, for which another was used.
    """
    real = (used != NO_TOKEN).all(-1, keepdims=True)
    known = real & captured(given, experts)
    counts = {"routes": real, "missing": real & ~known, "replaced": known & (given != used)}
    return {name: where.sum(dtype=jnp.float32) for name, where in counts.items()}


def expert_load(routes: jax.Array, experts: int) -> jax.Array:
    """Number of assignments per expert, f32 [expert]; negative ids count nowhere."""
    return jax.nn.one_hot(routes.reshape(-1), experts, dtype=jnp.float32).sum(0)


def moe(
    x: jax.Array,
    p: MoE,
    real: jax.Array,
    routes: jax.Array | None,
    cfg: ModelConfig,
    *,
    slack: float | None = None,
    mlp_of_experts: Callable = expert_mlp,
) -> tuple[jax.Array, jax.Array]:
    """Routes tokens to experts and adds the shared expert.

    Args:
      x: [batch, seq, embed].
      p: parameters.
      real: bool [batch, seq], False on padding.
      routes: int [batch, seq, top_k] to replay (report section 3, router replay), or None. See
        `replay` for rows that can't be; weights always come from the live scores.
      cfg: model configuration.
      slack: leaves out replayed experts that are not `plausible`; None leaves out none.
      mlp_of_experts: with the signature of `pallas_kernels.expert_mlp.expert_mlp`; another one
        sends tokens to experts on other devices.

    Returns:
      Output [batch, seq, embed] and the routes used, int32 [batch, seq, top_k], `NO_TOKEN` on
      padding.
    """
    m = cfg.moe
    flat = x.reshape(-1, x.shape[-1])
    with jax.named_scope("router"):
        scores = score(flat, p.router, m)
        used = own = select(scores, p.bias, m)
        if routes is not None:
            used = replay(routes.reshape(own.shape).astype(jnp.int32), own, m.experts)
            if slack is not None:
                used = plausible(used, own, biased(scores, p.bias), slack)
        used = checkpoint_name(jnp.where(real.reshape(-1, 1), used, NO_TOKEN), ROUTING)
        weights = gate(scores, used, m)
    with jax.named_scope("experts"):
        precision = KERNEL_PRECISION[m.precision]
        out = mlp_of_experts(
            flat, used, weights, p.gate_up, p.down, precision=precision, impl=cfg.kernels
        )
    if p.shared is not None:
        with jax.named_scope("shared_expert"):
            out = out + mlp(flat, p.shared)
    return out.reshape(x.shape), used.reshape(*x.shape[:2], m.top_k)
