"""Grouped matmul against formulas in f64, ragged_dot and itself: values, gradients, NaN, bits."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import arg_specs, grouped_matmul, reference, tpu

BF16 = ml_dtypes.bfloat16
PRECISIONS = ("native", "mxfp8", "nvfp4")
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # most programs here run a few times
RAGGED = arg_specs.TESTS["ragged, some rows left"]


def _all_three(lhs, rhs, d_out, group_sizes, precision="native", impl="xla"):
    """The result and both gradients."""
    product = partial(grouped_matmul, group_sizes=group_sizes, precision=precision, impl=impl)
    out, pullback = jax.vjp(product, lhs, rhs)
    return out, *pullback(d_out)


run = jax.jit(_all_three, static_argnames=("precision", "impl"), compiler_options=FAST_COMPILE)
run_optimised = jax.jit(_all_three, static_argnames=("precision", "impl"))


def formulas(lhs, rhs, d_out, group_sizes, precision="native"):
    """The same three in f64."""
    return (
        reference.forward(lhs, rhs, group_sizes, precision),
        *reference.gradients(lhs, rhs, group_sizes, d_out, precision),
    )


def check_f32_sums(got, args, precision="native"):
    """Errors as of f32 sums and of two more roundings, relative to the sum without its signs."""
    lhs, rhs, d_out, sizes = args
    absolute = formulas(*map(np.abs, (lhs, rhs, d_out)), sizes, precision)
    exact = formulas(*args, precision)
    for ours, value, positive, terms in zip(
        got, exact, absolute, (lhs.shape[1], rhs.shape[2], max(sizes)), strict=True
    ):
        error = np.abs(np.asarray(ours, np.float64) - value)
        bound = 2.0**-24 * (2 + 2 * terms**0.5) * positive  # roundings add up like a random walk
        assert (error <= bound).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", arg_specs.TESTS)
def test_values_and_gradients_err_by_f32_sums_only(name, precision):
    args = arg_specs.TESTS[name].arrays(octaves=8)
    check_f32_sums(run(*args, precision=precision), args, precision)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, RAGGED.rows), min_size=7, max_size=7),
    st.sampled_from(PRECISIONS),
)
def test_any_sizes(borders, precision):
    sizes = np.diff(np.sort(borders), prepend=0).astype(np.int32)
    args = *RAGGED.arrays(octaves=8)[:3], sizes
    check_f32_sums(run(*args, precision=precision), args, precision)


def test_equals_ragged_dot():
    lhs, rhs, d_out, sizes = args = RAGGED.arrays(1)

    def theirs(lhs, rhs, d_out):
        out, pullback = jax.vjp(lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, sizes), lhs, rhs)
        return out, *pullback(d_out)

    d_out[sizes.sum() :] = 0  # there it leaves values to the platform
    theirs = jax.jit(theirs, compiler_options=FAST_COMPILE)(lhs, rhs, d_out)
    rows = slice(sizes.sum())
    ours = run(*args)
    np.testing.assert_allclose(ours[0][rows], theirs[0][rows], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(ours[1][rows], theirs[1][rows], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weights", [BF16, np.float32])
def test_bf16_results_are_rounded_once(weights):
    *floats, sizes = RAGGED.arrays()
    lhs, rhs, d_out = (x.astype(BF16) for x in floats)
    got = run(lhs, floats[1].astype(weights), d_out, sizes)
    assert [x.dtype for x in got] == [BF16, BF16, weights]
    for ours, exact in zip(got, formulas(lhs, rhs, d_out, sizes), strict=True):
        half_unit = 2.0**-8 if ours.dtype == BF16 else 2.0**-24
        error = np.abs(np.asarray(ours, np.float64) - exact)
        assert (error <= half_unit * 1.01 * np.abs(exact) + 1e-5).all()  # some of f32 sums


def relative(got, exact):
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_low_precision_errs_as_published_for_normal_numbers(precision):
    """MXFP8 0.0376 and NVFP4 0.0951 * 2**0.5 for products of two rounded operands."""
    *floats, _ = RAGGED.arrays(2)
    args = *floats, np.array([0, 128, 0, 64, 128, 32, 32], np.int32)
    errors = list(map(relative, run(*args, precision=precision), formulas(*args)))
    forward = {"mxfp8": 0.0376, "nvfp4": 0.1345}[precision]
    np.testing.assert_allclose(errors, [forward, 0.0376, 0.0376], rtol=0.02)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_does_not_depend_on_other_rows_or_sizes_by_a_bit(precision):
    lhs, rhs, d_out, sizes = RAGGED.arrays(3)
    rhs[:] = rhs[0]  # so that rows may change groups
    out, d_lhs, _ = run(lhs, rhs, d_out, sizes, precision=precision)
    rng = np.random.default_rng(0)
    for other_sizes in ([40] * 7, [1, 2, 3, 4, 5, 6, 300], [0, 392, 0, 0, 0, 0, 0]):
        order = rng.permutation(sizes.sum())
        new_lhs, new_d_out = 1e4 * lhs, 1e4 * d_out
        new_lhs[: len(order)], new_d_out[: len(order)] = lhs[order], d_out[order]
        new_sizes = np.array(other_sizes, np.int32)
        got, d_got, _ = run(new_lhs, rhs, new_d_out, new_sizes, precision=precision)
        np.testing.assert_array_equal(got[: len(order)], out[order])
        np.testing.assert_array_equal(d_got[: len(order)], d_lhs[order])


def test_a_row_does_not_depend_on_the_number_of_rows_by_a_bit():
    spec = arg_specs.ArgSpec(700, 512, 384, (700,))  # large enough for fast matmul code
    *floats, sizes = spec.arrays()
    lhs, rhs, d_out = (x.astype(BF16) for x in floats)
    out, d_lhs, _ = run_optimised(lhs, rhs, d_out, sizes)
    got, d_got, _ = run_optimised(lhs[-1:], rhs, d_out[-1:], np.int32([1]))
    np.testing.assert_array_equal(got, out[-1:])
    np.testing.assert_array_equal(d_got, d_lhs[-1:])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_inf_and_large_numbers_stay_in_their_group(precision):
    lhs, rhs, d_out, sizes = RAGGED.arrays(4)
    clean = run(lhs, rhs, d_out, sizes, precision=precision)
    groups = reference.groups(sizes)
    rest, large, bad = slice(sizes.sum(), None), groups[4], groups[3]
    lhs[rest], d_out[rest] = np.nan, np.inf
    lhs[large.start] *= 1e4  # first of its group: a block across the border would see it
    d_out[large.start] *= 1e4
    lhs[bad.start + 5, 3], d_out[bad.start + 7, 9] = np.nan, np.nan
    out, d_lhs, d_rhs = map(np.asarray, run(lhs, rhs, d_out, sizes, precision=precision))
    assert np.isnan(out[bad.start + 5]).all() and np.isnan(d_lhs[bad.start + 7]).all()
    assert np.isnan(d_rhs[3]).any() and np.isfinite(d_rhs[4]).all()
    assert not out[rest].any() and not d_lhs[rest].any()
    others = np.setdiff1d(np.arange(sizes.sum()), [bad.start + 5, bad.start + 7, large.start])
    np.testing.assert_array_equal(out[others], clean[0][others])
    np.testing.assert_array_equal(d_lhs[others], clean[1][others])
    np.testing.assert_array_equal(d_rhs[[0, 1, 2, 5, 6]], clean[2][np.array([0, 1, 2, 5, 6])])
    assert not d_rhs[[0, 2, 6]].any()  # empty groups


@pytest.mark.parametrize("name", arg_specs.TESTS)
def test_the_kernels_equal_xla(name):
    *floats, sizes = arg_specs.TESTS[name].arrays(5)
    lhs, rhs, d_out = (x.astype(BF16) for x in floats)
    lhs[sizes.sum() :], d_out[sizes.sum() :] = np.nan, np.inf
    got = run(lhs, rhs, d_out, sizes, impl="interpret")
    for ours, theirs in zip(got, run(lhs, rhs, d_out, sizes), strict=True):
        np.testing.assert_allclose(
            np.float32(ours), np.float32(theirs), rtol=2.0**-7, atol=1e-5
        )  # one unit in the last place


def test_the_kernel_scales_sums_and_covers_columns_that_tiles_do_not_divide():
    lhs, rhs, _, sizes = arg_specs.ArgSpec(150, 32, 288, (20, 0, 125)).arrays()
    rng = np.random.default_rng(0)
    scales = tuple(rng.uniform(1, 2, shape).astype(np.float32) for shape in (150, (3, 288)))
    kernel = partial(tpu.matmul, dtype=jnp.float32, transposed=True, interpret=True)
    got = jax.jit(kernel)(lhs, rhs.swapaxes(1, 2), sizes, scales=scales)
    group = np.repeat([0, 2, 0], [20, 125, 5])
    exact = reference.forward(lhs, rhs, sizes) * scales[0][:, None] * scales[1][group]
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-5)


def test_the_kernels_lower_for_tpus():
    shapes = (512, 1024), (8, 1024, 1024), (512, 1024)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    traced = run.trace(*args, sizes, precision="nvfp4", impl="tpu")
    # three products, both operands of each rounded
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 9
    with pytest.raises(NotImplementedError, match=r"n = .*100000.* must fit"):
        wide = jax.ShapeDtypeStruct((8, 1024, 100_000), jnp.bfloat16)
        d_out = jax.ShapeDtypeStruct((512, 100_000), jnp.bfloat16)
        run.trace(args[0], wide, d_out, sizes, impl="tpu")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"lhs": (8, 48)}, ValueError, r"lhs \(8, 48\) and rhs \(2, 64, 96\)"),
        ({"sizes": (3,)}, ValueError, r"group_sizes \(3,\)"),
        ({"dtype": np.float16}, TypeError, "float16"),
        ({"precision": "fp8"}, ValueError, "'fp8'; legal are 'native', 'mxfp8', 'nvfp4'"),
        ({"impl": "triton"}, ValueError, "'triton'; legal are"),
        ({"lhs": (8, 48), "rhs": (2, 48, 96), "precision": "mxfp8"}, NotImplementedError, "48"),
        ({"rhs": (2, 64, 80), "precision": "nvfp4"}, NotImplementedError, r"64, 80.*\(16, 32\)"),
        ({"lhs": (0, 64), "impl": "interpret"}, NotImplementedError, "empty"),
    ],
)
def test_bad_arguments_are_named(change, error, text):
    legal = {"lhs": (8, 64), "rhs": (2, 64, 96), "sizes": (2,), "dtype": np.float32}
    a = legal | {"precision": "native", "impl": "xla"} | change
    lhs, rhs = jnp.zeros(a["lhs"], a["dtype"]), jnp.zeros(a["rhs"], a["dtype"])
    sizes = jnp.zeros(a["sizes"], jnp.int32)
    with pytest.raises(error, match=text):
        grouped_matmul(lhs, rhs, sizes, precision=a["precision"], impl=a["impl"])
