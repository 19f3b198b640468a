"""The penalty against exact decimal arithmetic, at and around all of its limits."""

from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.losses.length_penalty import length_penalty

NEXT_TO_ONE = (1 - 2**-24, 1 + 2**-23)  # the float32 neighbours of 1
XS = [0.0, 1e-30, 1e-6, 0.1, 1.0, 3.0, 10.0, 1e2, 1e4, 1e6, 1e9]
KS = [0.0, 1e-30, 1e-8, 1e-4, 0.1, 1.0, 2.0, 1e3]
AROUND_ONE = [1 - 1e-6, NEXT_TO_ONE[0], 1.0, NEXT_TO_ONE[1], 1 + 1e-6]
QS = [0.0, 1e-7, 0.25, 0.5, 0.9, *AROUND_ONE, 1.5, 2.0, 8.0]

penalty = jax.jit(length_penalty)
gradients = jax.jit(jax.vmap(jax.grad(length_penalty, argnums=(0, 1, 2))))


def exact(x: Decimal, k: Decimal, q: Decimal) -> Decimal:
    """The formula as printed, with its removable singularities filled in."""
    if k == 0:
        return x
    if q == 1:
        return (1 + k * x).ln() / k
    return ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


def as_decimals(*values: float) -> list[Decimal]:
    return [Decimal(float(np.float32(v))) for v in values]


def relative_error(value: float, expected: Decimal) -> float:
    if expected == 0:
        return abs(float(value))
    return abs(float((Decimal(float(value)) - expected) / expected))


@pytest.fixture(scope="module")
def grid() -> list[np.ndarray]:
    axes = np.meshgrid(XS, KS, QS, indexing="ij")
    return [axis.ravel().astype(np.float32) for axis in axes]


@pytest.fixture(autouse=True)
def many_digits():
    with localcontext() as context:
        context.prec = 120
        yield


@pytest.mark.parametrize(
    ("k", "q", "expected"),
    [
        (1, 0.5, [0, 0.09761770, 0.44948974, 0.82842712, 1.46410162, 4.63324958, 18.09975124]),
        (1, 1, [0, 0.09531018, 0.40546511, 0.69314718, 1.09861229, 2.39789527, 4.61512052]),
        (1, 2, [0, 0.09090909, 0.33333333, 0.5, 0.66666667, 0.90909091, 0.99009901]),
    ],
)
def test_golden_values(k, q, expected):
    x = np.array([0, 0.1, 0.5, 1, 2, 10, 100], np.float32)
    np.testing.assert_allclose(length_penalty(x, k, q), expected, rtol=5e-7, atol=1e-8)


def test_exact_on_a_grid_with_all_limits(grid):
    values = penalty(*grid)
    errors = [
        relative_error(value, exact(*as_decimals(*point)))
        for value, *point in zip(values, *grid, strict=True)
    ]
    worst = int(np.argmax(errors))
    assert errors[worst] < 1e-6, [axis[worst] for axis in grid]


@settings(max_examples=150, deadline=None)
@given(
    x=st.floats(0, 2**30, width=32),
    k=st.floats(0, 2**10, width=32),
    q=st.floats(0, 8, width=32) | st.sampled_from([0.0, 1.0, *NEXT_TO_ONE, 1 - 2**-20]),
)
def test_exact_anywhere(x, k, q):
    with localcontext() as context:
        context.prec = 200
        expected = exact(Decimal(x), Decimal(k), Decimal(q))
        value = float(penalty(x, k, q))
        # float32 has no relative precision left below its smallest normal number
        assert abs(Decimal(value) - expected) <= expected * Decimal("1e-6") + Decimal("1e-37")


def test_limits():
    x = np.logspace(-6, 9, 200, dtype=np.float32)
    np.testing.assert_array_equal(length_penalty(x, 0.0, 2.0), x)
    np.testing.assert_array_equal(length_penalty(x, 1e-30, 2.0), x)
    np.testing.assert_array_equal(length_penalty(0.0, 1.0, np.array([0, 0.5, 1, 2])), 0)
    np.testing.assert_allclose(length_penalty(x, 3.0, 0.0), x, rtol=4e-7)
    logarithm = np.log1p(3 * x.astype(np.float64)) / 3
    np.testing.assert_allclose(length_penalty(x, 3.0, 1.0), logarithm, rtol=4e-7)
    np.testing.assert_allclose(length_penalty(1e30, 2.0, 3.0), 1 / (2 * (3 - 1)), rtol=1e-7)


