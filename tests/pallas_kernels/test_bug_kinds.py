"""Kinds of bugs that low-precision training has had elsewhere, and the tests that would see each.

 1. Approximate division.
    test_nvfp4.py::test_golden_tokens
    test_nvfp4.py::test_next_to_ties_codes_are_those_of_ieee_division
    test_nvfp4.py::test_next_to_ten_million_ties_codes_are_those_of_ieee_division
    test_nvfp4.py::test_only_the_ablation_divides
    test_mxfp8.py::test_nothing_is_divided
    test_aot.py::test_quantisers_hold_no_approximate_division_and_a_plain_quotient_does
    test_quantise_gpu.py::test_nvfp4_next_to_ties_is_ieee_division
    test_float_bits.py::test_division_is_ieee_whatever_the_reciprocal
 2. A scale rounded in the wrong direction.
    test_mxfp8.py::test_golden_blocks
    test_mxfp8.py::test_normal_numbers_never_saturate_and_err_as_published
    test_mxfp8.py::test_scales_are_those_of_rounding_a_quotient_up_as_ptx_does
 3. log2 and ceil in low precision.
    test_mxfp8.py::test_the_scale_is_exact_next_to_every_power_of_two
 4. Blocks and tokens of zeros.
    test_mxfp8.py::test_golden_blocks
    test_nvfp4.py::test_golden_tokens
    test_bug_kinds.py::test_zeros_have_finite_results_and_gradients
 5. Subnormal numbers, flushed or not, and tiny blocks.
    test_mxfp8.py::test_golden_blocks
    test_mxfp8.py::test_every_pair_of_codes_decodes_exactly
    test_mxfp8.py::test_any_block_of_bf16_equals_a_search_over_all_codes
    test_nvfp4.py::test_any_token_equals_the_rule_step_by_step
 6. Overflow and saturation.
    test_mxfp8.py::test_every_bf16_number_in_a_block_with_every_larger_exponent
    test_mxfp8.py::test_golden_e4m3
    test_nvfp4.py::test_golden_elements
    test_nvfp4.py::test_normal_numbers_equal_the_formula_and_err_as_published
    test_bug_kinds.py::test_finite_numbers_never_get_the_code_of_nan
 7. NaN and infinity that vanish.
    test_mxfp8.py::test_golden_blocks
    test_nvfp4.py::test_a_nan_stays_visible
    test_grouped_matmul.py::test_nan_inf_and_large_numbers_stay_in_their_group
 8. Dependence on the batch, other tokens or tiles.
    test_mxfp8.py::test_a_block_depends_on_nothing_else
    test_mxfp8.py::test_bytes_of_the_kernel_do_not_depend_on_tiles
    test_nvfp4.py::test_a_token_depends_on_nothing_else_by_a_bit
    test_nvfp4.py::test_a_tensor_scale_leaks_one_token_into_all_others
    test_nvfp4.py::test_bytes_of_the_kernel_do_not_depend_on_tiles
    test_grouped_matmul.py::test_a_row_does_not_depend_on_other_rows_or_sizes_by_a_bit
    test_grouped_matmul.py::test_a_row_does_not_depend_on_the_number_of_rows_by_a_bit
 9. Empty groups and ragged tails. Interpreted kernels start from buffers of NaN.
    test_grouped_matmul.py::test_values_and_gradients_err_by_f32_sums_only
    test_grouped_matmul.py::test_any_sizes
    test_grouped_matmul.py::test_the_kernels_equal_xla
10. Blocks of a weight gradient across groups.
    test_mxfp8.py::test_groups_are_quantised_as_if_each_were_alone
    test_grouped_matmul.py::test_nan_inf_and_large_numbers_stay_in_their_group
11. Codes transposed in place of numbers.
    test_mxfp8.py::test_columns_are_not_transposed_rows
    test_grouped_matmul.py::test_low_precision_errs_as_published_for_normal_numbers
    test_bug_kinds.py::test_blocks_along_tokens_flatten_small_tokens
12. Layout and padding of scales, order of nibbles, inputs that are views.
    test_scale_layout.py::test_every_scale_is_where_the_formula_says
    test_scale_layout.py::test_swizzling_comes_back_and_fills_up_with_zeros
    test_float_bits.py::test_the_even_nibble_is_the_low_one
    test_bug_kinds.py::test_torchao_swizzles_alike
    test_bug_kinds.py::test_views_are_quantised_like_copies
13. An outer scale at the wrong place, twice, or of another token. Gate and up need no common scale:
    every column of a weight has its own.
    test_grouped_matmul.py::test_values_and_gradients_err_by_f32_sums_only
    test_grouped_matmul.py::test_the_kernel_scales_sums_and_covers_columns_that_tiles_do_not_divide
    test_grouped_matmul.py::test_a_row_does_not_depend_on_other_rows_or_sizes_by_a_bit
    test_bug_kinds.py::test_an_outer_scale_folded_into_bf16_would_be_seen
14. Precision of dispatch and combine. Later: dispatch between devices.
    test_bug_kinds.py::test_experts_are_combined_in_f32
    test_bug_kinds.py::test_mxfp8_before_nvfp4_changes_a_code_in_twelve
15. Minus zero and signs.
    test_mxfp8.py::test_golden_blocks
    test_nvfp4.py::test_golden_elements
    test_nvfp4.py::test_golden_tokens
16. Order of tokens and padding in attention and its context parallelism.
    test_context.py::test_zigzag_golden_values
    test_context.py::test_zigzag_is_a_permutation_and_exactly_balanced
    test_context.py::test_what_does_not_divide_is_refused_with_the_numbers
    test_flash_attention.py::test_other_segments_and_later_tokens_have_no_effect_at_all
    test_flash_attention_positions.py::test_ranks_of_zigzag_add_up_to_the_whole
    test_flash_attention_positions.py::test_padding_may_hold_anything_and_gives_zeros
    test_flash_attention_positions.py::test_queries_without_a_key_give_zeros
    test_document_isolation.py::test_garbage_in_padding_changes_no_bit
"""

