"""The tiled order of block scales against cuBLAS's offset formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import scale_layout


def offset(r, c, columns):
    return (r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def test_every_scale_is_where_the_formula_says():
    rows, columns = 256, 8
    scales = np.random.default_rng(0).integers(0, 256, (rows, columns), dtype=np.uint8)
    flat = np.asarray(scale_layout.swizzle(jnp.asarray(scales))).reshape(-1)
    r, c = np.indices(scales.shape)
    np.testing.assert_array_equal(flat[offset(r, c, columns)], scales)
    examples = [(0, 0, 0), (1, 0, 16), (31, 3, 499), (32, 0, 4), (127, 3, 511), (0, 4, 512)]
    for r, c, place in [*examples, (128, 0, 1024), (255, 7, 2047)]:
        assert flat[place] == scales[r, c]


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 90), (0, 4)])
def test_swizzling_comes_back_and_fills_up_with_zeros(shape):
    scales = np.random.default_rng(1).integers(1, 256, shape, dtype=np.uint8)
    swizzled = scale_layout.swizzle(jnp.asarray(scales))
    np.testing.assert_array_equal(scale_layout.unswizzle(swizzled, *shape), scales)
    assert np.count_nonzero(swizzled) == scales.size
    # what is in the padding does not matter
    poisoned = jnp.where(swizzled == 0, jnp.uint8(0x7F), swizzled)
    np.testing.assert_array_equal(scale_layout.unswizzle(poisoned, *shape), scales)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="129 rows"):
        scale_layout.unswizzle(jnp.zeros((1, 1, 32, 16), jnp.uint8), 129, 4)
