"""The grouped matmul's kernels for NVIDIA GPUs: compiled for chips, interpreted, and in numpy.

No GPU is needed. What only the tensor cores know, block scales, is shown in two halves: the
compiled code has the instructions, and every step reads the codes and scales that it should.
"""

import subprocess
import sys
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import group_rows, mxfp8, nvfp4
from pallas_kernels.grouped_matmul import arg_specs, blackwell, grouped_matmul, hopper, reference
from pallas_kernels.grouped_matmul.visits import ROWS, visits
from pallas_kernels.mxfp8 import reference as mxfp8_reference

targets = pytest.importorskip("launch.targets")

BF16 = ml_dtypes.bfloat16
SPEC = arg_specs.ArgSpec(304, 256, 128, (100, 0, 156, 1))  # some rows left, more steps than stages
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # every program here runs once or a few times
jit = partial(jax.jit, compiler_options=FAST_COMPILE)
run_visits = jit(visits, static_argnums=1)
quantize = jit(mxfp8.quantize, static_argnums=1)
run_pad = jit(group_rows.pad, static_argnums=2)
interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax can't interpret GPU kernels"
)


def all_three(lhs, rhs, d_out, group_sizes, precision, impl):
    product = partial(grouped_matmul, group_sizes=group_sizes, precision=precision, impl=impl)
    out, pullback = jax.vjp(product, lhs, rhs)
    return out, *pullback(d_out)


def poisoned(x, sizes, value):
    """As bf16, with rows behind the last group that must not matter."""
    return jnp.asarray(x.astype(BF16)).at[sizes.sum() :].set(value)


def check_equal_but_for_the_order_of_sums(got, exact):
    got, exact = np.float32(got), np.float32(exact)
    size = np.sqrt(np.mean(exact**2))
    np.testing.assert_allclose(got, exact, rtol=2.0**-7, atol=1e-5 * size)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("impl", "precision"), [("hopper", "native"), ("hopper", "mxfp8"), ("blackwell", "native")]
)
def test_interpreted_kernels_equal_xla_and_have_no_races(impl, precision):
    lhs, rhs, d_out, sizes = SPEC.arrays(octaves=4)
    lhs, d_out = poisoned(lhs, sizes, np.nan), poisoned(d_out, sizes, np.inf)
    args = lhs, jnp.asarray(rhs.astype(BF16)), d_out, jnp.asarray(sizes), precision
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = all_three(*args, impl)
    for ours, theirs in zip(got, all_three(*args, "xla"), strict=True):
        check_equal_but_for_the_order_of_sums(ours, theirs)
    assert not np.asarray(got[0])[sizes.sum() :].any()
    assert not np.asarray(got[2])[1].any()  # the empty group's


