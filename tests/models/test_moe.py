"""The router against a worked example and a loop over tokens, experts and groups."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.models import MoEConfig, moe
from c2.models.layers import MLP
from c2.models.moe import NO_TOKEN, OWN_ROUTE

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
LOGITS = np.float32([[0.2, -1, 1.5, 0.7, -0.3, 2, -2, 0]])
BIAS = np.float32([0, 0.5, -0.2, 0, 0.3, -0.4, 0, 0.1])
TOP3 = MoEConfig(experts=8, top_k=3, intermediate=4, scale=2.5)


def test_worked_example():
    scores = jax.nn.sigmoid(LOGITS)
    np.testing.assert_allclose(
        scores[0],
        [0.549834, 0.268941, 0.817574, 0.668188, 0.425557, 0.880797, 0.119203, 0.5],
        atol=5e-7,
    )
    chosen = moe.select(scores, BIAS, TOP3)
    assert chosen.tolist() == [[1, 4, 3]] and chosen.dtype == jnp.int32
    assert moe.select(scores, jnp.zeros(8), TOP3).tolist() == [[5, 2, 3]]
    # the bias chose, the unbiased scores weigh
    weights = moe.gate(scores, chosen, TOP3)
    np.testing.assert_allclose(weights[0], [0.493403, 0.780732, 1.225865], atol=5e-7)
    raw = moe.gate(scores, chosen, replace(TOP3, norm_top_k=False, scale=1.0))
    np.testing.assert_array_equal(raw[0], scores[0, chosen[0]])


def test_ties_go_to_the_lower_expert():
    scores = jnp.float32([[0.5, 0.25, 0.5, 0.5, 0.25, 0.5, 0.25, 0.25]])
    assert moe.select(scores, jnp.zeros(8), TOP3).tolist() == [[0, 2, 3]]
    top4 = replace(TOP3, top_k=4)
    assert moe.select(scores, jnp.zeros(8), top4).tolist() == [[0, 2, 3, 5]]
    # the groups' sums are .75, 1, .75, .5: group 1 is open, and of 0 and 2 the lower
    grouped = replace(top4, groups=4, top_groups=2)
    assert moe.select(scores, jnp.zeros(8), grouped).tolist() == [[0, 2, 3, 1]]


def select_by_loops(scores, bias, m):
    chosen = []
    for row in scores.astype(np.float64):
        choice = {e: row[e] + float(bias[e]) for e in range(m.experts)}
        size = m.experts // m.groups
        groups = [range(g * size, (g + 1) * size) for g in range(m.groups)]
        best = sorted(groups, key=lambda g: -sum(sorted(choice[e] for e in g)[-2:]))
        eligible = [e for g in best[: m.top_groups] for e in g]
        chosen.append(sorted(eligible, key=lambda e: -choice[e])[: m.top_k])
    return chosen


# With every biased score below 0, filling closed groups with 0 would open them.
@pytest.mark.parametrize("shift", [0.0, -1.5, 2.0])
@pytest.mark.parametrize("groups", [(4, 2), (4, 1), (2, 1), (1, 1)])
def test_group_limited_selection(groups, shift):
    m = MoEConfig(experts=16, top_k=4, intermediate=4, groups=groups[0], top_groups=groups[1])
    rng = np.random.default_rng(sum(groups))
    scores = rng.uniform(size=(200, 16)).astype(np.float32)
    bias = (shift + rng.normal(size=16) * 0.3).astype(np.float32)
    assert moe.select(scores, bias, m).tolist() == select_by_loops(scores, bias, m)


def test_load_counts_assignments_of_real_experts_only():
    routes = jnp.int32([[[0, 2], [2, 1], [NO_TOKEN, NO_TOKEN]], [[2, 0], [OWN_ROUTE, 5], [4, 4]]])
    assert moe.expert_load(routes, 6).tolist() == [2, 1, 3, 0, 2, 1]


@pytest.fixture(scope="module")
def block(tiny_config):
    """One block's parameters, activations [2, 5, embed] and padding at the end of a row."""
    rng = np.random.default_rng(1)
    m, embed = tiny_config.moe, tiny_config.hidden

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)

    params = moe.MoE(
        router=normal(embed, m.experts),
        bias=jnp.asarray(rng.uniform(-1.6, -1.2, m.experts), jnp.float32),
        gate_up=normal(m.experts, embed, 2, m.intermediate),
        down=normal(m.experts, m.intermediate, embed),
        shared=MLP(gate_up=normal(embed, 2, 16), down=normal(16, embed)),
    )
    x = jnp.asarray(rng.normal(size=(2, 5, embed)), jnp.float32)
    real = jnp.asarray([[True] * 5, [True] * 3 + [False] * 2])
    return params, x, real


