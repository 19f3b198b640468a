"""Few tokens through many experts, against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.rollout.experts import batched
from pallas_kernels.expert_mlp import reference


@pytest.mark.parametrize("case", ["spread", "all to one expert", "padding"])
def test_batched_is_the_formula(case):
    rng = np.random.default_rng(0)
    tokens, experts, top_k, embed, ffw = 24, 6, 2, 16, 8

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    routes = np.stack([rng.choice(experts, top_k, replace=False) for _ in range(tokens)])
    if case == "all to one expert":  # more than it takes at a time
        routes[:, 0], routes[:, 1] = 3, (routes[:, 1] % 3)
    if case == "padding":
        routes[::3] = -2
    x, weights = draw(tokens, embed), draw(tokens, top_k)
    gate_up, down = draw(experts, embed, 2, ffw), draw(experts, ffw, embed)
    routes = jnp.asarray(routes, jnp.int32)
    run = jax.jit(batched, static_argnames=("precision", "impl"))
    got = run(x, routes, weights, gate_up, down, precision="native", impl="xla")
    weights = jnp.where(routes < 0, 0, weights)
    expected = reference.expert_mlp(x, routes, weights, gate_up, down)
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-4)
