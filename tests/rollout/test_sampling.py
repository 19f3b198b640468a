"""Sampling against numpy in double precision."""

import jax.numpy as jnp
import numpy as np
import pytest

from c2.rollout import sampling


@pytest.mark.parametrize("vocab", [1, 2, 61, 1000])
def test_a_number_picks_the_token_of_its_quantile(vocab):
    rng = np.random.default_rng(vocab)
    probs = rng.dirichlet(np.full(vocab, 0.3), size=500).astype(np.float32)
    number = rng.random(500).astype(np.float32)
    token = np.asarray(sampling.draw(jnp.asarray(number), jnp.asarray(probs)))
    ends = np.cumsum(probs.astype(np.float64), axis=-1)
    ends /= ends[:, -1:]
    rows = np.arange(500)
    begin = np.where(token > 0, ends[rows, token - 1], 0)
    assert (number > begin - 1e-6).all() and (number < ends[rows, token] + 1e-6).all()


def test_what_has_no_probability_is_never_drawn():
    """Also where rounding could lead past the last token, or number 0 to the first."""
    rng = np.random.default_rng(0)
    probs = rng.random((300, 50)).astype(np.float32) * (rng.random((300, 50)) < 0.2)
    probs[:, 17] += 1e-6
    for number in (0.0, 0.5, 1 - 2**-24):
        numbers = jnp.full(300, number, jnp.float32)
        token = np.asarray(sampling.draw(numbers, jnp.asarray(probs)))
        assert (probs[np.arange(300), token] > 0).all()


def test_truncation_keeps_the_most_likely():
    rng = np.random.default_rng(1)
    log_probs = np.log(rng.dirichlet(np.ones(30), size=6)).astype(np.float32)
    top_k, top_p = np.array([30, 1, 5, 30, 4, 99]), np.array([1, 1, 1, 0.5, 0.6, 1e-6])
    got = sampling.truncate(
        jnp.asarray(log_probs), jnp.asarray(top_k), jnp.asarray(top_p, jnp.float32)
    )
    for row, k, p, out in zip(log_probs, top_k, top_p, np.exp(got), strict=True):
        order = np.argsort(-row)
        reached = np.cumsum(np.exp(row[order].astype(np.float64)))
        kept = order[: min(k, int(np.searchsorted(reached, p * (1 - 1e-6))) + 1)]
        expected = np.zeros(30)
        expected[kept] = np.exp(row[kept]) / np.exp(row[kept]).sum()
        np.testing.assert_allclose(out, expected, atol=1e-6)


def test_keys_depend_on_seed_request_and_place():
    seed, request = (jnp.asarray(x, jnp.uint32) for x in ([1, 1, 2, 1], [5, 6, 5, 5]))
    count = jnp.asarray([0, 0, 0, 1])
    keys = sampling.token_keys(sampling.request_keys(seed, request), count)
    numbers = np.asarray(sampling.uniform(keys))
    assert len(set(numbers.tolist())) == 4
    alone = sampling.token_keys(sampling.request_keys(seed[2:3], request[2:3]), 0)
    assert sampling.uniform(alone)[0] == numbers[2]
