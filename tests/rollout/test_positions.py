"""What a row becomes in a product does not depend on where it stands: samples rest on that."""

import jax
import numpy as np
import pytest

from c2.models.compiling import ROUND_AS_WRITTEN


@pytest.mark.parametrize("rows", [8, 13, 16])
@pytest.mark.parametrize("shape", ["mk,kn->mn", "bmk,bkn->bmn"])
def test_equal_rows_become_equal_bits_at_real_widths(shape, rows):
    rng = np.random.default_rng(0)
    width, batch = 256, 8 if shape.startswith("b") else 1
    row = rng.normal(size=(batch, 1, width)).astype(np.float32)
    weights = rng.normal(size=(batch, width, width)).astype(np.float32)
    x = np.repeat(row, rows, 1)
    if batch == 1:
        x, weights = x[0], weights[0]
    product = jax.jit(lambda x, w: jax.numpy.einsum(shape, x, w))
    found = np.asarray(product.lower(x, weights).compile(ROUND_AS_WRITTEN)(x, weights))
    np.testing.assert_array_equal(found, np.broadcast_to(found[..., :1, :], found.shape))
    np.testing.assert_allclose(found[..., 0, :], np.einsum(shape, x, weights)[..., 0, :], rtol=1e-3,
                               atol=1e-3)  # fmt: skip
