"""NVFP4 by codes: golden tokens, IEEE division next to every tie, every backend, NaN."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import float_bits as fb
from pallas_kernels import nvfp4
from pallas_kernels.nvfp4 import arg_specs, reference, rounding, tpu

BF16, F32 = ml_dtypes.bfloat16, np.float32
run_optimised = jax.jit(nvfp4.quantize, static_argnames=("scale", "impl"))
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # most programs here run once
run = jax.jit(
    nvfp4.quantize,
    static_argnames=("scale", "impl"),
    compiler_options=FAST_COMPILE,
)
decode = jax.jit(nvfp4.dequantize, static_argnames="dtype", compiler_options=FAST_COMPILE)


def equal(got, expected):
    """Bytes, and every bit of the outer scale."""
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def nibbles(packed):
    """Codes in order, one hexadecimal digit each."""
    packed = np.asarray(packed).reshape(-1)
    return "".join(f"{byte & 15:x}{byte >> 4:x}" for byte in packed)


def test_golden_elements():
    x = [0, -0.0, 0.25, 0.2500001, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.0000005, 6, 6.5, 7, 1e9]
    x = np.array([*x, np.inf, -np.inf], F32)
    borders = rounding.borders(rounding.bases(jnp.full(x.shape, fb.ONE)))
    codes = rounding.element_codes(fb.from_float(x), borders)
    np.testing.assert_array_equal(codes, [0, 8, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 7, 7, 7, 7, 15])
    np.testing.assert_array_equal(codes, x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


TIES = [6, 5, -5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, 0.5, 0, -0.0, 4, -6]
GOLDEN = {  # token of 32 -> outer scale, block scales, codes
    "ties": (
        TIES + [i / 4 for i in range(16)],
        6 / 2688,
        [126, 121],
        "76e6442208a1086f0122344555666777",
    ),
    "small block": ([2688] + [0] * 15 + [1, 0.25, 0.5], 1, [126, 35], "7000000000000000735"),
    "least block scale": (
        [2688] + [0] * 15 + [0.01, -0.01],
        1,
        [126, 1],
        "7000000000000000" + "7f",
    ),
    "block scale of zero": (
        [2688] + [0] * 15 + [0.005, -0.005],
        1,
        [126, 0],
        "7000000000000000" + "08",
    ),
    "zeros": ([0, -0.0], 1, [0, 0], "08"),
    "not a number": ([1, np.nan, -1] + [0] * 13 + [1], np.nan, [127, 127], "008"),
    "infinite": ([1, -np.inf], np.nan, [127, 127], "08"),
    "all negative": ([-6] * 32, 6 / 2688, [126, 126], "f" * 32),
}


@pytest.mark.parametrize("quantize", [run, nvfp4.quantize])  # compiled and eager
def test_golden_tokens(quantize):
    tokens, g, scales, codes = zip(*GOLDEN.values(), strict=True)
    x = np.stack([np.pad(np.array(token, F32), (0, 32 - len(token))) for token in tokens])
    got = quantize(jnp.asarray(x))
    np.testing.assert_array_equal(got.outer_scale, F32(g))
    np.testing.assert_array_equal(got.block_scales, scales)
    assert [nibbles(row) for row in got.codes] == [row.ljust(32, "0") for row in codes]
    equal(reference.quantize(x), got)


def check_near_ties(x):
    codes, scales, g = reference.quantize(x)
    equal(run_optimised(x), (codes, scales, g))
    # and the inputs are hard: fast division gets a tenth of them wrong, and only codes show it
    fast = run(x, impl="reciprocal")
    assert (np.asarray(fast.codes) != codes).mean() > 0.05


def test_next_to_ties_codes_are_those_of_ieee_division():
    check_near_ties(arg_specs.near_ties(512, 256))


@pytest.mark.slow
def test_next_to_ten_million_ties_codes_are_those_of_ieee_division():
    for seed in range(80):
        check_near_ties(arg_specs.near_ties(512, 256, seed + 1))


@pytest.mark.parametrize("octaves", [0, 1, 2, 5, 12])
def test_every_bf16_number_in_a_block_with_some_larger_number(octaves):
    bits = np.arange(0x7F80).reshape(-1, 15)
    bits = np.concatenate([np.minimum(bits[:, -1:] + (octaves << 7), 0x7F7F), bits], 1)
    token = np.random.default_rng(octaves).integers(0, 0x0300, (len(bits), 16))
    token = np.concatenate([np.minimum(bits[:, :1] + token, 0x7F7F), bits], 1)
    x = token.astype(np.uint16).view(BF16)
    equal(run_optimised(x), reference.quantize(x))


def test_sixths_are_those_of_ieee_division():
    rng = np.random.default_rng(0)
    x = np.concatenate([np.arange(0x7F80) << 16, rng.integers(0, fb.INF, 100_000)])
    x = np.concatenate([x, np.arange(1000), 0x00800000 + np.arange(-9, 9)]).astype(np.int32)
    expected = (x.view(F32) / F32(6)).view(np.int32)
    np.testing.assert_array_equal(jax.jit(rounding.sixths)(x), expected)


def by_double_rounding(token):
    """The rule in f64, each step rounded to f32, which gives IEEE f32 division's results."""

    def divide(a, b):
        return np.float32(np.float64(a) / np.float64(b))

    amax = np.abs(token).max()
    g = divide(amax, 2688) or np.float32(1)
    codes, scales = [], []
    for block in token.reshape(-1, 16):
        ratio = min(divide(divide(np.abs(block).max(), 6), g), np.float32(448))
        s = ratio.astype(ml_dtypes.float8_e4m3fn)
        scales.append(int(s.view(np.uint8)))
        d = np.float32(np.float64(s) * np.float64(g))
        for x in block:
            q = divide(abs(x), d) if s > 0 else 0
            above = q > 0.25, q >= 0.75, q > 1.25, q >= 1.75, q > 2.5, q >= 3.5, q > 5
            codes.append(sum(map(int, above)) | (8 if np.signbit(x) else 0))
    return "".join(f"{code:x}" for code in codes), scales, g


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    top=st.integers(0, 254),
    octaves=st.sampled_from([0, 3, 9, 60]),
    digits=st.sampled_from([3, 7, 23]),
)
def test_any_token_equals_the_rule_step_by_step(seed, top, octaves, digits):
    rng = np.random.default_rng(seed)
    exponents = np.maximum(top - rng.integers(0, octaves + 1, 32), 0)
    mantissas = rng.integers(0, 1 << digits, 32) << 23 - digits
    bits = rng.integers(0, 2, 32) << 31 | exponents << 23 | mantissas
    token = bits.astype(np.uint32).view(F32)
    got = run(token[None])
    codes, scales, g = by_double_rounding(token)
    assert (nibbles(got.codes), np.asarray(got.block_scales)[0].tolist()) == (codes, scales)
    assert np.asarray(got.outer_scale)[0] == g