import ast
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import mxfp8, nvfp4, scale_layout
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.mxfp8 import arg_specs

BF16, F32 = ml_dtypes.bfloat16, np.float32
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # every program here runs once
jit = partial(jax.jit, compiler_options=FAST_COMPILE)
to_mxfp8, from_mxfp8 = jit(mxfp8.quantize, static_argnums=1), jit(mxfp8.dequantize)
to_nvfp4, from_nvfp4 = jit(nvfp4.quantize), jit(nvfp4.dequantize)


def test_every_kind_has_tests_that_exist():
    kinds = re.split(r"^ ?(\d+)\. ", __doc__, flags=re.MULTILINE)
    assert [int(number) for number in kinds[1::2]] == list(range(1, 17))
    paths = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for kind in kinds[2::2]:
        named = re.findall(r"(test_\w+\.py)::(test_\w+)", kind)
        assert named
        for file, name in named:
            functions = ast.parse(paths[file].read_text()).body
            assert name in [f.name for f in functions if isinstance(f, ast.FunctionDef)]


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_zeros_have_finite_results_and_gradients(precision):
    lhs, d_out = arg_specs.normal((2, 64, 64), F32)
    rhs = arg_specs.normal((2, 64, 64), F32)
    lhs[3], lhs[8:, :32], d_out[5], d_out[32:], rhs[0, :, 7], rhs[1] = (0,) * 6

    def all_three(lhs, rhs, d_out, sizes):
        product = partial(grouped_matmul, group_sizes=sizes, precision=precision)
        out, pullback = jax.vjp(product, lhs, rhs)
        return out, *pullback(d_out)

    out, d_lhs, d_rhs = map(np.asarray, jit(all_three)(lhs, rhs, d_out, np.int32([40, 24])))
    assert all(np.isfinite(x).all() for x in (out, d_lhs, d_rhs))
    assert not out[3].any() and not out[40:].any() and not out[:40, 7].any()
    assert not d_lhs[5].any() and not d_lhs[32:].any() and not d_rhs[1].any()


def test_finite_numbers_never_get_the_code_of_nan():
    bits = np.arange(0x10000, dtype=np.uint16).view(BF16)
    finite = np.sort(bits[np.isfinite(bits.astype(F32))])
    finite = np.resize(finite, 2040 * 32).reshape(2040, 32)  # in order, so of all block maxima
    got = to_mxfp8(finite)
    assert not (np.asarray(got.codes) & 0x7F == 0x7F).any() and (np.asarray(got.scales) < 255).all()
    got = to_nvfp4(finite)
    assert not (np.asarray(got.block_scales) == 0x7F).any() and np.isfinite(got.outer_scale).all()