@interpreted
@pytest.mark.slow
def test_interpreted_outer_scales_multiply_once():
    lhs, rhs, _, sizes = SPEC.arrays(octaves=4)
    args = poisoned(lhs, sizes, np.nan), jnp.asarray(rhs.astype(BF16)), jnp.asarray(sizes)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = grouped_matmul(*args, precision="nvfp4", impl="hopper")
    check_equal_but_for_the_order_of_sums(got, grouped_matmul(*args, precision="nvfp4"))
    assert not np.asarray(got)[sizes.sum() :].any()


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.lists(st.integers(0, 700), min_size=4, max_size=4))
@hypothesis.example([128, 257, 257, 512])  # tiles that no group shares, and one row beyond
def test_every_row_has_one_visit_by_its_group(borders):
    *sizes, rest = np.diff(np.sort(borders), prepend=0, append=700)
    group = np.repeat(np.arange(5), [*sizes, rest])
    stored = np.full(700, -1)
    for owner, tile, begin, end in np.stack(run_visits(np.int32(sizes), 700), -1):
        here = np.arange(max(begin, tile * ROWS), min(end, (tile + 1) * ROWS))
        assert (stored[here] == -1).all() and (group[here] == owner).all()
        stored[here] = owner
    np.testing.assert_array_equal(stored, group)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 125), min_size=3, max_size=3), st.sampled_from([1, 32, 128])
)
def test_padding_fills_groups_up_with_zeros(borders, multiple):
    sizes = np.diff(np.sort(borders), prepend=0)
    x = np.random.default_rng(0).normal(size=(125, 2)).astype(np.float32)
    got, padded = run_pad(x, np.int32(sizes), multiple)
    parts = [x[group] for group in reference.groups(sizes)]
    parts = [np.pad(part, ((0, -len(part) % multiple), (0, 0))) for part in parts]
    assert list(padded) == [len(part) for part in parts]
    exact = np.concatenate(parts)
    np.testing.assert_array_equal(got[: len(exact)], exact)
    assert not np.any(got[len(exact) :]) and len(got) == multiple * (125 // multiple + 3)


def offset(r, c):
    """Of a scale among those that tcgen05.mma reads for 128 rows and 4 blocks."""
    return r % 32 * 16 + r // 32 * 4 + c


def blocks_of_steps(x, index, steps, tile, begin=0):
    """Numbers [step, tile, depth] that the steps read, unpacked here: codes times their scales."""
    arrays = [np.asarray(a)[index] for a in x.arrays]
    for i in range(steps):
        read = []
        for array, spec in zip(arrays, x.blocks(tile, begin), strict=True):
            starts = np.multiply(spec.index_map(i), spec.block_shape)
            where = (slice(s, s + n) for s, n in zip(starts, spec.block_shape, strict=True))
            read.append(array[tuple(where)].astype(np.float64))
        values, scales = read
        values = values if x.axis == 1 else values.T
        tiles = scales.reshape(-1, 512)  # of 128 rows and 4 blocks
        row, block = np.indices((ROWS, 4 * len(tiles)))
        scales = tiles[block // 4, offset(row, block % 4)]
        yield values * scales.repeat(x.depth // scales.shape[1], 1)


def sum_of_steps(left, right, groups, steps, begins=(0, 0)):
    return sum(
        a @ b.T
        for a, b in zip(
            blocks_of_steps(left, groups[0], steps, 1, begins[0]),
            blocks_of_steps(right, groups[1], steps, 0, begins[1]),
            strict=True,
        )
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_blackwell_steps_read_the_right_mxfp8_blocks(transposed):
    lhs, rhs, *_ = arg_specs.ArgSpec(256, 384, 128, (200, 56)).arrays(octaves=8)
    left = blackwell.operand(quantize(lhs, 1), 1)
    codes = quantize(rhs, 1)
    if transposed:
        codes = mxfp8.MXFP8(*(x.swapaxes(1, 2) for x in codes))
    right = blackwell.operand(codes, int(transposed))
    got = sum_of_steps(left, right, ((), 1), 384 // left.depth)
    exact = reference.mxfp8_rounded(lhs, 1)[128:] @ reference.mxfp8_rounded(rhs[1], 0)
    np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-9)


def test_blackwell_steps_read_the_right_nvfp4_blocks():
    lhs, rhs, *_ = arg_specs.ArgSpec(256, 768, 128, (200, 56)).arrays(octaves=8)
    q, matrices = map(jit(nvfp4.quantize), (lhs, rhs.swapaxes(1, 2)))
    left, right = blackwell.operand(q, 1), blackwell.operand(matrices, 1)
    got = sum_of_steps(left, right, ((), 1), 768 // left.depth)
    got *= np.outer(np.float64(q.outer_scale[128:]), np.float64(matrices.outer_scale[1]))
    exact = reference.nvfp4_rounded(lhs)[128:] @ reference.nvfp4_rounded(rhs[1].T).T
    np.testing.assert_allclose(got, exact, rtol=1e-12, atol=1e-9)


def test_blackwell_steps_of_a_weight_gradient_read_the_blocks_of_one_group():
    lhs, _, d_out, sizes = arg_specs.ArgSpec(300, 256, 128, (40, 190, 70)).arrays(octaves=8)
    sides = []
    for x in (lhs, d_out):
        padded, whole = run_pad(x, sizes, ROWS)
        sides.append(blackwell.operand(quantize(padded, 0), 0))
    begin = whole[0] // sides[0].depth
    got = sum_of_steps(*sides, ((), ()), whole[1] // sides[0].depth, (begin, begin))
    exact = reference.gradients(lhs, np.zeros((3, 256, 128)), sizes, d_out, "mxfp8")[1]
    np.testing.assert_allclose(got, exact[1, 128:], rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("axis", [0, 1])
def test_hopper_scales_are_the_powers_of_their_blocks(axis):
    shape = (256, 64) if axis == 1 else (64, 256)
    x = 8 * np.random.default_rng(0).normal(size=shape).astype(np.float32)
    _, scales = mxfp8_reference.quantize(x, axis)
    operand = hopper.codes(quantize(x, axis), axis, 64)
    scales = scales if axis == 1 else scales.T
    powers = np.ldexp(1.0, scales.astype(int) - 127)
    got = np.asarray(operand.scales)
    for feature, block in np.ndindex(*powers.shape):
        tile, place = divmod(feature, operand.tile)
        assert got[tile, block, place] == powers[feature, block]


@pytest.mark.parametrize(("impl", "precision"), [("hopper", "mxfp8"), ("blackwell", "nvfp4")])
def test_lower_for_gpus_without_their_compiler(impl, precision):
    shapes = [x.astype(BF16) for x in arg_specs.ArgSpec(304, 256, 128, (4, 300)).arrays()[:3]]
    run = jax.jit(partial(all_three, precision=precision, impl=impl))
    lowered = run.trace(*shapes, np.int32([4, 300])).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 3


INSTRUCTIONS = {
    ("hopper", "native"): {
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16": 3,
        "wgmma.wait_group.sync.aligned \t1;": 3,  # frees a block while the next one is multiplied
    },
    ("hopper", "mxfp8"): {"wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3": 3},
    ("hopper", "nvfp4"): {
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16": 1,
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3": 2,
    },
    ("blackwell", "native"): {"tcgen05.mma.cta_group::1.kind::f16 ": 3},
    ("blackwell", "mxfp8"): {
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X ": 3,
    },
    ("blackwell", "nvfp4"): {
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X ": 1,
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X ": 2,
    },
}
COMPILE = """
import sys
from pathlib import Path
from launch import targets
folder, chip, impl, precision, name = sys.argv[1:]
targets.prepare(Path(folder))
import jax, jax.numpy as jnp
from pallas_kernels.grouped_matmul import arg_specs, grouped_matmul
spec = arg_specs.AOT[name]
groups = len(spec.group_sizes)
shapes = (spec.rows, spec.k), (groups, spec.k, spec.n), (spec.rows, spec.n)
args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
def run(lhs, rhs, d_out, sizes):
    def product(lhs, rhs):
        return grouped_matmul(lhs, rhs, sizes, precision=precision, impl=impl)
    out, pullback = jax.vjp(product, lhs, rhs)
    return out, pullback(d_out)
device, *_ = targets.devices(chip)
with jax.default_device(device):
    args = targets.shapes_on(device, (*args, jax.ShapeDtypeStruct((groups,), jnp.int32)))
    jax.jit(run).lower(*args).compile()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", arg_specs.AOT)
@pytest.mark.parametrize(("impl", "precision"), INSTRUCTIONS)
def test_compiles_to_the_tensor_cores_instructions(impl, precision, name, tmp_path):
    chip = {"hopper": "h100", "blackwell": "b200"}[impl]
    if reason := targets.missing(chip):
        pytest.skip(reason)
    command = [sys.executable, "-c", COMPILE, str(tmp_path), chip, impl, precision, name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [file.read_text() for file in tmp_path.rglob("*.ptx")]
    for instruction, kernels in INSTRUCTIONS[impl, precision].items():
        assert sum(instruction in program for program in programs) == kernels


@pytest.mark.parametrize("impl", ["hopper", "blackwell"])
@pytest.mark.parametrize(
    ("shape", "dtype", "precision", "message"),
    [
        ((12, 128, 128), BF16, "native", r"\(12, 128, 128\).* \(8, 64, 128\)"),
        ((16, 96, 128), BF16, "native", r"\(16, 96, 128\)"),
        ((16, 128, 192), BF16, "nvfp4", r"192"),
        ((0, 128, 128), BF16, "native", r"\(0, 128, 128\)"),
        ((16, 128, 128), np.float32, "native", "float32"),
    ],
)
def test_what_does_not_fit_is_named(impl, shape, dtype, precision, message):
    rows, k, n = shape
    lhs, rhs = jnp.zeros((rows, k), dtype), jnp.zeros((2, k, n), dtype)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(
            partial(grouped_matmul, precision=precision, impl=impl), lhs, rhs, jnp.zeros(2, int)
        )
