"""Every pair of states comes back bit for bit, small, and damaged data are noticed."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.weights import codec

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def decoded(packed, old, like):
    out = np.zeros_like(like) if old is None else old.copy()
    codec.decode(packed, out)
    return out


@st.composite
def states(draw):
    """Two states with anything from no changes to all, near ones and far ones."""
    dtype = UNSIGNED[draw(st.sampled_from(list(UNSIGNED)))]
    size = draw(st.integers(0, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    near = old + rng.choice(np.array([1, -1, 2, -3]), size).astype(dtype)
    far = rng.integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    moved = np.where(rng.random(size) < draw(st.sampled_from([0, 0.5, 1])), near, far)
    changed = rng.random(size) < draw(st.sampled_from([0, 0.003, 0.05, 0.5, 1]))
    return old, np.where(changed, moved, old)


@given(states())
@settings(max_examples=150, deadline=None)
def test_round_trip(pair):
    old, new = pair
    packed = codec.encode(new, old)
    np.testing.assert_array_equal(decoded(packed, old, new), new)
    assert packed.changes == np.count_nonzero(old != new)
    np.testing.assert_array_equal(decoded(codec.encode(new, None), None, new), new)


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1e-40, 3e38])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float8_e4m3fn", "uint8"])
def test_bit_patterns_of_every_type_survive(dtype):
    """Signs of zeros, infinities, subnormal numbers and NaNs with a payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = SPECIAL.astype(dtype)
    bits = codec.bits(values)
    bits = np.concatenate([bits, ~bits, bits ^ 1])  # among them NaNs with and without payload
    for shift in range(1, bits.size):
        old = np.roll(bits, shift)
        np.testing.assert_array_equal(decoded(codec.encode(bits, old), old, bits), bits)


@pytest.mark.parametrize("at", [0, 126, 127, 128, 253, 254, 255, 381, 1000])
@pytest.mark.parametrize("move", [1, -1, 2, 0x8000, 0x7FFF])
def test_gaps_around_the_reach_of_a_step(at, move):
    old = np.zeros(1001, np.uint16)
    new = old.copy()
    new[at] += np.array(move).astype(np.uint16)
    packed = codec.encode(new, old)
    assert packed.codec == "gaps"
    np.testing.assert_array_equal(decoded(packed, old, new), new)


def test_bits_are_a_view_in_the_order_of_the_elements():
    values = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    assert np.shares_memory(codec.bits(values), values)
    assert codec.bits(values.T).tobytes() == values.T.tobytes()
    assert codec.bits(np.zeros((), np.float32)).shape == (1,)


def training_step(size, rate, seed=0):
    rng = np.random.default_rng(seed)
    masters = rng.normal(0, 0.02, size).astype(np.float32)
    moved = masters + np.float32(rate) * rng.choice(np.float32([-1, 1]), size)
    return (codec.bits(x.astype(ml_dtypes.bfloat16)) for x in (masters, moved))


def test_size_at_a_learning_rate_of_1e_6():
    """The changed fraction is .0423; positions and signs cost .037 bytes a number, by entropy."""
    old, new = training_step(1 << 20, 1e-6)
    packed = codec.encode(new, old)
    assert packed.codec == "gaps"
    assert packed.changes / new.size == pytest.approx(0.0423, rel=0.02)
    assert 0.037 < len(packed.data) / new.size < 0.055


def test_the_smaller_code_is_taken():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 4096, np.uint16)
    assert codec.encode(old ^ np.uint16(0x8100), old).codec == "xor"  # far away, and all the same
    assert codec.encode(old + rng.choice(np.uint16([1, 2]), 4096), old).codec == "gaps"


def test_damaged_data_are_noticed_or_decode_to_something():
    """Never another exception, and never a write out of bounds."""
    old, new = training_step(3000, 1e-6)
    noise = np.random.default_rng(0).integers(0, 2**16, 3000, np.uint16)
    for target, base in ((new, old), (noise, old), (new, None)):
        packed = codec.encode(target, base)
        for at in range(0, len(packed.data), 7):
            data = bytearray(packed.data)
            data[at] ^= 0x10
            for broken in (bytes(data), packed.data[:at], packed.data + b"x"):
                out = old.copy()
                try:
                    codec.decode(packed._replace(data=broken), out)
                except codec.CodecError:
                    continue
                assert out.shape == new.shape


@pytest.mark.parametrize("change", [{"changes": 3}, {"codec": "xor"}, {"codec": "zip"}])
def test_metadata_that_do_not_belong_to_the_data_are_noticed(change):
    old, new = training_step(3000, 1e-6)
    packed = codec.encode(new, old)
    with pytest.raises(codec.CodecError):
        codec.decode(packed._replace(**change), old.copy())


@pytest.mark.parametrize(("last", "sound"), [(299, True), (300, False), (301, False)])
def test_steps_past_the_end_are_refused(last, sound):
    """Crafted data in a sound frame: positions are checked before anything is written."""
    steps = np.uint8([codec.SKIP, codec.SKIP, 2 * (last - 254) + 1, 0])  # and nothing beyond 1
    packed = codec.Packed("gaps", codec._compress(steps), 1)
    out = np.zeros(300, np.uint8)
    if sound:
        codec.decode(packed, out)
        assert out.nonzero()[0].tolist() == [299]
    else:
        with pytest.raises(codec.CodecError, match="1 changes among 300"):
            codec.decode(packed, out)


def test_states_of_another_form_are_refused():
    with pytest.raises(ValueError, match="differ in form"):
        codec.encode(np.zeros(3, np.uint16), np.zeros(3, np.uint8))