@pytest.mark.parametrize("spec", arg_specs.TESTS)
def test_bytes_equal_the_formula(spec):
    x = arg_specs.wild(spec.shape, spec.dtype)
    got = run(x, spec.scale)
    assert [a.dtype for a in got] == [jnp.uint8, jnp.uint8, jnp.float32]
    equal(got, reference.quantize(x, spec.scale))


def test_normal_numbers_equal_the_formula_and_err_as_published():
    x = arg_specs.normal((512, 1024), BF16)
    got = run_optimised(x)
    equal(got, reference.quantize(x))
    error = np.asarray(decode(got), np.float64) - x.astype(np.float64)
    assert np.sqrt((error**2).mean()) == pytest.approx(0.0951, rel=0.01)
    assert (np.asarray(got.block_scales).max(-1) == 126).all()  # 448 in the token's largest block


@pytest.mark.parametrize(
    ("scale", "tile"), [("token", (8, 64)), ("token", (32, 32)), ("tensor", (16, 96))]
)
def test_bytes_of_the_kernel_do_not_depend_on_tiles(scale, tile):
    x = arg_specs.wild((20, 96), BF16)
    if scale == "token":
        x[3, 5], x[17, 90] = np.nan, -np.inf
    kernel = partial(tpu.quantize, scale=scale, tile=tile, interpret=True)
    got = jax.jit(kernel, compiler_options=FAST_COMPILE)(x)
    equal(got, reference.quantize(x, scale))


