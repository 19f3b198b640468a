"""Attention by positions against its formula in f64, torch and itself: values, gradients, bits."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.flash_attention import arg_specs, flash_attention, reference
from pallas_kernels.flash_attention.marks import Marks, blocks_seen, in_order

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
SCALE = 0.3
IMPLS = ("xla", "interpret")
SHAPES = {  # batch, q_seq, kv_seq, heads, qk, v
    "same": (2, 300, 300, 2, 12, 20),
    "more keys": (1, 150, 600, 3, 8, 12),
    "more queries": (1, 530, 70, 1, 20, 5),
}


@partial(jax.jit, static_argnames="impl", compiler_options=FAST_COMPILE)
def run(q, k, v, d_out, marks, impl="xla"):
    """Output and gradients of q, k and v."""
    names = "segment_ids", "positions", "kv_segment_ids", "kv_positions"
    marks = dict(zip(names, marks, strict=True))
    if impl == "reference":
        attend = partial(reference.attention, scale=SCALE, **marks)
    else:
        attend = partial(flash_attention, scale=SCALE, impl=impl, **marks)
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(d_out)


def oracle(q, k, v, d_out, marks):
    """The same in f64, by formulas."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    segments, positions, kv_segments, kv_positions = marks
    visible = (segments[:, :, None] == kv_segments[:, None]) & (segments[:, :, None] != 0)
    visible = (visible & (positions[:, :, None] >= kv_positions[:, None]))[:, None]
    scores = np.where(visible, np.einsum("bqhd,bkhd->bhqk", q, k) * SCALE, -np.inf)
    peak = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - peak)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, v)
    mean = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - mean) * SCALE
    return (
        np.einsum("bhqk,bkhd->bqhd", weights, v),
        np.einsum("bhqk,bkhd->bqhd", d_scores, k),
        np.einsum("bhqk,bqhd->bkhd", d_scores, q),
        np.einsum("bhqk,bqhd->bkhd", weights, d_out),
    )


def floats(shape, seed=0, dtype=np.float32):
    """Normal q, k, v and d_out."""
    batch, q_seq, kv_seq, heads, qk, v = shape
    rng = np.random.default_rng(seed)
    shapes = (q_seq, qk), (kv_seq, qk), (kv_seq, v), (q_seq, v)
    return [rng.normal(size=(batch, seq, heads, f)).astype(dtype) for seq, f in shapes]


def documents(seq, *, restart=True, padded=0.0, seed=0):
    """Segments and positions of three documents, in order, with some padding anywhere."""
    rng = np.random.default_rng(seed)
    borders = np.sort(rng.integers(1, seq, size=2))
    index = np.arange(seq)
    segments = 1 + np.searchsorted(borders, index, side="right")
    starts = np.concatenate([[0], borders])[segments - 1]
    segments = np.where(rng.random(seq) < padded, 0, segments)
    return segments.astype(np.int32), (index - starts if restart else index).astype(np.int32)


def marks_of(q_seq, kv_seq, kind):
    """One row's marks: two independent sides if lengths differ."""
    kv_segments, kv_positions = documents(
        kv_seq, restart=kind != "absolute", padded=0.3 if kind == "padding inside" else 0
    )
    if kind == "anything":
        rng = np.random.default_rng(1)
        sides = [(rng.integers(0, 4, seq), rng.integers(0, 99, seq)) for seq in (q_seq, kv_seq)]
        return Marks(*(x.astype(np.int32)[None] for side in sides for x in side))
    chosen = np.arange(q_seq) % kv_seq
    if kind == "permuted":
        chosen = np.random.default_rng(2).permutation(chosen)
    return Marks(
        *(x[None] for x in (kv_segments[chosen], kv_positions[chosen])),
        *(x[None] for x in (kv_segments, kv_positions)),
    )


def check(got, wanted, bound=1e-5):
    for ours, exact in zip(got, wanted, strict=True):
        assert np.abs(np.asarray(ours, np.float64) - exact).max() <= bound * np.abs(exact).max()