@pytest.fixture(scope="module")
def run_block(block, tiny_config):
    """Compiled once: routes [2, 5, top_k] -> output and used routes."""
    params, x, real = block
    return jax.jit(
        lambda routes: moe.moe(x, params, real, routes, tiny_config),
        compiler_options=FAST_COMPILE,
    )


def swiglu(x, gate_up, down):
    gate, up = (np.asarray(x, np.float64) @ np.asarray(gate_up[:, i], np.float64) for i in (0, 1))
    return gate / (1 + np.exp(-gate)) * up @ np.asarray(down, np.float64)


def test_padding_passes_through_the_shared_expert_only(block, run_block, tiny_config):
    params, x, real = block
    top_k = tiny_config.moe.top_k
    out, routes = run_block(np.full((2, 5, top_k), OWN_ROUTE))
    routes = np.asarray(routes)
    assert (routes[~real] == NO_TOKEN).all() and (routes[real] >= 0).all()
    assert moe.expert_load(routes, tiny_config.moe.experts).sum() == real.sum() * top_k
    shared = swiglu(x, params.shared.gate_up, params.shared.down)
    np.testing.assert_allclose(out[~real], shared[~real], atol=1e-6)
    assert (np.abs(out[real] - shared[real]).max(-1) > 1e-2).all()


def test_replayed_routes_are_used_and_weighed_by_live_scores(block, run_block, tiny_config):
    params, x, real = block
    m = tiny_config.moe
    own = np.asarray(run_block(np.full((2, 5, m.top_k), OWN_ROUTE))[1])
    given = (own + 1) % m.experts
    given[0, 1] = OWN_ROUTE
    out, used = run_block(given)
    expected = given.copy()
    expected[0, 1] = own[0, 1]
    expected[~real] = NO_TOKEN
    np.testing.assert_array_equal(used, expected)

    token, experts = np.asarray(x[1, 0], np.float64), given[1, 0]
    scores = 1 / (1 + np.exp(-(token @ np.asarray(params.router, np.float64))))
    weights = scores[experts] / scores[experts].sum() * m.scale
    total = swiglu(token, params.shared.gate_up, params.shared.down)
    for weight, expert in zip(weights, experts, strict=True):
        total = total + weight * swiglu(token, params.gate_up[expert], params.down[expert])
    np.testing.assert_allclose(out[1, 0], total, atol=2e-6)


def test_gradient_reaches_the_router_and_not_the_bias(block, tiny_config):
    params, x, real = block

    def loss(p):
        return (moe.moe(x, p, real, None, tiny_config)[0] ** 2).sum()

    loss_and_grad = jax.jit(jax.value_and_grad(loss), compiler_options=FAST_COMPILE)
    grads = loss_and_grad(params)[1]
    assert (grads.bias == 0).all()
    assert (grads.gate_up != 0).any() and (grads.down != 0).any()
    step = 1e-2 * grads.router / jnp.linalg.norm(grads.router)
    moved = [params.replace(router=params.router + s) for s in (step, -step)]
    ahead, behind = (loss_and_grad(p)[0] for p in moved)
    np.testing.assert_allclose((ahead - behind) / 2, jnp.vdot(grads.router, step), rtol=1e-3)