@pytest.mark.parametrize(
    ("k", "q", "expected"),
    # what the printed formula gives in float32: .95367, .98348 and 0.0
    [(2, 1 - 1e-6, 0.972956), (2, 1 + 1e-6, 0.972954), (1e-8, 0.5, 3.0)],
)
def test_where_the_printed_formula_fails(k, q, expected):
    assert float(length_penalty(3.0, k, q)) == pytest.approx(expected, abs=1e-6)


def test_marginal_cost(grid):
    x, k, q = (axis.astype(np.float64) for axis in grid)
    by_x = gradients(*grid)[0]
    np.testing.assert_allclose(by_x, (1 + k * x) ** -q, rtol=5e-6, atol=1e-37)


def test_gradients_are_finite_everywhere(grid):
    for gradient in gradients(*grid):
        assert np.isfinite(gradient).all()


def test_gradients_by_k_and_q_against_differences():
    """Central differences with 120 digits, of which 40 are left."""
    points = np.meshgrid([1e-3, 0.5, 3.0, 50.0, 1e4], [1e-4, 0.1, 1.0, 20.0], QS[2:], indexing="ij")
    points = [axis.ravel().astype(np.float32) for axis in points]
    step = Decimal(10) ** -40
    beside = Decimal(10) ** -60  # keeps q +- step off the singularity at 1
    _, by_k, by_q = gradients(*points)
    for dk, dq, *point in zip(by_k, by_q, *points, strict=True):
        x, k, q = as_decimals(*point)
        q = q + beside
        expected_k = (exact(x, k + step, q) - exact(x, k - step, q)) / (2 * step)
        expected_q = (exact(x, k, q + step) - exact(x, k, q - step)) / (2 * step)
        assert relative_error(dk, expected_k) < 2e-6, point
        assert relative_error(dq, expected_q) < 2e-6, point


def test_gradients_by_k_and_q_at_the_limits():
    # C = x - q k x^2 / 2 + ..., and C = x - q ((1 + x) log(1 + x) - x) + ... for k = 1
    by = jax.grad(length_penalty, argnums=(1, 2))
    np.testing.assert_allclose(by(3.0, 0.0, 2.0), [-9.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(by(3.0, 1.0, 0.0), [0.0, 3 - 4 * np.log(4.0)], rtol=1e-6, atol=1e-6)


def test_second_derivatives():
    curvature = jax.jit(jax.grad(jax.grad(length_penalty)))
    assert float(curvature(3.0, 2.0, 1.5)) == pytest.approx(-1.5 * 2 * 7**-2.5, rel=1e-5)
    bend = jax.jit(jax.grad(jax.grad(length_penalty, 2), 2))
    assert float(bend(3.0, 1.0, 1.0)) == pytest.approx(np.log(4.0) ** 3 / 3, rel=1e-5)
    # of log(1 + k x) / k and its neighbours in q, at x = 3, k = 1, q = 1
    log = np.log(4.0)
    by_kk, by_kq = 2 * log - 2 * 3 / 4 - (3 / 4) ** 2, log**2 / 2 - 3 / 4 * log
    by_x, by_k, by_q = jax.jit(jax.hessian(length_penalty, (0, 1, 2)))(3.0, 1.0, 1.0)
    np.testing.assert_allclose(by_x, [-1 / 16, -3 / 16, -log / 4], rtol=1e-5)
    np.testing.assert_allclose(by_k, [-3 / 16, by_kk, by_kq], rtol=1e-5)
    np.testing.assert_allclose(by_q, [-log / 4, by_kq, log**3 / 3], rtol=1e-5)


def test_counts_broadcasting_and_transformations():
    counts = jnp.array([[0, 1, 2, 10]])  # int32: token counts
    q = jnp.array([[0.5], [1.0]])
    expected = [2 * (np.sqrt(1 + np.array(counts[0])) - 1), np.log1p(np.array(counts[0]))]
    values = jax.jit(length_penalty)(counts, 1, q)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(length_penalty, (None, None, 0))(counts[0], 1.0, q[:, 0]), expected, rtol=1e-6
    )


def test_bfloat16_counts_are_penalised_in_float32():
    assert length_penalty(jnp.bfloat16(3), 1.0, 1.0).dtype == jnp.float32


@pytest.mark.parametrize(("x", "k"), [(-1.0, 1.0), (-1e-6, 0.0), (1.0, -0.5)])
def test_outside_the_domain_it_is_nan(x, k):
    assert np.isnan(length_penalty(x, k, 0.5))
    assert np.isnan(jax.jit(jax.grad(length_penalty))(x, k, 0.5))