def test_the_kernel_lowers_for_tpus():
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    lowered = run.trace(x, impl="tpu").lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize(
    ("impl", "divides"), [("xla", False), ("tpu", False), ("reciprocal", True)]
)
def test_only_the_ablation_divides(impl, divides):
    quantize = partial(nvfp4.quantize, impl=impl)
    jaxpr = str(jax.make_jaxpr(quantize)(jnp.zeros((32, 64), jnp.bfloat16)))
    assert (" div " in jaxpr) == divides
    assert not [op for op in (" log", " exp", "f8_", "f4_") if op in jaxpr]


def test_a_token_depends_on_nothing_else_by_a_bit():
    x = arg_specs.normal((512, 64), BF16)
    whole = [np.asarray(a) for a in run(x)]
    equal(run(x[7:8]), (a[7:8] for a in whole))
    padded = run(np.concatenate([x, np.zeros_like(x[:40])]))
    equal((a[:512] for a in padded), whole)
    x[100] *= 1e5
    equal((np.delete(a, 100, 0) for a in run(x)), (np.delete(a, 100, 0) for a in whole))


def test_a_tensor_scale_leaks_one_token_into_all_others():
    x = arg_specs.normal((512, 512), BF16)
    before = np.asarray(run(x, "tensor").codes)
    x[100] *= 100
    after = np.asarray(run(x, "tensor").codes)
    changed = np.delete((before ^ after) & 15 != 0, 100, 0).mean()
    assert 0.05 < changed < 0.1


def transformer_engine(x):
    """TransformerEngine's row-scaled rule, from its description: other operations on f32 numbers.

    It differs from ours where roundings fall differently: it divides 2688 by the maximum and
    multiplies by fl(1/6), and it multiplies elements by fl(1 / fl(s * fl(1 / encode))). Also, it
    drops the sign of -0, and a block whose scale rounds to zero gets the largest codes.
    """
    x = x.reshape(len(x), -1, 16)
    amax, most = np.abs(x).max(-1), np.finfo(F32).max
    largest = amax.max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.where(largest == 0, F32(1), np.minimum(F32(2688) / largest, most))
        s = (amax * (encode * (F32(1) / F32(6)))).clip(max=448).astype(ml_dtypes.float8_e4m3fn)
        factor = np.minimum(F32(1) / (s.astype(F32) * (F32(1) / encode)), most)
        codes = (x * factor[..., None]).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    codes = np.where(x == 0, 0, codes.view(np.uint8))
    return codes.reshape(len(x), -1), s.view(np.uint8)


def test_transformer_engines_rule_differs_as_described():
    for name, codes in [
        ("ties", "76e6442208a1006f0122344555666777"),  # no -0
        ("small block", "7000000000000000735"),
        ("least block scale", "70000000000000007f"),
        ("block scale of zero", "70000000000000007f"),  # decoded, the same zeros
        ("zeros", "00"),
    ]:
        token, _, scales, _ = GOLDEN[name]
        x = np.pad(np.array(token, F32), (0, 32 - len(token)))
        theirs, their_scales = transformer_engine(x[None])
        assert "".join(f"{code:x}" for code in theirs[0]) == codes.ljust(32, "0")
        np.testing.assert_array_equal(their_scales[0], scales)
    x = arg_specs.normal((512, 1024), BF16).astype(F32)
    theirs, scales = transformer_engine(x)
    ours = run(x)
    packed = np.asarray(ours.codes)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(theirs.shape)
    steps = np.abs((codes & 7).astype(int) - (theirs & 7))
    assert steps.max() == 1 and 0 < steps.mean() < 2e-3
    assert 0 < (scales != np.asarray(ours.block_scales)).mean() < 5e-3


def test_fast_division_is_what_its_name_says():
    x = arg_specs.normal((512, 1024), BF16)

    def rule(x):
        def divide(a, b):
            return a * (F32(1) / F32(b))

        blocks = x.astype(F32).reshape(512, -1, 16)
        amax = np.abs(blocks).max(-1)
        g = divide(amax.max(-1), 2688)
        s = divide(divide(amax, 6), g[:, None]).clip(max=448).astype(ml_dtypes.float8_e4m3fn)
        codes = divide(blocks, (s.astype(F32) * g[:, None])[..., None])
        codes = codes.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(512, -1, 2)
        return codes[..., 0] | codes[..., 1] << 4, s.view(np.uint8), g

    fast = run(x, impl="reciprocal")
    equal(fast, rule(x))
    wrong = (np.asarray(fast.codes) != np.asarray(run(x).codes)).mean()
    assert 1e-5 < wrong < 1e-2
    x[3, 5] = np.nan
    fast = run(x, impl="reciprocal")
    assert np.isnan(fast.outer_scale[3]) and np.isfinite(np.delete(fast.outer_scale, 3)).all()
    assert np.isnan(decode(fast)[3]).all()