def test_blocks_along_tokens_flatten_small_tokens():
    """Where tokens differ in size a block of 32 tokens has the scale of its largest."""
    x = arg_specs.normal((4096, 32), F32)
    x *= np.exp2(np.random.default_rng(0).integers(-8, 9, (4096, 1))).astype(F32)

    def errors(axis):
        error = np.asarray(from_mxfp8(to_mxfp8(x, axis))) - x
        return np.linalg.norm(error, axis=1) / np.linalg.norm(x, axis=1)

    along_tokens, along_features = errors(0), errors(1)
    assert along_features.mean() == pytest.approx(0.0266, rel=0.03)
    assert along_tokens.max() > 3 * along_features.max()


def test_torchao_swizzles_alike():
    theirs = pytest.importorskip("torchao.prototype.mx_formats.utils")
    torch = pytest.importorskip("torch")
    scales = np.random.default_rng(0).integers(0, 256, (300, 10), dtype=np.uint8)
    ours = np.asarray(scale_layout.swizzle(jnp.asarray(scales)))
    np.testing.assert_array_equal(ours.reshape(-1), theirs.to_blocked(torch.from_numpy(scales)))


@pytest.mark.parametrize("quantize", [mxfp8.quantize, nvfp4.quantize], ids=["mxfp8", "nvfp4"])
def test_views_are_quantised_like_copies(quantize):
    x = arg_specs.normal((64, 48), BF16)

    def view(x):
        return x[::2].T

    fused = jit(lambda x: quantize(view(x)))(x)
    for ours, theirs in zip(fused, jit(quantize)(np.ascontiguousarray(view(x))), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_outer_scale_folded_into_bf16_would_be_seen():
    """On the f32 sums it costs a rounding of 2**-24; in the operands two of 2**-9."""
    x, w = arg_specs.normal((2, 64, 64), BF16).astype(F32)
    left, right = (np.asarray(from_nvfp4(to_nvfp4(a))) for a in (x, w.T))
    exact = left.astype(np.float64) @ right.T
    folded = left.astype(BF16).astype(np.float64) @ right.T.astype(BF16)
    ours = jit(partial(grouped_matmul, precision="nvfp4"))(x, w[None], np.int32([64]))

    def error(got):
        return np.linalg.norm(got - exact) / np.linalg.norm(exact)

    assert error(np.asarray(ours)) < 5e-7 and 1e-3 < error(folded) < 1e-2


def test_experts_are_combined_in_f32():
    """256 + 1 + 1 is 258 in f32; bf16, which has no 257, stays at 256."""
    gate_up = np.tile(np.array([64, 1 / 64], BF16)[:, None], (3, 1, 1, 1))  # silu(64) / 64 is 1
    down = np.array([256, 1, 1], BF16).reshape(3, 1, 1)
    x, weights = np.ones((2, 1), BF16), np.ones((2, 3), F32)
    out = jit(expert_mlp)(x, np.int32([[0, 1, 2], [2, 0, 1]]), weights, gate_up, down)
    assert out.dtype == jnp.bfloat16 and out.tolist() == [[258], [258]]


def test_mxfp8_before_nvfp4_changes_a_code_in_twelve():
    """So what rounds tokens to MXFP8 on their way to NVFP4 experts must do so on both sides."""
    x = arg_specs.normal((512, 1024), BF16)
    direct, twice = to_nvfp4(x), to_nvfp4(from_mxfp8(to_mxfp8(x)).astype(jnp.bfloat16))
    packed = np.asarray(direct.codes) ^ np.asarray(twice.codes)
    assert np.stack([packed & 15, packed >> 4]).astype(bool).mean() == pytest.approx(
        0.086, abs=0.004
    )
    for q, published in ((direct, 0.0951), (twice, 0.0982)):
        error = np.asarray(from_nvfp4(q), np.float64) - x.astype(np.float64)
        assert np.sqrt((error**2).mean()) == pytest.approx(published, rel=0.01)
