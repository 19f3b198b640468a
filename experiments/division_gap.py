"""Log-probabilities of an engine that divides as IEEE says and of trainers that do not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from c2.models import Params, init, moe
from experiments.division_rules import IEEE, RULES
from experiments.nvfp4_model import Gap, experts, gap, predict, quantize_experts, small_model
from experiments.study import Run
from pallas_kernels import nvfp4

NATIVE = "bf16 experts"


class Models(NamedTuple):
    """Gaps between an engine with the IEEE rule and trainers; arrays in `Gap` are [seed, depth].

    Attributes:
      gaps: by trainer's path; `IEEE` is the same rule by other arithmetic, `NATIVE` no rounding.
      own_routes: the gaps at full depth if the trainer routes by itself, [seed].
      rerouted: share of the choices of experts that then differ, [seed].
      coherence: of the gradient's error, see `gradient_error`, [seed].
      drift: of the gradient, as a share of its noise, [seed].
    """

    gaps: dict[str, Gap]
    own_routes: dict[str, Gap]
    rerouted: dict[str, np.ndarray]
    coherence: dict[str, np.ndarray]
    drift: dict[str, np.ndarray]


@jax.jit
def first_layers(p: Params, number: jax.Array) -> Params:
    """A model of the first mixture layers: all others add exact zeros."""
    layer, shared = p.moe, p.moe.moe.shared

    def mute(weights: jax.Array) -> jax.Array:
        index = jnp.arange(len(weights)).reshape(-1, *(1,) * (weights.ndim - 1))
        return jnp.where(index < number, weights, 0)

    mixture = layer.moe.replace(
        down=mute(layer.moe.down), shared=shared.replace(down=mute(shared.down))
    )
    attention = layer.attention.replace(out=mute(layer.attention.out))
    return p.replace(moe=layer.replace(moe=mixture, attention=attention))


@jax.jit
def gradient_error(
    log_q: jax.Array, log_p: jax.Array, hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What sampling from q instead of p does to the policy gradient of p's head.

    With a constant reward the gradient of the trainer's head is 0 in expectation over its own
    samples, and sum_t outer(h_t, q_t - p_t) over those of the engine.

    Args:
      log_q: the engine's log-probabilities [batch, seq, vocab].
      log_p: the trainer's.
      hidden: what the trainer's head multiplies, [batch, seq, embed].

    Returns:
      Its coherence, the squared norm of that sum over the sum of squared norms: 1 if contexts err
      independently, their number if all err alike, 0 without errors. And its norm relative to the
      standard deviation of the gradient over samples.
    """
    log_q, log_p, hidden = (a.reshape(-1, a.shape[-1]) for a in (log_q, log_p, hidden))
    error = jnp.exp(log_q) - jnp.exp(log_p)
    total = jnp.sum(jnp.dot(hidden.T, error, precision=jax.lax.Precision.HIGHEST) ** 2)
    size = (hidden**2).sum(-1)
    alone = size @ (error**2).sum(-1)
    noise = size @ (1 - jnp.exp(2 * log_p).sum(-1))
    return total / jnp.maximum(alone, 1e-30), jnp.sqrt(total / noise)


def compare_models(config: Any, run: Run) -> Models:
    """Scores random rows with engines and trainers of all seeds and depths.

    Args:
      config: of `experiments.ieee_division`.
      run: its run.
    """
    cfg = small_model(config.depths[-1])
    rules = {"engine": nvfp4.quantize, IEEE: RULES[IEEE]}
    rules |= {name: RULES[name] for name in config.model_paths}
    weights = {name: jax.jit(rule) for name, rule in rules.items()}
    native = jax.jit(lambda p, tokens, routes: predict(p, tokens, cfg, routes=routes))

    @jax.jit
    def score(p, tokens, routes, index):
        # one program for all rules: nothing but the rule can differ
        mixture = experts(lambda x: jax.lax.switch(index, list(rules.values()), x))
        return predict(p, tokens, cfg, routes=routes, experts=mixture)

    shape = config.batch, config.context
    own = jnp.full((*shape, cfg.moe_layers, cfg.moe.top_k), moe.OWN_ROUTE, jnp.int16)
    found = {name: [] for name in ("gaps", "own_routes", "rerouted", "coherence", "drift")}
    for seed in range(config.seeds):
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)  # compiles faster
        whole = jax.jit(init, static_argnums=1)(keys[0], cfg)
        tokens = jax.random.randint(keys[1], shape, 0, cfg.vocab)
        gaps = {name: [] for name in (*rules, NATIVE) if name != "engine"}
        for depth in config.depths:
            p = first_layers(whole, depth)
            rounded = {name: quantize_experts(p, rule) for name, rule in weights.items()}
            engine = score(rounded["engine"], tokens, own, 0)
            predictions = {
                name: score(rounded[name], tokens, engine.routes, index)
                for index, name in enumerate(rules)
                if name != "engine"
            } | {NATIVE: native(p, tokens, engine.routes)}
            for name, trainer in predictions.items():
                gaps[name].append(gap(engine.log_p, trainer.log_p, keys[2]))
        errors = {
            name: gradient_error(engine.log_p, trainer.log_p, trainer.hidden)
            for name, trainer in predictions.items()
        }
        alone = {
            name: score(rounded[name], tokens, own, list(rules).index(name))
            for name in config.model_paths
        }
        found["gaps"].append({name: _stack(rows) for name, rows in gaps.items()})
        found["own_routes"].append(
            {name: gap(engine.log_p, other.log_p, keys[2]) for name, other in alone.items()}
        )
        found["rerouted"].append(
            {name: _rerouted(engine.routes, other.routes) for name, other in alone.items()}
        )
        found["coherence"].append({name: error[0] for name, error in errors.items()})
        found["drift"].append({name: error[1] for name, error in errors.items()})
        run.console.print(f"model {seed + 1} of {config.seeds} scored", highlight=False)
    return Models(**{key: _stack(rows) for key, rows in found.items()})


def _rerouted(routes: jax.Array, others: jax.Array) -> jax.Array:
    return (jnp.sort(routes) != jnp.sort(others)).any(-1).mean()


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