@pytest.mark.parametrize(
    ("row", "replayed"),
    [
        ([3, 0, 5], True),
        ([7, 6, 5], True),
        ([3, 0, OWN_ROUTE], False),
        ([OWN_ROUTE] * 3, False),
        ([NO_TOKEN] * 3, False),  # the token is real, whatever the route says
        ([3, 0, NO_TOKEN], False),
        ([3, 0, 8], False),  # there are 8 experts
        ([3, 0, -3], False),
        ([32767, 0, 1], False),
        ([3, 0, 3], False),
        ([5, 5, 5], False),
    ],
)
def test_a_route_is_replayed_whole_or_not_at_all(row, replayed):
    own = jnp.asarray([[1, 2, 4]])
    used = moe.replay(jnp.asarray([row]), own, experts=8)
    assert used.tolist() == ([row] if replayed else own.tolist())


def test_the_router_learns_while_routes_are_replayed(block, tiny_config):
    params, x, real = block
    given = jnp.broadcast_to(jnp.asarray([0, 3, 6]), (2, 5, 3))

    def loss(p):
        return (moe.moe(x, p, real, given, tiny_config)[0] ** 2).sum()

    grad = jax.jit(jax.grad(loss), compiler_options=FAST_COMPILE)(params).router
    chosen = np.isin(np.arange(8), [0, 3, 6])
    assert (np.abs(grad).max(0) > 0).tolist() == chosen.tolist()


def test_softmax_scores_equal_numpy(block, tiny_config):
    params, x, _ = block
    m = replace(tiny_config.moe, scoring="softmax", bias=False, groups=1, top_groups=1, scale=1.0)
    flat = x.reshape(-1, x.shape[-1])
    scores = np.asarray(moe.score(flat, params.router, m))
    logits = np.float64(flat) @ np.float64(params.router)
    exact = np.exp(logits - logits.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(scores, exact, rtol=2e-5)
    routes = moe.select(jnp.asarray(scores), None, m)
    np.testing.assert_array_equal(routes, np.argsort(-exact, -1)[:, :3])
    best = np.take_along_axis(exact, np.asarray(routes), -1)
    weights = moe.gate(jnp.asarray(scores), routes, m)
    np.testing.assert_allclose(weights, best / best.sum(-1, keepdims=True), rtol=2e-5)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4_fwd_mxfp8_bwd"])
def test_only_routed_experts_are_computed_in_low_precision(block, tiny_config, precision):
    """At an error of the published size; the router, its weights and the shared expert stay."""
    _, x, real = block
    native = replace(tiny_config, moe=replace(tiny_config.moe, intermediate=32))
    low = replace(native, moe=replace(native.moe, precision=precision))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(size=spec.shape) * spec.fan_in**-0.5, jnp.float32),
        moe.spec(native, 1.0),
    )
    (exact, routes), (rounded, same) = (
        moe.moe(x, params, real, None, cfg) for cfg in (native, low)
    )
    np.testing.assert_array_equal(routes, same)
    np.testing.assert_array_equal(exact[~real], rounded[~real])  # the shared expert alone
    shared = swiglu(x, params.shared.gate_up, params.shared.down)
    error = jnp.linalg.norm((rounded - exact)[real]) / np.linalg.norm((exact - shared)[real])
    low, high = {"mxfp8": (0.03, 0.12), "nvfp4_fwd_mxfp8_bwd": (0.12, 0.4)}[precision]
    assert low < error < high


# --- The plausibility filter of replayed routes ---

plausible = jax.jit(moe.plausible)
TOP2 = MoEConfig(experts=6, top_k=2, intermediate=4)
CHOICE = jnp.float32([[0.9, 0.8, 0.75, 0.3, 0.2, 0.1]])  # the router's own are 0 and 1


@pytest.mark.parametrize(
    ("given", "slack", "used"),
    [
        ([0, 1], 0.0, [0, 1]),
        ([1, 0], 0.0, [1, 0]),
        ([2, 0], 0.0, [1, 0]),  # 0 is there already
        ([2, 0], 0.1, [2, 0]),
        ([2, 4], 0.1, [2, 0]),  # the best that is free takes the slot
        ([4, 1], 0.1, [0, 1]),
        ([4, 5], 0.1, [0, 1]),
        ([5, 2], 0.1, [0, 2]),
        ([4, 5], np.inf, [4, 5]),
    ],
)
def test_implausible_experts_are_replaced_by_the_routers_own(given, slack, used):
    own = moe.select(CHOICE, None, TOP2)
    assert own.tolist() == [[0, 1]]
    assert plausible(jnp.asarray([given]), own, CHOICE, slack).tolist() == [used]


