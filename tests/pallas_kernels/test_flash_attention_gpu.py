"""Attention's kernels for NVIDIA GPUs: compiled for chips, interpreted, and piece by piece.

No GPU is needed. Interpretation shows what the kernels compute and that their threads wait for each
other; it knows neither registers nor layouts, of which the compilers are the judges.
"""

import contextlib
import re
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from launch import kernel_cases, targets
from pallas_kernels.flash_attention import (
    blackwell,
    block_plan,
    flash_attention,
    gpu,
    hopper,
)
from pallas_kernels.flash_attention.marks import NEVER, NOTHING, Marks, in_order
from pallas_kernels.flash_attention.reference import attention as reference

BACKENDS = {"hopper": hopper, "blackwell": blackwell}
SCALE = 2.0**-4  # scaling queries by it is exact
QK, V = 128, 64
plan_of = {
    by: jax.jit(getattr(block_plan, by), static_argnums=(1, 2))
    for by in ("for_queries", "for_keys")
}
can_interpret = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax can't interpret GPU kernels"
)


@contextlib.contextmanager
def interpretation(detect_races):
    """Runs the kernels on the CPU; where they multiply registers, through a reference to a copy."""
    wgmma = plgpu.wgmma

    def from_a_copy(sums, left, right):
        if not isinstance(left, jax.Array):
            return wgmma(sums, left, right)

        def run(copy):
            copy[...] = left
            wgmma(sums, copy, right)

        return pl.run_scoped(run, plgpu.REGS(left.shape, left.dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plgpu, "wgmma", from_a_copy)
        params = plgpu.InterpretGPUParams(detect_races=detect_races)
        with plgpu.force_gpu_interpret_mode(params):
            yield


def visible(marks):
    """Bool [batch, query, key]."""
    segments, positions, kv_segments, kv_positions = map(np.asarray, marks)
    same = segments[:, :, None] == kv_segments[:, None]
    return same & (positions[:, :, None] >= kv_positions[:, None])


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def assert_close(got, exact):
    """As far apart as bf16 results of bf16 operands, weights among them, may be."""
    got, exact = np.float32(got), np.float32(exact)
    rms = np.sqrt(np.mean(exact**2))
    np.testing.assert_allclose(got, exact, rtol=2.0**-7, atol=2.0**-5 * rms)


def packed(rng, seq, first=0):
    """Segments and positions of one row: documents of several lengths, and padding in between."""
    segments = np.sort(rng.integers(1, 4, (1, seq))).astype(np.int32)
    segments[0, rng.integers(0, seq, 9)] = 0
    return segments, np.arange(first, first + seq, dtype=np.int32)[None]


class Case(NamedTuple):
    """One head's operands, the queries scaled, and exact results."""

    operands: tuple  # q, k, v
    d_out: jax.Array
    marks: Marks
    out: jax.Array
    lse: jax.Array
    correction: jax.Array
    gradients: tuple  # of q, k, v


def case(q_seq, kv_seq):
    rng = np.random.default_rng(0)
    segments, positions = packed(rng, q_seq, max(0, kv_seq - q_seq))
    kv_segments, kv_positions = packed(rng, kv_seq)
    marks = Marks(
        segments,
        np.where(segments, positions, NOTHING),
        kv_segments,
        np.where(kv_segments, kv_positions, NEVER),
    )
    seen = visible(marks)[:, None]
    sees = seen.any(-1)
    q, k, v, d_out = (
        normal(rng, 1, seq, 1, width)
        for seq, width in ((q_seq, QK), (kv_seq, QK), (kv_seq, V), (q_seq, V))
    )

    @jax.jit
    def run(q, k, v):
        scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)
        weights = jnp.where(seen, jax.nn.softmax(scores), 0)
        lse = jnp.where(sees, jax.nn.logsumexp(scores, axis=-1), gpu.NOTHING_SEEN)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v), lse

    operands = q * SCALE, k, v
    out, pull, lse = jax.vjp(run, *(x.astype(jnp.float32) for x in operands), has_aux=True)
    d_out32 = d_out.astype(jnp.float32)
    correction = jnp.einsum("bqhd,bqhd->bhq", out, d_out32)
    return Case(operands, d_out, marks, out, lse, correction, pull(d_out32))


