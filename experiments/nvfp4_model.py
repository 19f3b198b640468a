"""A small language model whose routed experts multiply in NVFP4 by any rounding rule; for studies.

The precisions of `c2.models` know one rule, the right one. Here the rule is an argument, so that an
engine and a trainer with the same weights can disagree about nothing else.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from c2.losses import kl
from c2.models import ModelConfig, Params, head, moe, presets, trunk
from c2.models.layers import mlp
from pallas_kernels import nvfp4
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.nvfp4 import NVFP4

Rule = Callable[[jax.Array], NVFP4]


def small_model(layers: int) -> ModelConfig:
    """The miniature of Kimi K2.5 in bf16, every layer with a mixture."""
    return replace(presets.get("tiny_mla_moe"), layers=layers, dense_layers=0, dtype="bfloat16")


def quantize_experts(p: Params, rule: Rule) -> Params:
    """Rounds the routed experts' weights once, as an engine does when it loads them.

    Args:
      p: parameters of a model with mixture layers.
      rule: rounds a bf16 array [layer, expert, output, input] along its last axis.

    Returns:
      The parameters with `NVFP4` in place of ``moe.moe.gate_up`` and ``moe.moe.down``; to be used
      with `experts` only.
    """

    def rounded(weights: jax.Array) -> NVFP4:
        return rule(weights.swapaxes(-1, -2).astype(jnp.bfloat16))

    mixture = p.moe.moe
    gate, up = (rounded(mixture.gate_up[..., i, :]) for i in range(2))
    gate_up = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), gate, up)
    mixture = mixture.replace(gate_up=gate_up, down=rounded(mixture.down))
    return p.replace(moe=p.moe.replace(moe=mixture))


def experts(rule: Rule) -> Callable:
    """A mixture, for `c2.models.forward(experts=...)`, with its routed experts in NVFP4.

    As in the report (section 6.1), both operands of the experts' products are rounded from bf16,
    sums are f32 and outer scales multiply the sums once. Routers and the shared expert stay as
    they are. The parameters must come from `quantize_experts`.

    Args:
      rule: rounds the inputs of a product, bf16 [assignment, features], all tokens at once.
    """

    def mixture(
        x: jax.Array, p: moe.MoE, real: jax.Array, routes: jax.Array | None, cfg: ModelConfig
    ) -> tuple[jax.Array, jax.Array]:
        m, real = cfg.moe, real.reshape(-1, 1)
        flat = jnp.where(real, x.reshape(-1, x.shape[-1]), 0)  # padding sets no scale
        scores = moe.score(flat, p.router, m)
        used = moe.select(scores, p.bias, m)
        if routes is not None:
            used = moe.replay(routes.reshape(used.shape).astype(jnp.int32), used, m.experts)
        used = jnp.where(real, used, moe.NO_TOKEN)

        expert = jnp.where(used < 0, m.experts, used).reshape(-1)  # padding comes last
        order = jnp.argsort(expert, stable=True)
        hidden = _product(rule(flat[order // m.top_k]), p.gate_up, expert[order])
        gate, up = jnp.split(hidden, 2, axis=-1)
        activation = (jax.nn.silu(gate) * up).astype(x.dtype)
        outputs = _product(rule(activation), p.down, expert[order]).astype(x.dtype)
        outputs = outputs[jnp.argsort(order)].reshape(-1, m.top_k, x.shape[-1])
        mixed = (outputs * moe.gate(scores, used, m)[..., None]).sum(1).astype(x.dtype)
        if p.shared is not None:
            mixed = mixed + mlp(flat, p.shared)
        return mixed.reshape(x.shape), used.reshape(*x.shape[:2], m.top_k)

    return mixture


def _product(rows: NVFP4, weights: NVFP4, expert: jax.Array) -> jax.Array:
    """Rows, sorted by ``expert``, times the matrix [output, input] of their expert; f32."""
    left, right = (
        nvfp4.dequantize(q._replace(outer_scale=jnp.ones_like(q.outer_scale)))
        for q in (rows, weights)
    )
    sizes = jnp.bincount(expert, length=len(right)).astype(jnp.int32)
    sums = grouped_matmul(left, right.swapaxes(1, 2), sizes)
    columns = weights.outer_scale.at[expert].get(mode="fill", fill_value=0)
    return sums * rows.outer_scale[..., None] * columns


class Prediction(NamedTuple):
    """What a model says about every next token.

    Attributes:
      log_p: f32 [batch, seq, vocab].
      hidden: f32 [batch, seq, embed], what the head multiplies.
      routes: [batch, seq, moe_layer, top_k].
    """

    log_p: jax.Array
    hidden: jax.Array
    routes: jax.Array


def predict(p: Params, tokens: jax.Array, cfg: ModelConfig, **options: Any) -> Prediction:
    """Runs the model with the options of `c2.models.forward`, and its head in f32.

    Logits rounded to bf16 would hide every gap below a hundredth.
    """
    below = trunk(p, tokens, cfg, **options)
    hidden = below.hidden.astype(jnp.float32)
    logits = jnp.dot(hidden, head(p), precision=jax.lax.Precision.HIGHEST)
    return Prediction(jax.nn.log_softmax(logits), hidden, below.routes)


class Gap(NamedTuple):
    """How far two models' log-probabilities of the same sampled tokens are apart.

    Attributes:
      rms: root of the mean square, nats.
      mean: of log q - log p, the k1 estimate of KL(q||p).
      k3: the k3 estimate of KL(q||p).
      kl: KL(q||p), summed over the vocabulary, mean over contexts.
      p99: of the absolute gap.
      largest: absolute gap.
      changed: share of the tokens whose log-probability is not bitwise the same.
      resampled: share of the tokens that p draws differently from the same random numbers.
    """

    rms: jax.Array
    mean: jax.Array
    k3: jax.Array
    kl: jax.Array
    p99: jax.Array
    largest: jax.Array
    changed: jax.Array
    resampled: jax.Array


@jax.jit
def gap(log_q: jax.Array, log_p: jax.Array, key: jax.Array) -> Gap:
    """Compares q, from which one token is sampled per context, with p; both [..., vocab]."""
    token = jax.random.categorical(key, log_q)
    q, p = (jnp.take_along_axis(a, token[..., None], -1)[..., 0] for a in (log_q, log_p))
    return Gap(
        rms=jnp.sqrt(jnp.mean((q - p) ** 2)),
        mean=kl.estimate(p, q, "k1").mean(),
        k3=kl.estimate(p, q, "k3").mean(),
        kl=(jnp.exp(log_q) * kl.estimate(log_p, log_q, "k3")).sum(-1).mean(),
        p99=jnp.quantile(jnp.abs(q - p), 0.99),
        largest=jnp.abs(q - p).max(),
        changed=(q != p).mean(),
        resampled=(token != jax.random.categorical(key, log_p)).mean(),
    )


def gap_row(found: Gap) -> dict[str, float]:
    """A table's columns: means over repetitions, but the largest gap of all."""
    return {
        "rms gap, nats": found.rms.mean(),
        "p99": found.p99.mean(),
        "largest": found.largest.max(),
        "KL": found.kl.mean(),
        "mean (k1)": found.mean.mean(),
        "mean (k3)": found.k3.mean(),
        "log-probs changed": found.changed.mean(),
        "resampled differently": found.resampled.mean(),
    }
