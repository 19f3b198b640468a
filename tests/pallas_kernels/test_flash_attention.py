"""Blockwise attention against the whole score matrix, and the memory it takes."""

import itertools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.reference import attention as reference

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
LENGTHS = [1, 63, 64, 65, 200, 1100]  # around the borders of a strip; spans of several strips
BATCH, HEADS, QK, V = 3, 2, 12, 20
SCALE = 0.3


@cache
def value_and_grads(attend):
    """Compiled (q, k, v, segment_ids, d_out) -> out, (dq, dk, dv)."""

    def run(q, k, v, segment_ids, d_out):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, segment_ids, scale=SCALE), q, k, v)
        return out, pull(d_out)

    return jax.jit(run, compiler_options=FAST_COMPILE)


def inputs(seq, seed=0):
    """Random values; row 0 one document, row 1 several and padding, row 2 only padding."""
    rng = np.random.default_rng(seed)
    features = (QK, QK, V, V)
    q, k, v, d_out = (rng.normal(size=(BATCH, seq, HEADS, f)).astype(np.float32) for f in features)
    segment_ids = np.zeros((BATCH, seq), np.int32)
    segment_ids[0] = 1
    borders = np.sort(rng.integers(0, seq + 1, size=4))
    for segment, (start, stop) in enumerate(itertools.pairwise(borders), start=1):
        segment_ids[1, start:stop] = segment
    return q, k, v, segment_ids, d_out


def padded_reference(q, k, v, segment_ids, d_out):
    """The reference at the greatest length, so that it is compiled once."""
    seq = segment_ids.shape[1]

    def pad(x):
        return np.pad(x, [(0, 0), (0, LENGTHS[-1] - seq)] + [(0, 0)] * (x.ndim - 2))

    segment_ids = np.pad(segment_ids, [(0, 0), (0, LENGTHS[-1] - seq)], constant_values=-1)
    floats = (pad(x.astype(np.float32)) for x in (q, k, v))
    result = value_and_grads(reference)(*floats, segment_ids, pad(d_out.astype(np.float32)))
    return jax.tree.map(lambda x: np.asarray(x)[:, :seq], result)


@pytest.mark.parametrize("seq", LENGTHS)
def test_equals_the_whole_score_matrix(seq):
    arrays = inputs(seq)
    out, grads = value_and_grads(flash_attention)(*arrays)
    exact, exact_grads = padded_reference(*arrays)
    assert out.shape == (BATCH, seq, HEADS, V) and out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=2e-6)
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        np.testing.assert_allclose(grad, exact_grad, atol=5e-6)


def test_bf16_errs_by_roundings_of_its_inputs_only():
    q, k, v, segment_ids, d_out = inputs(200)
    q, k, v, d_out = (x.astype(jnp.bfloat16) for x in (q, k, v, d_out))
    out, grads = value_and_grads(flash_attention)(q, k, v, segment_ids, d_out)
    exact, exact_grads = padded_reference(q, k, v, segment_ids, d_out)
    unit = float(jnp.finfo(jnp.bfloat16).eps)  # relative distance of neighbours: two roundings
    for ours, wanted in zip((out, *grads), (exact, *exact_grads), strict=True):
        assert ours.dtype == jnp.bfloat16
        error = np.abs(np.asarray(ours, np.float32) - wanted).max()
        assert error < 1.5 * unit * np.abs(wanted).max()


def test_scores_of_any_size_are_safe():
    """Where one key takes all the weight: exponentials over- and underflow without care."""
    q, k, v, segment_ids, d_out = inputs(64, seed=1)
    arrays = (1e3 * q, 1e3 * k, v, segment_ids, d_out)
    out, grads = value_and_grads(flash_attention)(*arrays)
    exact, _ = padded_reference(*arrays)
    np.testing.assert_allclose(out, exact, atol=1e-5)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_other_segments_and_later_tokens_have_no_effect_at_all():
    q, k, v, segment_ids, d_out = inputs(200)
    run = value_and_grads(flash_attention)
    at = 90
    index = np.arange(200)
    unseen = (segment_ids != segment_ids[:, at : at + 1]) | (index > at)
    noise = [np.where(unseen[..., None, None], 100 * x[::-1], x) for x in (k, v)]
    only_at = np.where(index[:, None, None] == at, d_out, 0)
    out, (dq, dk, dv) = run(q, k, v, segment_ids, only_at)
    np.testing.assert_array_equal(run(q, *noise, segment_ids, only_at)[0][:, at], out[:, at])
    assert not np.asarray(dk)[unseen].any() and not np.asarray(dv)[unseen].any()
    assert not np.delete(dq, at, axis=1).any()
    assert np.asarray(dv)[~unseen].any(axis=(-1, -2)).all()


def compiled_memory(seq):
    """Temporary bytes of a forward and backward pass over one row, and the program's text."""
    qk, v = ((1, seq, 2, f) for f in (QK, V))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (qk, qk, v)]

    def loss(q, k, v, segment_ids):
        return flash_attention(q, k, v, segment_ids, scale=SCALE).sum()

    segment_ids = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, segment_ids)
    compiled = lowered.compile(compiler_options=FAST_COMPILE)
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()


def test_memory_is_linear_in_the_length():
    (short, _), (long, text) = compiled_memory(2048), compiled_memory(8192)
    assert long < 4.2 * short
    buffers = re.findall(r"\w+\[([\d,]+)\]", text)
    assert not [shape for shape in buffers if shape.split(",").count("8192") > 1]


def test_shapes_must_agree():
    q, k, v, segment_ids, _ = inputs(5)
    with pytest.raises(ValueError, match="disagree"):
        flash_attention(q, k[:, :4], v, segment_ids, scale=1.0)
    with pytest.raises(ValueError, match="disagree"):
        flash_attention(q, k, v[:, :, :1], segment_ids, scale=1.0)
    with pytest.raises(ValueError, match="segment_ids"):
        flash_attention(q, k, v, segment_ids[:, :4], scale=1.0)