KINDS = ("packed", "absolute", "padding inside", "permuted", "anything")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", (*IMPLS, "reference"))
def test_equals_the_formula(impl, kind):
    shape = SHAPES["same"]
    marks = jax.tree.map(
        lambda *rows: np.concatenate(rows), marks_of(300, 300, kind), marks_of(300, 300, "anything")
    )
    arrays = floats(shape)
    check(run(*arrays, marks, impl=impl), oracle(*arrays, marks))


@pytest.mark.parametrize("shape", ["more keys", "more queries"])
@pytest.mark.parametrize("impl", IMPLS)
def test_queries_and_keys_of_different_number(impl, shape):
    _, q_seq, kv_seq, *_ = SHAPES[shape]
    arrays = floats(SHAPES[shape])
    for kind in KINDS:
        marks = marks_of(q_seq, kv_seq, kind)
        check(run(*arrays, marks, impl=impl), oracle(*arrays, marks))


@pytest.mark.parametrize("impl", IMPLS)
def test_bf16_errs_by_roundings_of_its_inputs_only(impl):
    arrays = floats(SHAPES["more keys"], dtype=ml_dtypes.bfloat16)
    marks = marks_of(150, 600, "permuted")
    got = run(*arrays, marks, impl=impl)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    unit = float(jnp.finfo(jnp.bfloat16).eps)  # relative distance of neighbours: two roundings
    check(got, oracle(*arrays, marks), 1.5 * unit)


def test_interpreted_kernels_without_positions():
    """Tokens in order, and segment 0 is one like the others, as for "xla"."""
    arrays = floats((1, 600, 600, 1, 8, 8))
    segment_ids = np.repeat(np.int32([1, 2, 0]), [100, 450, 50])[None]

    @partial(jax.jit, compiler_options=FAST_COMPILE)
    def run_in_order(q, k, v, d_out):
        attend = partial(flash_attention, segment_ids=segment_ids, scale=SCALE, impl="interpret")
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    check(run_in_order(*arrays), oracle(*arrays, in_order(segment_ids + 1)))


@pytest.mark.slow  # to import
def test_equals_torch():
    torch = pytest.importorskip("torch")
    q, k, v, d_out = arrays = floats(SHAPES["same"])
    marks = jax.tree.map(lambda x: np.repeat(x, 2, 0), marks_of(300, 300, "permuted"))
    visible = (marks.segments[:, :, None] == marks.kv_segments[:, None]) & (
        marks.positions[:, :, None] >= marks.kv_positions[:, None]
    )
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), torch.tensor(visible)[:, None], scale=SCALE
    ).transpose(1, 2)
    out.backward(torch.tensor(d_out, dtype=torch.float64))
    check(run(*arrays, marks), [x.detach().numpy() for x in (out, *(x.grad for x in leaves))])


@pytest.mark.parametrize(("impl", "ranks"), [("xla", 2), ("xla", 4), ("interpret", 4)])
def test_ranks_of_zigzag_add_up_to_the_whole(impl, ranks):
    batch, _, seq, *features = SHAPES["more keys"]
    q, k, v, d_out = arrays = floats((batch, seq, seq, *features))
    marks = Marks(*2 * [x[None] for x in documents(seq, restart=False, padded=0.05)])
    chunks = np.arange(seq).reshape(2 * ranks, -1)
    shards = [chunks[[r, -1 - r]].ravel() for r in range(ranks)]
    gathered = np.concatenate(shards)
    out, dq = np.full(d_out.shape, np.nan), np.full(q.shape, np.nan)
    dk, dv = np.zeros(k.shape), np.zeros(v.shape)
    for mine in shards:
        sides = *(x[:, mine] for x in marks[:2]), *(x[:, gathered] for x in marks[2:])
        local = q[:, mine], k[:, gathered], v[:, gathered], d_out[:, mine]
        out[:, mine], dq[:, mine], *d_keys = run(*local, Marks(*sides), impl=impl)
        for total, part in zip((dk, dv), d_keys, strict=True):
            total[:, gathered] += part
    check((out, dq, dk, dv), oracle(*arrays, marks))


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_may_hold_anything_and_gives_zeros(impl):
    arrays = floats(SHAPES["same"])
    marks = jax.tree.map(lambda x: np.repeat(x, 2, 0), marks_of(300, 300, "padding inside"))
    padding = marks.segments == 0
    bad = [np.where(padding[..., None, None], np.float32(np.nan), x) for x in arrays]
    results = run(*arrays, marks, impl=impl)
    for result, with_nan in zip(results, run(*bad, marks, impl=impl), strict=True):
        np.testing.assert_array_equal(result, with_nan)
        assert not np.asarray(result)[padding].any()