def test_a_nan_stays_visible():
    x = arg_specs.normal((4, 64), F32)
    x[1, 9], x[2, 9] = np.nan, np.inf
    value = np.asarray(decode(run(x)))
    np.testing.assert_array_equal(np.isnan(value).all(-1), [False, True, True, False])
    assert np.isfinite(value[[0, 3]]).all()
    assert np.isnan(decode(run(x, "tensor"))).all()


@pytest.mark.parametrize("scale", ["token", "tensor"])
def test_decoded_numbers_are_code_times_scales(scale):
    got = run(arg_specs.normal((64, 96), BF16), scale)
    packed = np.asarray(got.codes)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(64, 6, 16)
    value = codes.view(ml_dtypes.float4_e2m1fn).astype(F32)
    value = (
        value * np.asarray(got.block_scales).view(ml_dtypes.float8_e4m3fn).astype(F32)[..., None]
    )
    unscaled = got._replace(outer_scale=jnp.ones_like(got.outer_scale))
    np.testing.assert_array_equal(decode(unscaled, dtype=jnp.bfloat16), value.reshape(64, 96))
    outer = np.asarray(got.outer_scale)[..., None]
    np.testing.assert_array_equal(decode(got), value.reshape(64, 96) * outer)


def test_operands_give_the_product_that_xla_gives():
    a, b = arg_specs.normal((2, 48, 256), F32)
    qa, qb = (q._replace(outer_scale=jnp.ones(48)) for q in (run(a), run(b)))

    def parts(q):
        # XLA's E2M1 arrays hold one element each; converting decoded numbers to them is exact
        codes = decode(q).astype(jnp.float32).reshape(48, 16, 16)
        scales = jax.lax.bitcast_convert_type(q.block_scales, jnp.float8_e4m3fn)
        codes = codes / scales.astype(jnp.float32)[..., None]
        return codes.reshape(48, 256).astype(jnp.float4_e2m1fn), scales

    (ca, sa), (cb, sb) = parts(qa), parts(qb)
    theirs = jax.lax.scaled_dot(
        ca, cb.T, lhs_scale=sa, rhs_scale=sb.T, preferred_element_type=jnp.float32
    )
    exact = np.asarray(decode(qa), np.float64) @ np.asarray(decode(qb)).T
    np.testing.assert_allclose(theirs, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())


def test_torchao_differs_in_a_few_codes_by_one_step():
    theirs = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    torch = pytest.importorskip("torch")
    x = arg_specs.normal((512, 1024), BF16)
    ours = run(x, "tensor")
    tensor = torch.from_numpy(x.astype(F32)).bfloat16()
    scales, codes = theirs.nvfp4_quantize(tensor, 16, torch.tensor(float(ours.outer_scale)))
    assert (codes.numpy() != np.asarray(ours.codes)).mean() < 2e-3
    assert (scales.view(torch.uint8).numpy() != np.asarray(ours.block_scales)).mean() < 5e-3


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 40), {}, "multiple of 16"),
        ((), {}, "multiple of 16"),
        ((2, 64), {"scale": "channel"}, "'tensor'"),
        ((2, 64), {"impl": "cuda"}, "'reciprocal'"),
    ],
)
def test_bad_input_is_named(shape, options, message):
    with pytest.raises(ValueError, match=message):
        nvfp4.quantize(jnp.zeros(shape, jnp.bfloat16), **options)


def test_what_cannot_be_done_is_named():
    with pytest.raises(NotImplementedError, match="empty"):
        nvfp4.quantize(jnp.zeros((0, 32)), impl="interpret")
    with pytest.raises(TypeError, match="float16"):
        nvfp4.quantize(jnp.zeros((2, 32), jnp.float16))