@can_interpret
@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kernel", ["forward", "query_gradient", "key_gradients"])
def test_a_program_is_right_and_has_no_races(name, kernel):
    run = getattr(BACKENDS[name], kernel)
    tiling = BACKENDS[name].FORWARD if kernel == "forward" else BACKENDS[name].BACKWARD
    seqs = tiling.tile, 5 * tiling.block  # more blocks than the ring holds
    c = case(*seqs[:: -1 if kernel == "key_gradients" else 1])
    with interpretation(detect_races=True):
        if kernel == "forward":
            out, lse = run(*c.operands, c.marks)
            assert_close(out, c.out)
            sees = visible(c.marks).any(-1)
            assert not np.asarray(out, np.float32)[~sees].any()
            np.testing.assert_allclose(lse[:, 0][sees], c.lse[:, 0][sees], atol=1e-4)
            return
        got = run(*c.operands, c.d_out, c.lse, c.correction, c.marks)
    exact = c.gradients[0] if kernel == "query_gradient" else c.gradients[1:]
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        assert_close(ours, theirs)


@can_interpret
@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(("batch", "heads", "zigzag"), [(1, 2, False), (2, 1, True)])
def test_interpreted_kernels_equal_the_reference(impl, batch, heads, zigzag):
    rng = np.random.default_rng(1)
    seq = 280  # not of whole tiles, for blackwell two of which the second is mostly empty
    segments = np.concatenate([packed(rng, seq)[0] for _ in range(batch)])
    tokens, marks = np.arange(seq), {}
    if zigzag:  # a rank's queries are two of four chunks of the row
        tokens = np.append(tokens[: seq // 4], tokens[-(seq // 4) :])
        marks = {
            "positions": np.tile(tokens, (batch, 1)),
            "kv_segment_ids": segments,
            "kv_positions": np.tile(np.arange(seq), (batch, 1)),
        }
    marks = {
        name: np.int32(x) for name, x in (marks | {"segment_ids": segments[:, tokens]}).items()
    }
    q, k, v, d_out = (
        normal(rng, batch, length, heads, width)
        for length, width in ((len(tokens), QK), (seq, QK), (seq, V), (len(tokens), V))
    )

    def run(attend, *operands):
        out, pull = jax.vjp(partial(attend, scale=SCALE, **marks), *operands)
        return out, *pull(d_out.astype(out.dtype))

    with interpretation(detect_races=False):
        got = run(partial(flash_attention, impl=impl), q, k, v)
    exact = run(reference, *(x.astype(jnp.float32) for x in (q, k, v)))
    for ours, theirs in zip(got, exact, strict=True):
        assert_close(ours, theirs)


@st.composite
def marks_of_rows(draw):
    """Two rows of 12 queries and 18 keys, with padding."""

    def ints(low, high, seq):
        values = st.lists(st.integers(low, high), min_size=2 * seq, max_size=2 * seq)
        return np.array(draw(values), np.int32).reshape(2, seq)

    segments, kv_segments = (np.sort(ints(0, 3, seq)) for seq in (12, 18))
    positions, kv_positions = (np.sort(ints(0, 9, seq)) for seq in (12, 18))
    if draw(st.booleans()):
        positions, kv_positions = positions[:, ::-1], kv_positions[:, ::-1]
    positions = np.where(segments, positions, NOTHING)
    return Marks(segments, positions, kv_segments, np.where(kv_segments, kv_positions, NEVER))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(marks_of_rows())
def test_plans_visit_what_is_seen_and_mask_what_is_not(marks):
    pairs = visible(marks).reshape(2, 3, 4, 6, 3).swapaxes(2, 3)
    for by, blocks in ("for_queries", pairs), ("for_keys", pairs.swapaxes(1, 2)):
        some, every = blocks.any((3, 4)), blocks.all((3, 4))
        order, unmasked, visited = map(np.asarray, plan_of[by](marks, 4, 3))
        for at in np.ndindex(unmasked.shape):
            assert sorted(order[at]) == list(range(order.shape[2]))
            assert set(np.flatnonzero(some[at])) <= set(order[at][: visited[at]])
            assert every[at][order[at][: unmasked[at]]].all()


def test_plan_of_documents_in_order_is_tight():
    segments = np.repeat(np.int32([[1, 2]]), 12, axis=1)
    order, unmasked, visited = plan_of["for_queries"](in_order(segments), 4, 4)
    assert visited.tolist() == [[1, 2, 3, 1, 2, 3]]
    assert unmasked.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert order[0, 4, :2].tolist() == [3, 4]


def test_softmax_of_blocks_is_that_of_all_keys():
    rng = np.random.default_rng(0)
    scores = (30 * rng.normal(size=(6, 40))).astype(np.float32)
    seen = rng.random((6, 40)) < 0.4
    seen[:, :8] = False  # of the first block
    seen[1] = False
    seen[2, 24:] = True
    peak, norm = jnp.full(6, gpu.NOTHING_SEEN), jnp.zeros(6)
    total = np.zeros((6, 40))
    for block in np.split(np.arange(40), 5):
        mask = None if seen[:, block].all() else seen[:, block]
        weights, decay, peak, norm = gpu.online_softmax(scores[:, block], mask, peak, norm)
        total *= np.asarray(decay)[:, None]
        total[:, block] = weights
    norm, lse = gpu.end_of_softmax(peak, norm)
    exact = np.where(seen, np.exp(scores.astype(np.float64)), 0)
    exact /= np.maximum(exact.sum(1, keepdims=True), 1e-300)
    np.testing.assert_allclose(total / np.asarray(norm)[:, None], exact, rtol=1e-4, atol=1e-9)
    again = np.where(seen, gpu.probabilities(scores, lse, 0), 0)
    np.testing.assert_allclose(again, exact, rtol=1e-4, atol=1e-9)
    again = np.where(seen.T, gpu.probabilities(scores.T, lse, 1), 0)
    np.testing.assert_allclose(again, exact.T, rtol=1e-4, atol=1e-9)


def longest(impl):
    """A context-parallel rank's queries and the keys of all ranks, with gradients."""
    (case,) = (
        case
        for case, backend in kernel_cases.jobs().values()
        if case.op == "flash_attention" and backend == impl
        if "32768 keys" in case.what and "gradients" in case.what
    )
    return case


@pytest.mark.parametrize("impl", BACKENDS)
def test_lowers_to_three_kernels(impl):
    """Checks layouts and the size of shared memory; needs no compiler for the chip."""
    case = longest(impl)
    traced = jax.jit(partial(case.run, impl)).trace(*case.shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3


COMPILE = """
import sys
from pathlib import Path
from launch import targets
folder, chip, impl = sys.argv[1:]
targets.prepare(Path(folder))
import jax
from launch import kernel_cases
device, *_ = targets.devices(chip)
for case, backend in kernel_cases.jobs().values():
    if case.op == "flash_attention" and backend == impl:
        if "32768 keys" in case.what and "gradients" in case.what:
            with jax.default_device(device):
                args = targets.shapes_on(device, case.shapes)
                jax.jit(lambda *args: case.run(impl, *args)).lower(*args).compile()
"""
INSTRUCTIONS = {
    "hopper": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    "blackwell": r"tcgen05\.mma\.cta_group::1\.kind::f16 ",
}


@pytest.mark.slow
@pytest.mark.parametrize("impl", BACKENDS)
def test_compiles_to_the_tensor_cores_instructions(impl, tmp_path):
    chip = {"hopper": "h100", "blackwell": "b200"}[impl]
    if reason := targets.missing(chip):
        pytest.skip(reason)
    command = [sys.executable, "-c", COMPILE, str(tmp_path), chip, impl]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [file.read_text() for file in tmp_path.rglob("*.ptx")]
    counts = [len(re.findall(INSTRUCTIONS[impl], program)) for program in programs]
    # one for 16 terms of every sum, in a loop with masks and in one without
    qk, v = 192, 128
    forward, backward = BACKENDS[impl].FORWARD.block, BACKENDS[impl].BACKWARD.block
    terms = qk + forward, qk + v + backward, qk + v + 2 * backward
    assert sorted(filter(None, counts)) == [2 * n // 16 for n in terms]


@pytest.mark.parametrize("impl", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "features", "dtype", "message"),
    [
        ((1, 64, 2, 96), 64, jnp.bfloat16, r"\(96, 64\)"),
        ((1, 64, 2, 256), 128, jnp.bfloat16, r"\(256, 128\).*\(192, 128\)"),
        ((1, 64, 2, 128), 192, jnp.bfloat16, r"\(128, 192\).*\(192, 128\)"),
        ((1, 64, 2, 128), 64, jnp.float32, "float32"),
        ((1, 0, 2, 128), 64, jnp.bfloat16, r"\(1, 0, 2, 128\)"),
    ],
)
def test_what_does_not_fit_is_named(impl, shape, features, dtype, message):
    x = jax.ShapeDtypeStruct(shape, dtype)
    v = jax.ShapeDtypeStruct((*shape[:3], features), dtype)
    ids = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(partial(flash_attention, scale=SCALE, impl=impl), x, x, v, ids)
