"""Expert parallelism on eight devices against one; test_expert.py runs this file in a process."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from c2.parallel import exchange
from c2.parallel.expert import expert_mlp as spread_mlp
from pallas_kernels import mxfp8
from pallas_kernels.expert_mlp import expert_mlp

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
AXES = ("data", "data_ep", "context", "context_ep")
TOKENS, TOP_K, EXPERTS, EMBED, FFW = 88, 4, 16, 64, 32  # 11 tokens on each of 8 devices

# sizes of the mesh axes, axes of the experts, micro-batches
MESHES = {
    "ep 2": ((2, 2, 2, 1), ("data_ep",), 1),
    "ep 4": ((1, 2, 2, 2), ("data_ep", "context_ep"), 2),
    "ep 8": ((1, 2, 1, 4), ("data_ep", "context_ep"), 3),
    "ep 1": ((1, 1, 1, 1), ("data_ep", "context_ep"), 3),
}
SLOW = pytest.mark.slow
EP_1 = pytest.param("ep 1", marks=SLOW)


@cache
def operands():
    """Tokens, weights, both matrices and the cotangent of the result."""
    rng = np.random.default_rng(0)
    x, cotangent = rng.normal(size=(2, TOKENS, EMBED)).astype(np.float32)
    weights = rng.uniform(size=(TOKENS, TOP_K)).astype(np.float32)
    gate_up = rng.normal(size=(EXPERTS, EMBED, 2, FFW)).astype(np.float32) * EMBED**-0.5
    down = rng.normal(size=(EXPERTS, FFW, EMBED)).astype(np.float32) * FFW**-0.5
    return x, weights, gate_up, down, cotangent


def routings():
    """Name -> routes: the usual, dropped tokens, all on one expert, all on one rank, nothing."""
    rng = np.random.default_rng(1)
    routes = np.argsort(rng.normal(size=(TOKENS, EXPERTS)))[:, :TOP_K].astype(np.int32)
    dropped = routes.copy()
    dropped[::7] = -2
    dropped[3, 0] = -1  # one assignment only
    return {
        "random": routes,
        "dropped": dropped,
        "one expert": np.full_like(routes, 9),
        "one rank": routes % 2 + 14,
        "none": np.full_like(routes, -2),
    }


def with_gradients(f, summed=()):
    """Value and gradients, those of matrices added over ranks that hold the same ones."""

    def run(routes, x, weights, gate_up, down, cotangent):
        def scalar(x, weights, *matrices):
            out = f(x, routes, weights, *matrices)
            return jnp.sum(out * cotangent), out

        args = (x, weights, gate_up, down)
        (dx, dw, *d_matrices), out = jax.grad(scalar, argnums=(0, 1, 2, 3), has_aux=True)(*args)
        d_matrices = lax.psum(d_matrices, summed) if summed else d_matrices
        return out, dx, dw, *d_matrices

    return run


@cache
def compiled(name=None, **options):
    """The program on a mesh, or on one device, compiled; takes routes and `operands`."""
    if name is None:
        run = jax.jit(with_gradients(partial(expert_mlp, **options)))
    else:
        sizes, axes, micro_batches = MESHES[name]
        devices = jax.devices()[: np.prod(sizes)]
        auto = (AxisType.Auto,) * len(AXES)
        mesh = jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices)
        options = {"micro_batches": micro_batches} | options
        copies = tuple(a for a, n in zip(AXES, sizes, strict=True) if n > 1 and a not in axes)
        local = with_gradients(partial(spread_mlp, axes=axes, **options), copies)
        tokens, experts = P(AXES), P(axes)
        run = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(tokens, tokens, tokens, experts, experts, tokens),
                out_specs=(tokens, tokens, tokens, experts, experts),
                check_vma=False,
            )
        )
    return run.lower(routings()["random"], *operands()).compile(FAST_COMPILE)


def compare(got, expected, tolerances=(1e-6,) * 5):
    """Value and gradients, relative to the largest number of each."""
    for g, e, tolerance in zip(got, expected, tolerances, strict=True):
        scale = np.abs(e).max() or 1.0
        np.testing.assert_allclose(g / scale, e / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("routing", list(routings()))
@pytest.mark.parametrize("name", ["ep 2", "ep 4", "ep 8", EP_1])
def test_value_and_gradients_equal_one_device(name, routing):
    args = routings()[routing], *operands()
    compare(compiled(name)(*args), compiled()(*args))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["ep 2", "ep 4", "ep 8"]),
    seed=st.integers(0, 2**31),
    experts=st.integers(0, EXPERTS),
)
def test_any_routes_on_any_mesh(name, seed, experts):
    # repeated and missing experts, only some of them in use
    rng = np.random.default_rng(seed)
    routes = rng.integers(-2, experts, (TOKENS, TOP_K), dtype=np.int32)
    compare(compiled(name)(routes, *operands()), compiled()(routes, *operands()))


def test_a_token_does_not_depend_on_the_others_by_a_bit():
    x, *rest = operands()
    routes = routings()["random"]
    whole = compiled("ep 8")(routes, x, *rest)
    chosen = np.arange(0, TOKENS, 5)
    others = np.setdiff1d(np.arange(TOKENS), chosen)
    new_x, crowded = x.copy(), routes.copy()
    new_x[others], crowded[others] = np.nan, routes[0, 0]
    new = compiled("ep 8")(crowded, new_x, *rest)
    for got, expected in zip(new[:3], whole[:3], strict=True):  # value, gradients of x and weights
        np.testing.assert_array_equal(np.asarray(got)[chosen], np.asarray(expected)[chosen])


def ragged_all_to_all(rows, out, start, sizes, there, _, *, axis_name):
    """What the documentation of `jax.lax.ragged_all_to_all` says, for CPUs."""
    gathered = lax.all_gather((rows, start, sizes, there), axis_name)
    me = lax.axis_index(axis_name)
    place = jnp.arange(len(out))
    for rows, start, sizes, there in zip(*gathered, strict=True):
        row = place - there[me]
        mine = (row >= 0) & (row < sizes[me])
        moved = rows.at[start[me] + row].get(mode="clip")
        out = jnp.where(mine[:, None], moved, out)
    return out


def test_a_ragged_exchange_gives_the_same(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    run = compiled("ep 4", ragged=True)
    for routes in routings().values():
        args = routes, *operands()
        for got, expected in zip(run(*args), compiled("ep 4")(*args), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["ep 8", EP_1])
def test_tokens_are_rounded_to_mxfp8_on_the_way_and_gradients_are_not(name):
    x, *rest = operands()
    rounded = np.asarray(mxfp8.dequantize(mxfp8.quantize(jnp.asarray(x))))
    assert (rounded != x).mean() > 0.9
    run = compiled(name, dispatch="mxfp8")
    for routing in ("random", "dropped"):
        routes = routings()[routing]
        compare(run(routes, x, *rest), compiled()(routes, rounded, *rest))


@SLOW
@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_low_precision_equals_one_device(precision):
    # one micro-batch: blocks along the rows are then those of one device
    run = compiled("ep 8", precision=precision, micro_batches=1)
    routes = routings()["dropped"]
    got, expected = (f(routes, *operands()) for f in (run, compiled(precision=precision)))
    # the cotangents of a token's 4 copies are added in bf16, in another order: on either side 3
    # roundings by half a unit in the last place, 2**-9
    compare(got, expected, (1e-6, 6 * 2**-9, 1e-6, 1e-6, 1e-6))
    exact = compiled()(routes, *operands())
    assert np.abs(got[0] - exact[0]).max() > 1e-3  # it is low precision


def test_a_token_goes_once_to_each_rank_that_needs_it_and_returns_are_added_in_f32():
    rng = np.random.default_rng(2)
    needed = rng.random((8, 8, 5)) < 0.4  # source, destination, token
    x = rng.normal(size=(8, 5, 3)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("rank",), axis_types=(AxisType.Auto,))

    def run(needed, x):
        link = exchange.Link(("rank",), ragged=False)
        to = exchange.address(needed[0], link.axes)

        def there_and_back(x):
            return exchange.collect(exchange.dispatch(x, to, link), to, link)

        back, transpose = jax.vjp(there_and_back, x[0])
        # in bf16, where 256 + 1 is 256, seven ones would be lost one by one
        answer = jnp.where(lax.axis_index("rank") == 0, 256, 1)
        rows = jnp.full((8, 5, 3), answer, jnp.bfloat16)
        total = exchange.collect(rows, to._replace(needed=jnp.ones((8, 5), bool)), link)
        return jax.tree.map(lambda a: a[None], (to, back, *transpose(x[0]), total))

    run = jax.shard_map(run, mesh=mesh, in_specs=P("rank"), out_specs=P("rank"), check_vma=False)
    to, back, d_x, total = jax.jit(run)(needed, x)
    np.testing.assert_array_equal(to.sent, needed.sum(2))
    np.testing.assert_array_equal(to.received, needed.sum(2).T)
    for source, destination in np.ndindex(8, 8):
        sent = np.asarray(to.order)[source, destination, : to.sent[source, destination]]
        np.testing.assert_array_equal(sent, np.nonzero(needed[source, destination])[0])
    times = needed.sum(1)[..., None]
    np.testing.assert_allclose(back, times * x, rtol=1e-6)
    np.testing.assert_allclose(d_x, times * x, rtol=1e-6)
    assert (np.asarray(total, np.float32) == 264).all()  # 263, rounded to even once


# routes; weights and their gradient; tokens there and back, in both passes, in and outside of loops
@pytest.mark.parametrize(("name", "count"), [("ep 8", 11), pytest.param("ep 1", 0, marks=SLOW)])
def test_nothing_but_all_to_alls(name, count):
    names = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-[a-z]+"
    text = compiled(name).as_text()
    assert re.findall(rf" ({names})(?:-start)?\(", text) == ["all-to-all"] * count
