"""Low-precision experts against the recipe in numpy and f64, and against independent noise."""

from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.grouped_matmul import reference

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
TOKENS, EXPERTS, TOP_K, EMBED, FFW = 260, 5, 2, 96, 64
NOISE = {"mxfp8": (0.02665, 0.02665), "nvfp4": (0.0951, 0.02665)}  # forward and backward operands


def operands(embed=EMBED, ffw=FFW):
    rng = np.random.default_rng(0)
    x, d_mixed = rng.normal(size=(2, TOKENS, embed)).astype(np.float32)
    weights = rng.uniform(size=(TOKENS, TOP_K)).astype(np.float32)
    gate_up = rng.normal(size=(EXPERTS, embed, 2, ffw)).astype(np.float32) * embed**-0.5
    down = rng.normal(size=(EXPERTS, ffw, embed)).astype(np.float32) * ffw**-0.5
    routes = np.argsort(rng.normal(size=(TOKENS, EXPERTS)))[:, :TOP_K].astype(np.int32)
    routes[routes == 3] = 1  # an expert without tokens
    routes[::9] = -2
    return (x, weights, gate_up, down), routes, d_mixed


def value_and_gradients(args, routes, d_mixed, precision, impl="xla"):
    def mixture(x, weights, gate_up, down):
        return expert_mlp(x, routes, weights, gate_up, down, precision=precision, impl=impl)

    out, pullback = jax.vjp(mixture, *args)
    return out, *pullback(d_mixed)


run = jax.jit(
    value_and_gradients, static_argnames=("precision", "impl"), compiler_options=FAST_COMPILE
)


def formula(args, routes, d_mixed, forward, backward, bf16):
    """The mixture and its gradients in f64; operands of products pass through a quantiser.

    Args:
      args: x, weights, gate_up, down.
      routes: ids.
      d_mixed: cotangent of the mixture.
      forward: quantiser of an operand of the two forward products, along the axis given.
      backward: quantiser of an operand of the four backward products.
      bf16: what every number in between is rounded by.
    """
    x, weights, gate_up, down = (np.asarray(a, np.float64) for a in args)
    out, dx, d_weights = np.zeros(x.shape), np.zeros(x.shape), np.zeros(weights.shape)
    d_gate_up, d_down = np.zeros(gate_up.shape), np.zeros(down.shape)
    for e in range(len(down)):
        token, k = np.nonzero(routes == e)
        if not len(token):
            continue
        fill = ((0, -len(token) % 32), (0, 0))
        rows, w1, w2 = bf16(x[token]), bf16(gate_up[e].reshape(len(x.T), -1)), bf16(down[e])
        hidden = bf16(forward(rows, 1) @ forward(w1, 0))
        gate, up = np.split(hidden, 2, axis=1)
        sigmoid = 1 / (1 + np.exp(-gate))
        act = bf16(gate * sigmoid * up)
        y = bf16(forward(act, 1) @ forward(w2, 0))
        w = weights[token, k][:, None]
        np.add.at(out, token, w * y)
        d_weights[token, k] = (y * d_mixed[token]).sum(1)

        dy = bf16(w * d_mixed[token])
        d_act = bf16(backward(dy, 1) @ backward(w2, 1).T)
        d_down[e] = backward(np.pad(act, fill), 0).T @ backward(np.pad(dy, fill), 0)
        d_gate = d_act * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_hidden = bf16(np.concatenate([d_gate, d_act * gate * sigmoid], 1))
        np.add.at(dx, token, bf16(backward(d_hidden, 1) @ backward(w1, 1).T))
        d_w1 = backward(np.pad(rows, fill), 0).T @ backward(np.pad(d_hidden, fill), 0)
        d_gate_up[e] = d_w1.reshape(gate_up[e].shape)
    return out, dx, d_weights, d_gate_up, d_down


def to_bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def exactly(x, *_):
    return x


def mxfp8(x, axis):
    return reference.mxfp8_rounded(x.astype(np.float32), axis)


