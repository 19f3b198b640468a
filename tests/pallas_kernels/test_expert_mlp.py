"""Routed experts against every expert on every token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_mlp import expert_mlp, reference
from pallas_kernels.expert_mlp.xla import plan

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
TOKENS, EXPERTS, EMBED, FFW = 90, 6, 12, 10


def operands(top_k=3, dtype="float32", tokens=TOKENS, embed=EMBED, ffw=FFW):
    rng = np.random.default_rng(top_k)
    x = jnp.asarray(rng.normal(size=(tokens, embed)), dtype)
    weights = rng.uniform(size=(tokens, top_k)).astype(np.float32)
    gate_up = rng.normal(size=(EXPERTS, embed, 2, ffw)).astype(np.float32) * embed**-0.5
    down = rng.normal(size=(EXPERTS, ffw, embed)).astype(np.float32) * ffw**-0.5
    routes = np.argsort(rng.normal(size=(tokens, EXPERTS)))[:, :top_k].astype(np.int32)
    return x, routes, weights, gate_up, down


def routings(top_k):
    """Name -> routes: the usual, dropped tokens, all on one expert, empty experts, nothing."""
    routes = np.array(operands(top_k)[1])
    dropped = routes.copy()
    dropped[::7] = -2
    dropped[3, 0] = -2  # one assignment only
    return {
        "random": routes,
        "dropped": dropped,
        "one expert": np.full_like(routes, 4),
        "two of the experts": routes % 2 * 5,
        "none": np.full_like(routes, -2),
        "an expert more than once": np.repeat(routes[:, :1], top_k, axis=1),
    }


@pytest.fixture(scope="module", params=[1, 3])
def both(request):
    """Value and gradients of all four arguments, by this op and by its formula."""
    x, _, weights, *matrices = operands(request.param)
    cotangent = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)

    def compiled(f):
        def run(routes):
            def scalar(x, weights, *matrices):
                out = f(x, routes, weights, *matrices)
                return jnp.sum(out * cotangent), out

            args = (x, weights, *matrices)
            gradients, out = jax.grad(scalar, argnums=(0, 1, 2, 3), has_aux=True)(*args)
            return out, *gradients

        return jax.jit(run, compiler_options=FAST_COMPILE)

    return request.param, compiled(expert_mlp), compiled(reference.expert_mlp)


@pytest.mark.parametrize("routing", list(routings(1)))
def test_value_and_gradients_equal_the_formula(both, routing):
    top_k, ours, formula = both
    routes = jnp.asarray(routings(top_k)[routing])
    for got, expected in zip(ours(routes), formula(routes), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-5)  # sums of 270 terms


def test_experts_without_tokens_get_exactly_no_gradient(both):
    top_k, ours, _ = both
    _, _, _, d_gate_up, d_down = ours(jnp.asarray(routings(top_k)["two of the experts"]))
    idle = [1, 2, 3, 4]
    assert not np.asarray(d_gate_up)[idle].any() and not np.asarray(d_down)[idle].any()
    assert np.asarray(d_down)[[0, 5]].any()


def test_weights_of_zero_leave_gradients_to_the_weights_only():
    x, routes, weights, *matrices = operands()

    def total(x, weights, *matrices):
        return expert_mlp(x, routes, weights, *matrices).sum()

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(x, 0 * weights, *matrices)
    assert [bool(np.asarray(g).any()) for g in grads] == [False, True, False, False]


def test_bf16_errs_by_roundings_only():
    x, routes, weights, *matrices = operands(dtype="bfloat16")
    args = (x, weights, *matrices)

    def squares(f, *args):
        x, weights, *matrices = args
        return (f(x, routes, weights, *matrices).astype(jnp.float32) ** 2).sum()

    def gradients(f, args):
        grads = jax.grad(partial(squares, f), argnums=(0, 1, 2, 3))
        return jax.jit(grads, compiler_options=FAST_COMPILE)(*args)

    exact_args = [jnp.asarray(a, jnp.bfloat16).astype(jnp.float32) for a in args]
    exact_args[1] = weights
    for got, like, exact in zip(
        gradients(expert_mlp, args), args, gradients(reference.expert_mlp, exact_args), strict=True
    ):
        assert got.dtype == like.dtype
        error = np.abs(np.asarray(got, np.float32) - exact).max()
        assert error < 2**-7 * np.abs(exact).max()  # one unit in bf16's last place


# small matrices, and some large enough for another code path of the matmul
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("float32", (TOKENS, EMBED, FFW)),
        ("float32", (600, 128, 64)),
        ("bfloat16", (600, 128, 64)),
    ],
)
def test_a_token_does_not_depend_on_the_others_by_a_bit(dtype, sizes):
    tokens = sizes[0]
    x, routes, *rest = operands(3, dtype, *sizes)
    run = jax.jit(expert_mlp)
    whole = np.asarray(run(x, routes, *rest), np.float32)
    rng = np.random.default_rng(0)
    for kept in (1, 17, 60):
        chosen = rng.permutation(tokens)[:kept]
        others = np.setdiff1d(np.arange(tokens), chosen)
        new_x, new_routes = x.at[others].set(100.0), routes.copy()
        new_routes[others] = routes[chosen[0], 0]  # crowds one expert
        got = np.asarray(run(new_x, new_routes, *rest), np.float32)
        np.testing.assert_array_equal(got[chosen], whole[chosen])
    order = rng.permutation(tokens)
    weights, *matrices = rest
    moved = np.asarray(run(x[order], routes[order], weights[order], *matrices), np.float32)
    np.testing.assert_array_equal(moved, whole[order])


@pytest.mark.parametrize("routing", list(routings(3)))
def test_the_plan_gives_every_assignment_a_row_of_its_expert(routing):
    routes = routings(3)[routing]
    p = jax.jit(plan, static_argnums=1)(routes, EXPERTS)
    blocks, rows = p.token.shape
    slot, token = np.asarray(p.slot).reshape(routes.shape), np.asarray(p.token).reshape(-1)
    real = routes >= 0
    assert len(np.unique(slot[real])) == real.sum()  # no row twice
    assert (slot[~real] == blocks * rows).all()  # dropped
    np.testing.assert_array_equal(token[slot[real]], np.nonzero(real)[0])
    np.testing.assert_array_equal(np.asarray(p.expert)[slot[real] // rows], routes[real])
    assert (token < TOKENS).sum() == real.sum()  # all other rows are padding
    assert int(p.used) == sum(-(-np.count_nonzero(routes == e) // rows) for e in range(EXPERTS))


def test_shapes_that_disagree_are_named():
    x, routes, weights, gate_up, down = operands()
    with pytest.raises(ValueError, match="disagree"):
        expert_mlp(x, routes, weights, gate_up, down[:, 1:])
    with pytest.raises(ValueError, match="routes"):
        expert_mlp(x, routes[1:], weights, gate_up, down)
