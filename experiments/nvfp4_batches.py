"""What a model's log-probs depend on with NVFP4's outer scale per token and per tensor."""

import functools
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from c2.models import init, moe
from experiments.nvfp4_model import Gap, experts, gap, predict, quantize_experts, small_model
from experiments.study import Run
from pallas_kernels import nvfp4
from pallas_kernels.nvfp4.api import Scale

SCALES: tuple[Scale, ...] = get_args(Scale)


def round_rows(x: jax.Array, scale: Scale) -> nvfp4.NVFP4:
    """NVFP4 with the outer scale repeated for every row, whomever it belongs to."""
    q = nvfp4.quantize(x, scale)
    return q._replace(outer_scale=jnp.broadcast_to(q.outer_scale, x.shape[:-1]))


class Model(NamedTuple):
    """How a model's log-probabilities depend on what they should not depend on.

    Attributes:
      leaks: largest change before a token that is replaced by another, nats [seed, swap].
      outlier: change at every position if it is replaced by an outlier, nats [seed, position];
        root of the mean square over the vocabulary.
      batches: gap between engine's and trainer's batch, [seed].
      alone: gap between the engine's batch and the same rows alone, [seed].
    """

    leaks: np.ndarray
    outlier: np.ndarray
    batches: Gap
    alone: Gap


def measure_model(config: Any, run: Run) -> tuple[dict[str, Model], Gap]:
    """Scores random rows with a scale per token and per tensor.

    Args:
      config: of `experiments.nvfp4_scale`.
      run: its run.

    Returns:
      What was found by scale, and the gap between the engine and experts in bf16, [seed].
    """
    cfg = small_model(config.layers)
    shape, half = (config.batch, config.context), config.batch // 2

    @jax.jit
    def score(p, tokens, segment_ids, routes, index):
        rules = [functools.partial(round_rows, scale=scale) for scale in SCALES]
        mixture = experts(lambda x: jax.lax.switch(index, rules, x))
        return predict(p, tokens, cfg, segment_ids=segment_ids, routes=routes, experts=mixture)

    native = jax.jit(lambda p, tokens, routes: predict(p, tokens, cfg, routes=routes))
    weight_rule = jax.jit(nvfp4.quantize)
    rows = np.arange(config.batch)[:, None]
    all_rows, half_rows, one_row = (
        np.broadcast_to((rows < number).astype(np.int32), shape)
        for number in (config.batch, half, 1)
    )
    own = np.full((*shape, cfg.moe_layers, cfg.moe.top_k), moe.OWN_ROUTE, np.int16)

    measured = {scale: [] for scale in SCALES}
    unrounded = []
    for seed in range(config.seeds):
        rng = np.random.default_rng(seed)
        key = jax.random.key(seed, impl="rbg")  # compiles faster
        p = jax.jit(init, static_argnums=1)(key, cfg)
        # the last token of the vocabulary, which no row contains, becomes one with a single large
        # feature, like the massive activations of large models (Sun et al. 2024)
        p = p.replace(embed=p.embed.at[-1].set(0).at[-1, 0].set(100))
        rounded = quantize_experts(p, weight_rule)
        tokens, others = rng.integers(cfg.vocab - 1, size=(2, *shape))
        others[:half] = tokens[:half]
        swaps = rng.choice(cfg.vocab - 1, config.swaps, replace=False)
        for index, scale in enumerate(SCALES):
            call = functools.partial(score, rounded, index=index)
            engine = call(tokens, all_rows, own)
            replay = np.where(half_rows[..., None, None] > 0, engine.routes, own)
            trainer = call(others, all_rows, replay)
            alone = call(tokens, half_rows, replay)

            def replaced(token, call=call, tokens=tokens):
                row = tokens.copy()
                row[0, config.swapped] = token
                return call(row, one_row, own).log_p[0]

            before = replaced(tokens[0, config.swapped])
            earlier = slice(config.swapped)
            measured[scale].append(
                Model(
                    leaks=np.array(
                        [abs(replaced(t)[earlier] - before[earlier]).max() for t in swaps]
                    ),
                    outlier=jnp.sqrt(((replaced(cfg.vocab - 1) - before) ** 2).mean(-1)),
                    batches=gap(engine.log_p[:half], trainer.log_p[:half], key),
                    alone=gap(engine.log_p[:half], alone.log_p[:half], key),
                )
            )
            if scale == "token":
                exact = native(p, tokens, engine.routes)
                unrounded.append(gap(engine.log_p[:half], exact.log_p[:half], key))
        run.console.print(f"model {seed + 1} of {config.seeds} scored", highlight=False)

    def stack(trees):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    return {scale: stack(models) for scale, models in measured.items()}, stack(unrounded)
