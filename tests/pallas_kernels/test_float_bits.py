"""Integer arithmetic on bit patterns against numpy's IEEE arithmetic."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import float_bits as fb


def patterns(size, least=0, seed=0):
    """Patterns of finite numbers, of all exponents alike, many with extreme mantissas."""
    rng = np.random.default_rng(seed)
    mantissa = rng.integers(0, 1 << 23, size)
    mantissa[::5] = rng.choice([0, 1, (1 << 23) - 1, 1 << 22], mantissa[::5].shape)
    bits = rng.integers(0, 255, size) << 23 | mantissa
    return np.maximum(bits, least).astype(np.int32)


def pairs(size=200_000):
    """Random x and y > 0, most of them within the same few octaves, with a finite quotient."""
    x, y = patterns(size), patterns(size, least=1, seed=1)
    same_octave = (x & ~0x7FFFFF) | (y & 0x7FFFFF)
    y = np.where(np.arange(size) % 2 == 0, np.maximum(same_octave, 1), y).astype(np.int32)
    with np.errstate(all="ignore"):
        quotient = x.view(np.float32) / y.view(np.float32)
    finite = np.isfinite(quotient)
    return x[finite], y[finite], quotient[finite].view(np.int32)


def test_the_guessed_reciprocal_is_four_times_better_than_division_needs():
    x = np.arange(1 << 23, 1 << 24, dtype=np.float32)  # all there are
    error = np.asarray(jax.jit(fb._reciprocal)(x)).astype(np.float64) * x - 1
    assert np.abs(error).max() < 2.0**-16


@pytest.mark.parametrize("error", [0, 2.0**-23, -(2.0**-23), 2.0**-14.5, -(2.0**-14.5)])
def test_division_is_ieee_whatever_the_reciprocal(monkeypatch, error):
    x, y, quotient = pairs()
    monkeypatch.setattr(fb, "_reciprocal", lambda x: (1 / x) * jnp.float32(1 + error))
    np.testing.assert_array_equal(jax.jit(lambda *args: fb.divide(*args))(x, y), quotient)


def test_a_reciprocal_that_is_too_wrong_would_be_noticed(monkeypatch):
    x, y, quotient = pairs(20_000)
    monkeypatch.setattr(fb, "_reciprocal", lambda x: (1 / x) * jnp.float32(1.001))
    assert (np.asarray(jax.jit(lambda *args: fb.divide(*args))(x, y)) != quotient).any()


def test_decompose_is_exact():
    bits = patterns(50_000, least=1)
    m, e = map(np.asarray, fb.decompose(jnp.asarray(bits)))
    assert (m >= 1 << 23).all() and (m < 1 << 24).all()
    np.testing.assert_array_equal(np.ldexp(m.astype(np.float64), e), bits.view(np.float32))


def test_e4m3_codes_are_those_of_ml_dtypes_on_all_ties_and_both_sides():
    finite = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = ((finite[1:] + finite[:-1]) / 2).view(np.int32)
    tiny = patterns(1000) & 0x00FFFFFF  # subnormal and barely normal
    bits = np.concatenate([finite.view(np.int32), ties - 1, ties, ties + 1, tiny])
    expected = bits.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(jax.jit(fb.encode_e4m3)(bits), expected)


def test_every_code_decodes_as_in_ml_dtypes():
    for decode, count, dtype in [
        (fb.decode_e4m3, 256, ml_dtypes.float8_e4m3fn),
        (fb.decode_e2m1, 16, ml_dtypes.float4_e2m1fn),
    ]:
        codes = np.arange(count, dtype=np.uint8)
        expected = codes.view(dtype).astype(np.float32)
        got = np.asarray(jax.jit(decode)(codes))
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


def test_the_even_nibble_is_the_low_one():
    packed = fb.pack_nibbles(jnp.uint8([[1, 2, 3, 4]]))
    assert bytes(np.asarray(packed)[0]) == b"\x21\x43"
    np.testing.assert_array_equal(fb.unpack_nibbles(packed), [[1, 2, 3, 4]])


def test_only_two_dtypes_have_bits_here():
    with pytest.raises(TypeError, match="float16"):
        fb.native_bits(jnp.zeros(3, jnp.float16))