@pytest.mark.parametrize("slack", [0.0, 0.05, 0.3, np.inf])
def test_the_filter_against_a_loop(slack):
    m = MoEConfig(experts=16, top_k=4, intermediate=4)
    rng = np.random.default_rng(0)
    choice = (rng.uniform(size=(300, 16)) - 0.5).astype(np.float32)
    given = np.stack([rng.permutation(16)[:4] for _ in choice])
    own = np.asarray(moe.select(choice, None, m))
    used = np.asarray(plausible(given, own, choice, slack))
    replaced = 0
    for row, mine, theirs, got in zip(choice, own, given, used, strict=True):
        stays = [e for e in theirs if row[e] >= np.float32(row[mine[-1]]) - np.float32(slack)]
        spare = [e for e in mine if e not in stays]
        expected = [e if e in stays else spare.pop(0) for e in theirs]
        assert got.tolist() == expected and len(set(expected)) == 4
        replaced += 4 - len(stays)
    counts = moe.replay_counts(given, used, 16)
    assert {name: float(n) for name, n in counts.items()} == {
        "routes": 300,
        "missing": 0,
        "replaced": replaced,
    }
    if slack == 0:
        np.testing.assert_array_equal(np.sort(used), np.sort(own))
    if slack == np.inf:
        np.testing.assert_array_equal(used, given)


def test_what_is_not_known_is_not_filtered_but_routed_anew():
    """An expert out of range may not be mended slot by slot: nothing of such a row is known."""
    given = jnp.asarray([[9, 4], [4, 4], [OWN_ROUTE, 2], [4, 2], [NO_TOKEN, NO_TOKEN]])
    choice = jnp.broadcast_to(CHOICE, (5, 6))
    own = moe.select(choice, None, TOP2)
    used = plausible(moe.replay(given, own, 6), own, choice, 0.1)
    assert used.tolist() == [[0, 1], [0, 1], [0, 1], [0, 2], [0, 1]]
    used = used.at[4].set(NO_TOKEN)  # as the block does on padding
    counts = moe.replay_counts(given, used, 6)
    assert {name: int(n) for name, n in counts.items()} == {
        "routes": 4,
        "missing": 3,
        "replaced": 1,
    }


def test_a_block_with_the_filter(block, tiny_config):
    params, x, real = block
    cfg = replace(tiny_config, moe=replace(tiny_config.moe, groups=1, top_groups=1))
    run = jax.jit(
        lambda routes, slack: moe.moe(x, params, real, routes, cfg, slack=slack),
        compiler_options=FAST_COMPILE,
    )
    out, own = run(np.full((2, 5, cfg.moe.top_k), OWN_ROUTE), 0.0)
    # its own routes again: nothing changes, to the bit
    again, used = run(own, 0.0)
    np.testing.assert_array_equal(used, own)
    np.testing.assert_array_equal(again, out)
    wrong = (own + 1) % cfg.moe.experts
    _, used = run(wrong, np.inf)
    np.testing.assert_array_equal(used[real], wrong[real])
    none, used = run(wrong, 0.0)
    np.testing.assert_array_equal(np.sort(used), np.sort(own))
    np.testing.assert_allclose(none, out, atol=2e-6)


def test_filtered_routes_are_the_same_when_they_are_computed_again(block, tiny_config):
    params, x, real = block
    given = jnp.broadcast_to(jnp.asarray([0, 3, 6]), (2, 5, 3))

    def loss(router):
        p = params.replace(router=router)
        return (moe.moe(x, p, real, given, tiny_config, slack=0.2)[0] ** 2).sum()

    once, again = (
        jax.jit(jax.grad(f), compiler_options=FAST_COMPILE)(params.router)
        for f in (loss, jax.checkpoint(loss))
    )
    assert np.asarray(once).any()
    np.testing.assert_allclose(again, once, rtol=1e-5, atol=1e-6)