@pytest.mark.parametrize("shape", ["more keys", "more queries"])
@pytest.mark.parametrize("impl", IMPLS)
def test_queries_without_a_key_give_zeros(impl, shape):
    """Segments without keys, and positions before the first key; a whole block in between."""
    _, q_seq, kv_seq, *_ = SHAPES[shape]
    q, k, v, d_out = floats(SHAPES[shape])
    segments, positions = np.ones((1, q_seq), np.int32), np.full((1, q_seq), 5, np.int32)
    segments[:, ::3], segments[:, 512:] = 7, 7
    positions[:, 1::3] = 2
    kv = np.ones((1, kv_seq), np.int32), np.arange(3, kv_seq + 3, dtype=np.int32)[None]
    blind = (segments == 7) | (positions == 2)
    out, dq, dk, dv = run(q, k, v, d_out, Marks(segments, positions, *kv), impl=impl)
    assert not np.asarray(out)[blind].any() and not np.asarray(dq)[blind].any()
    assert np.asarray(out)[~blind].all()
    assert not np.asarray(dk)[:, 3:].any() and not np.asarray(dv)[:, 3:].any()  # positions over 5
    heard = np.where(blind[..., None, None], 0, d_out)
    again = run(q, k, v, heard, Marks(segments, positions, *kv), impl=impl)
    np.testing.assert_array_equal(dk, again[2])
    np.testing.assert_array_equal(dv, again[3])


@pytest.mark.parametrize("impl", IMPLS)
def test_unseen_tokens_have_no_effect_at_all(impl):
    q, k, v, d_out = floats(SHAPES["same"])
    marks = jax.tree.map(lambda x: np.repeat(x, 2, 0), marks_of(300, 300, "permuted"))
    at = 90
    unseen = (marks.kv_segments != marks.segments[:, [at]]) | (
        marks.kv_positions > marks.positions[:, [at]]
    )
    assert 0 < unseen.sum() < unseen.size
    noise = [np.where(unseen[..., None, None], 100 * x[:, ::-1], x) for x in (k, v)]
    only_at = np.where(np.arange(300)[:, None, None] == at, d_out, 0)
    out, dq, dk, dv = run(q, k, v, only_at, marks, impl=impl)
    noisy = run(q, *noise, only_at, marks, impl=impl)
    np.testing.assert_array_equal(noisy[0][:, at], out[:, at])
    np.testing.assert_array_equal(noisy[1][:, at], dq[:, at])
    assert not np.asarray(dk)[unseen].any() and not np.asarray(dv)[unseen].any()
    assert np.asarray(dv)[~unseen].any(axis=(-1, -2)).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_blocks_that_no_query_sees_are_left_out(impl):
    """Their NaN would reach everything: keys and values are finite by contract."""
    q, k, v, d_out = floats(SHAPES["more keys"])
    k[:, 512:], v[:, 512:] = np.nan, np.nan
    ones, index = np.ones((1, 600), np.int32), np.arange(600, dtype=np.int32)[None]
    of_queries = ones[:, :150], index[:, 450:]
    other = np.where(index < 512, 1, 2).astype(np.int32)
    late = np.where(index < 512, index, 600).astype(np.int32)
    for kv in ((other, index), (ones, late)):
        out, dq, dk, dv = run(q, k, v, d_out, Marks(*of_queries, *kv), impl=impl)
        assert all(np.isfinite(x).all() for x in (out, dq, dk[:, :512], dv[:, :512]))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 30))