def nvfp4(x, axis):
    x = x.astype(np.float32)
    return reference.nvfp4_rounded(x) if axis == 1 else reference.nvfp4_rounded(x.T).T


def relative(got, exact):
    return np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_equals_the_recipe_in_f64(precision):
    """Up to a few numbers that f32 sums push over a border of bf16, and then of the codes."""
    forward = mxfp8 if precision == "mxfp8" else nvfp4
    args = operands()
    expected = formula(*args, forward, mxfp8, to_bf16)
    for got, exact in zip(run(*args, precision=precision), expected, strict=True):
        assert relative(got, exact) < 0.004  # a unit in the last place of bf16


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_errors_are_those_of_independent_roundings_of_the_published_size(precision):
    args = operands()
    rng = np.random.default_rng(1)

    def noisy(size):
        return lambda x, _: x * (1 + size * rng.normal(size=x.shape))

    exact = formula(*args, exactly, exactly, exactly)
    expected = formula(*args, *map(noisy, NOISE[precision]), exactly)
    for got, noise, true in zip(run(*args, precision=precision), expected, exact, strict=True):
        np.testing.assert_allclose(relative(got, true), relative(noise, true), rtol=0.1)


def test_native_precision_equals_the_fused_loop():
    args, routes, d_mixed = operands()
    grouped, fused = (
        run(args, routes, d_mixed, precision="native", impl=impl) for impl in ("interpret", "xla")
    )
    for got, expected in zip(grouped, fused, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_a_token_does_not_depend_on_the_others_by_a_bit(precision):
    (x, weights, *matrices), routes, _ = operands()
    mixture = partial(expert_mlp, precision=precision)
    mixture = jax.jit(mixture, compiler_options=FAST_COMPILE)
    whole = np.asarray(mixture(x, routes, weights, *matrices))
    rng = np.random.default_rng(0)
    for kept in (1, 17, 200):
        chosen = rng.permutation(TOKENS)[:kept]
        others = np.setdiff1d(np.arange(TOKENS), chosen)
        new_x, new_routes = x.copy(), routes.copy()
        new_x[others] *= 1e5
        new_routes[others] = 1  # crowds one expert
        got = np.asarray(mixture(new_x, new_routes, weights, *matrices))
        np.testing.assert_array_equal(got[chosen], whole[chosen])
    alone = mixture(x[chosen], routes[chosen], weights[chosen], *matrices)
    np.testing.assert_array_equal(alone, whole[chosen])


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_nan_reaches_its_token_and_its_experts_only(precision):
    args, routes, d_mixed = operands()
    clean = run(args, routes, d_mixed, precision=precision)
    args[0][7, 3] = np.nan
    out, dx, _, d_gate_up, d_down = map(np.asarray, run(args, routes, d_mixed, precision=precision))
    others = np.arange(TOKENS) != 7
    assert np.isnan(out[7]).all()
    np.testing.assert_array_equal(out[others], clean[0][others])
    np.testing.assert_array_equal(dx[others], clean[1][others])
    reached = np.isin(np.arange(EXPERTS), routes[7])
    assert np.isnan(d_gate_up[reached]).any() and np.isnan(d_down[reached]).any()
    np.testing.assert_array_equal(d_gate_up[~reached], clean[3][~reached])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_are_those_of_the_arguments(dtype):
    (x, *rest), routes, d_mixed = operands()
    args = x.astype(dtype), *rest
    nvfp4 = partial(value_and_gradients, precision="nvfp4")
    out, *gradients = jax.eval_shape(nvfp4, args, routes, d_mixed.astype(dtype))
    assert out.dtype == dtype
    assert [g.dtype for g in gradients] == [a.dtype for a in args]


def test_sizes_that_blocks_do_not_divide_are_named():
    args, routes, d_mixed = operands(embed=80)
    with pytest.raises(NotImplementedError, match=r"80, 128\).*multiples of \(32, 32\)"):
        run(args, routes, d_mixed, precision="mxfp8")
