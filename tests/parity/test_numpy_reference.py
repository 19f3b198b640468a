"""The forward pass against an independent one: numpy, float64, one loop per sum that matters.

Written from the formulas (DeepSeek-V2 section 2.1, DeepSeek-V3 section 2.1, YaRN), not from our
code, so that a machine without torch checks against something too.
"""

import math

import jax
import numpy as np

from c2 import models


def norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def swiglu(x, gate_up, down):
    gate, up = x @ gate_up[..., 0, :], x @ gate_up[..., 1, :]
    return gate / (1 + np.exp(-gate)) * up @ down


def turn_rate(pair, rope_features, rope):
    """Radians per position of one feature pair, after YaRN."""
    yarn, rate = rope.yarn, rope.theta ** (-2 * pair / rope_features)

    def pair_that_turns(times):
        return (
            rope_features
            * math.log(yarn.original_context / (2 * math.pi * times))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), rope_features - 1)
    slow = min(max((pair - low) / (high - low), 0), 1)
    return (1 - slow) * rate + slow * rate / yarn.factor


def rotate(x, position, rope):
    turned = x.copy()
    for pair in range(len(x) // 2):
        z = complex(x[2 * pair], x[2 * pair + 1])
        z *= np.exp(1j * position * turn_rate(pair, len(x), rope))
        turned[2 * pair], turned[2 * pair + 1] = z.real, z.imag
    return turned


def attention(x, p, positions, segments, cfg):
    a, out = cfg.attention, np.zeros_like(x)
    temperature = 0.1 * cfg.rope.yarn.mscale_all_dim * math.log(cfg.rope.yarn.factor) + 1
    scale = temperature**2 / math.sqrt(a.nope + a.rope)
    q_latent = norm(x @ p.q_down, p.q_norm, a.latent_norm_eps)
    latent, shared_key = np.split(x @ p.kv_down, [a.kv_lora], axis=-1)
    latent = norm(latent, p.kv_norm, a.latent_norm_eps)
    shared_key = [rotate(k, at, cfg.rope) for k, at in zip(shared_key, positions, strict=True)]
    for head in range(a.heads):
        queries, up = q_latent @ p.q_up[:, head], latent @ p.kv_up[:, head]
        for i in range(len(x)):
            seen = [j for j in range(i + 1) if segments[j] == segments[i]]
            turned = rotate(queries[i, a.nope :], positions[i], cfg.rope)
            scores = [queries[i, : a.nope] @ up[j, : a.nope] + turned @ shared_key[j] for j in seen]
            weights = np.exp(scale * (np.array(scores) - max(scores)))
            value = weights / weights.sum() @ up[seen, a.nope :]
            out[i] += value @ p.out[head]
    return out


def mixture(x, p, segments, m):
    out, routes = swiglu(x, p.shared.gate_up, p.shared.down), np.full((len(x), m.top_k), -2)
    scores = 1 / (1 + np.exp(-x @ p.router))
    size = m.experts // m.groups
    for i in np.flatnonzero(segments):
        choice = scores[i] + p.bias
        best_two = [np.sort(choice[g * size : (g + 1) * size])[-2:].sum() for g in range(m.groups)]
        closed = np.argsort(best_two)[: m.groups - m.top_groups]
        for g in closed:
            choice[g * size : (g + 1) * size] = -np.inf
        routes[i] = np.argsort(-choice)[: m.top_k]
        for e in routes[i]:
            weight = m.scale * scores[i, e] / scores[i, routes[i]].sum()
            out[i] += weight * swiglu(x[i], p.gate_up[e], p.down[e])
    return out, routes


def forward(p, tokens, positions, segments, cfg):
    """One row: logits [seq, vocab] and routes [seq, moe_layer, top_k]."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    x, routes = p.embed[tokens], []
    for i in range(cfg.layers):
        dense = i < cfg.dense_layers
        group, at = (p.dense, i) if dense else (p.moe, i - cfg.dense_layers)
        layer = jax.tree.map(lambda leaf, at=at: leaf[at], group)
        normed = norm(x, layer.attention_norm, cfg.norm_eps)
        x = x + attention(normed, layer.attention, positions, segments, cfg)
        if dense:
            x = x + swiglu(norm(x, layer.mlp_norm, cfg.norm_eps), layer.mlp.gate_up, layer.mlp.down)
        else:
            normed = norm(x, layer.moe_norm, cfg.norm_eps)
            mixed, used = mixture(normed, layer.moe, segments, cfg.moe)
            x, routes = x + mixed, [*routes, used]
    return norm(x, p.norm, cfg.norm_eps) @ p.head, np.stack(routes, 1)


def test_forward_equals_the_formulas(tiny_config, random_params, packed_rows):
    p = random_params(tiny_config)
    batch = packed_rows([[40, 33], [66, 4]], 75, tiny_config.vocab)
    batch["positions"] = (7 * batch["positions"] ** 2 + 5) % 101  # they are taken as they come
    layout = {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}
    out = jax.jit(
        lambda p: models.forward(p, batch["tokens"], tiny_config, **layout),
        compiler_options={"xla_backend_optimization_level": 0},  # it runs once
    )(p)
    for row in range(2):
        inputs = (batch[key][row] for key in ("tokens", "positions", "segment_ids"))
        logits, routes = forward(p, *inputs, tiny_config)
        real = batch["segment_ids"][row] > 0
        # which expert comes first in a row is of no consequence
        np.testing.assert_array_equal(np.sort(out.routes[row], -1), np.sort(routes, -1))
        np.testing.assert_allclose(out.logits[row][real], logits[real], atol=1e-5)