def test_no_visible_key_is_in_a_block_left_out(seed, segments, positions):
    rng = np.random.default_rng(seed)
    sides = [
        (np.sort(rng.integers(-1, segments, (2, seq))), rng.integers(-1, positions, (2, seq)))
        for seq in (12, 15)
    ]
    marks = Marks(*(x.astype(np.int32) for side in sides for x in side))
    visible = (marks.segments[:, :, None] == marks.kv_segments[:, None]) & (
        marks.positions[:, :, None] >= np.maximum(marks.kv_positions[:, None], 0)
    )
    wanted = visible.reshape(2, 4, 3, 3, 5).any((2, 4))
    assert not (wanted & ~np.asarray(blocks_seen(Marks(*map(jnp.asarray, marks)), 3, 5))).any()


def test_zigzag_visits_half_of_the_blocks_on_every_rank():
    ranks, seq, block = 4, 4096, 64
    chunks = np.arange(seq, dtype=np.int32).reshape(2 * ranks, -1)
    keys = jnp.ones((1, seq), jnp.int32), jnp.arange(seq)[None]
    blocks = seq // block
    for r in range(ranks):
        mine = jnp.asarray(chunks[[r, -1 - r]].ravel())[None]
        marks = Marks(jnp.ones_like(mine), mine, *keys)
        # what lies below the diagonal, and the blocks on it
        assert blocks_seen(marks, block, block).sum() == blocks // ranks * (blocks + 1) // 2


def test_documents_see_no_blocks_of_others_whatever_padding_lies_between():
    segment_ids = np.repeat(np.int32([1, 2, 3, 4]), 64)
    segment_ids[::5] = 0
    positions = np.where(segment_ids == 0, -1, np.arange(256))
    kv_positions = np.where(segment_ids == 0, 2**31 - 1, np.arange(256))
    rows = (segment_ids, positions, segment_ids, kv_positions)
    marks = Marks(*(jnp.asarray(x, jnp.int32)[None] for x in rows))
    np.testing.assert_array_equal(blocks_seen(marks, 64, 64)[0], np.eye(4, dtype=bool))


def gradients_of(spec, impl):
    """Traced gradients, and their arguments, for arrays of a size."""
    shapes = spec.shapes()
    qkv = [shapes.pop(name) for name in "qkv"]

    def loss(q, k, v, **marks):
        return flash_attention(q, k, v, **marks, scale=SCALE, impl=impl).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*qkv, **shapes)


def test_memory_is_linear_in_the_number_of_keys():
    short, long = (
        gradients_of(arg_specs.ArgSpec(1, 1024, kv_seq, 2, 12, 20, jnp.float32), "xla")
        .lower()
        .compile(compiler_options=FAST_COMPILE)
        .memory_analysis()
        .temp_size_in_bytes
        for kv_seq in (4096, 16384)
    )
    assert long < 4.2 * short


@pytest.mark.parametrize("spec", arg_specs.AOT, ids=lambda spec: f"{spec.q_seq}x{spec.kv_seq}")
def test_lowers_for_tpus_at_full_size(spec):
    text = gradients_of(spec, "tpu").lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3


def test_what_does_not_go_together_is_refused():
    q, k, v, _ = floats(SHAPES["more keys"])
    segments, positions, kv_segments, kv_positions = marks_of(150, 600, "packed")
    attend = partial(flash_attention, q, k, v, segments, scale=SCALE)
    with pytest.raises(ValueError, match=r"kv_segment_ids \(1, 150\) must be \(1, 600\)"):
        attend(positions=positions)
    with pytest.raises(ValueError, match="go together"):
        attend(positions=positions, kv_positions=kv_positions)
    with pytest.raises(ValueError, match="go together"):
        attend(kv_segment_ids=kv_segments, kv_positions=kv_positions)
    everything = {"kv_segment_ids": kv_segments, "kv_positions": kv_positions}
    with pytest.raises(ValueError, match=r"positions \(1, 149\) must be \(1, 150\)"):
        attend(positions=positions[:, 1:], **everything)
    with pytest.raises(ValueError, match="impl 'cpu'"):
        attend(positions=positions, **everything, impl="cpu")
