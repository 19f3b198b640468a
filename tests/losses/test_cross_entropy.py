"""Chunked cross-entropy against softmax and its gradient written out in numpy float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.losses.cross_entropy import linear_cross_entropy, token_log_probs

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
SHAPE, EMBED, VOCAB = (5, 15), 12, 37  # 75 tokens


def operands():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(*SHAPE, EMBED)).astype(np.float32) * 3
    head = rng.normal(size=(EMBED, VOCAB)).astype(np.float32)
    targets = rng.integers(VOCAB, size=SHAPE).astype(np.int32)
    weights = rng.uniform(size=SHAPE).astype(np.float32)
    return hidden, head, targets, weights * (np.arange(SHAPE[1]) < 13)  # the end is padding


def plain(hidden, head, targets, mask):
    """Loss, d_hidden, d_head and d_mask from the whole matrix of logits."""
    hidden, head = np.float64(hidden), np.float64(head)
    logits = hidden @ head
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    hit = np.eye(head.shape[1])[targets]
    d_logits = (probs - hit) * mask[..., None]
    losses = -np.log((probs * hit).sum(-1))
    d_head = np.einsum("abe,abv->ev", hidden, d_logits)
    return (losses * mask).sum(), d_logits @ head.T, d_head, losses


@cache
def loss_and_grads(chunk=256):
    def loss(*args):
        return linear_cross_entropy(*args, chunk=chunk)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 3)), compiler_options=FAST_COMPILE)


# one token a chunk; not dividing 75; dividing; all in one; larger than the batch
@pytest.mark.parametrize("chunk", [1, 16, 25, 75, 256])
def test_value_and_gradients_equal_the_plain_loss(chunk):
    loss, grads = loss_and_grads(chunk)(*operands())
    exact, *exact_grads = plain(*operands())
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        np.testing.assert_allclose(grad, exact_grad, atol=1e-6 * np.abs(exact_grad).max())


def test_value_without_gradient_is_computed_by_other_code():
    loss = jax.jit(linear_cross_entropy, static_argnames="chunk")(*operands(), chunk=16)
    np.testing.assert_allclose(loss, plain(*operands())[0], rtol=1e-6)


def test_the_cotangent_scales_the_gradient():
    hidden, head, targets, mask = operands()

    def scaled(hidden, head):
        return -0.25 * linear_cross_entropy(hidden, head, targets, mask)

    got = jax.jit(jax.grad(scaled, argnums=(0, 1)), compiler_options=FAST_COMPILE)(hidden, head)
    _, base = loss_and_grads()(hidden, head, targets, mask)
    for a, b in zip(got, base[:2], strict=True):
        np.testing.assert_array_equal(a, -0.25 * b)  # a power of two: exact


@pytest.mark.parametrize("chunk", [16, 256])
def test_masked_tokens_have_no_effect_by_a_bit(chunk):
    hidden, head, targets, mask = operands()
    off = mask == 0
    garbage = np.where(off[..., None], np.float32(1e4), hidden)
    elsewhere = np.where(off, VOCAB + 5, targets)  # not even a word
    loss, (d_hidden, d_head, _) = loss_and_grads(chunk)(hidden, head, targets, mask)
    loss2, (d_hidden2, d_head2, _) = loss_and_grads(chunk)(garbage, head, elsewhere, mask)
    assert loss == loss2
    np.testing.assert_array_equal(d_head, d_head2)
    np.testing.assert_array_equal(d_hidden, d_hidden2)
    assert not np.asarray(d_hidden)[off].any()


def test_nothing_to_predict_is_no_loss():
    loss, grads = loss_and_grads()(*operands()[:3], np.zeros(SHAPE, np.float32))
    assert loss == 0 and not any(np.asarray(grad).any() for grad in grads[:2])


def test_bf16_errs_by_roundings_of_the_gradient_only():
    hidden, head, targets, mask = operands()
    hidden = jnp.asarray(hidden, jnp.bfloat16)
    loss, grads = loss_and_grads()(hidden, head, targets, mask)
    rounded = (np.asarray(x.astype(jnp.bfloat16), np.float32) for x in (hidden, head))
    exact, *exact_grads = plain(*rounded, targets, mask)
    np.testing.assert_allclose(loss, exact, rtol=1e-6)  # logits and sums are f32
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for grad, exact_grad in zip(grads, exact_grads, strict=True):
        error = np.abs(np.asarray(grad, np.float32) - exact_grad).max()
        assert error < 2**-8 * np.abs(exact_grad).max()  # half a unit in bf16's last place


def test_extreme_logits_are_safe():
    hidden, head, targets, mask = operands()
    loss, grads = loss_and_grads()(1e4 * hidden, head, targets, mask)
    np.testing.assert_allclose(loss, plain_of_large(1e4 * hidden, head, targets, mask), rtol=1e-5)
    assert all(np.isfinite(grad).all() for grad in grads)


def plain_of_large(hidden, head, targets, mask):
    logits = np.float64(hidden) @ np.float64(head)
    gap = logits.max(-1) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (gap * mask).sum()  # the softmax is one-hot, the log-sum-exp the maximum


def test_token_log_probs_equal_a_softmax_in_float64():
    hidden, head, targets, _ = operands()
    logits = hidden @ head
    probs = np.exp(np.float64(logits))
    probs /= probs.sum(-1, keepdims=True)
    exact = np.log(np.take_along_axis(probs, targets[..., None], -1))[..., 0]
    got = token_log_probs(jnp.asarray(logits), targets)
    np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-5)
