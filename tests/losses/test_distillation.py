"""Chunked divergences between two heads' distributions against numpy float64."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.losses.distillation import DIVERGENCES, linear_distillation

FAST_COMPILE = {"xla_backend_optimization_level": 0}  # these programs run a few times
SHAPE, EMBED, VOCAB = (5, 15), 12, 37  # 75 tokens


def operands():
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, *SHAPE, EMBED)).astype(np.float32)
    head = rng.normal(size=(EMBED, VOCAB)).astype(np.float32)
    weights = rng.uniform(size=SHAPE).astype(np.float32)
    return student, teacher, head, weights * (np.arange(SHAPE[1]) < 13)  # the end is padding


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def plain(divergence, student, teacher, head, mask):
    """The sum, in float64, from the whole matrices of logits."""
    student, teacher, head = (np.float64(x) for x in (student, teacher, head))
    log_q, log_p = log_softmax(student @ head), log_softmax(teacher @ head)
    if divergence == "reverse_kl":
        log_p, log_q = log_q, log_p
    return ((np.exp(log_p) * (log_p - log_q)).sum(-1) * mask).sum()


@cache
def loss_and_grads(divergence, chunk=256):
    def loss(*args):
        return linear_distillation(*args, divergence=divergence, chunk=chunk)

    grads = jax.value_and_grad(loss, argnums=(0, 1, 2))
    return jax.jit(grads, compiler_options=FAST_COMPILE)


def slope(divergence, which, direction, step=1e-5):
    """Directional derivative of `plain` by central differences; the teacher's head stays."""
    student, teacher, head, mask = operands()

    def at(t):
        if which == "student":
            return plain(divergence, student + t * direction, teacher, head, mask)
        # The head moves for the student only: give each its own through a wider one.
        both = np.concatenate([np.float64(head) + t * direction, head])
        zeros = np.zeros_like(student)
        wide = np.concatenate([student, zeros], -1), np.concatenate([zeros, teacher], -1)
        return plain(divergence, *wide, both, mask)

    return (at(step) - at(-step)) / (2 * step)


# one token a chunk; not dividing 75; dividing; larger than the batch
@pytest.mark.parametrize("chunk", [1, 16, 25, 256])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_value_equals_the_closed_form_for_any_chunk(divergence, chunk):
    exact = plain(divergence, *operands())
    assert exact > 10
    loss, _ = loss_and_grads(divergence, chunk)(*operands())
    np.testing.assert_allclose(loss, exact, rtol=2e-6)
    value_only = jax.jit(linear_distillation, static_argnames=("divergence", "chunk"))
    again = value_only(*operands(), divergence=divergence, chunk=chunk)
    np.testing.assert_allclose(again, exact, rtol=2e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_equal_finite_differences_and_the_target_has_none(divergence):
    _, (d_student, d_teacher, d_head) = loss_and_grads(divergence, 16)(*operands())
    rng = np.random.default_rng(1)
    for which, gradient in (("student", d_student), ("head", d_head)):
        for _ in range(3):
            direction = rng.normal(size=gradient.shape)
            expected = slope(divergence, which, direction)
            np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=1e-4)
    assert not np.asarray(d_teacher).any()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_chunks_change_gradients_by_rounding_only(divergence):
    _, whole = loss_and_grads(divergence, 256)(*operands())
    _, cut = loss_and_grads(divergence, 16)(*operands())
    for a, b in zip(cut, whole, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * max(np.abs(b).max(), 1e-9))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_gradient_of_the_mask_is_the_divergence_of_each_token(divergence):
    student, teacher, head, mask = operands()

    def loss(mask):
        args = student, teacher, head, mask
        return linear_distillation(*args, divergence=divergence, chunk=16)

    each = jax.jit(jax.grad(loss), compiler_options=FAST_COMPILE)(mask)
    for row, at in ((0, 0), (3, 7), (4, 14)):
        token = [x[row, at] for x in (student, teacher)]
        exact = plain(divergence, *token, head, 1.0)
        np.testing.assert_allclose(each[row, at], exact, rtol=1e-5)


def test_equal_distributions_cost_nothing():
    student, _, head, mask = operands()
    loss, (d_student, _, d_head) = loss_and_grads("forward_kl")(student, student, head, mask)
    assert loss == 0 and not np.asarray(d_student).any() and not np.asarray(d_head).any()


def test_the_cotangent_scales_the_gradient():
    student, teacher, head, mask = operands()

    def scaled(student, head):
        return -0.25 * linear_distillation(student, teacher, head, mask)

    got = jax.jit(jax.grad(scaled, argnums=(0, 1)), compiler_options=FAST_COMPILE)(student, head)
    _, (d_student, _, d_head) = loss_and_grads("forward_kl")(*operands())
    for a, b in zip(got, (d_student, d_head), strict=True):
        np.testing.assert_array_equal(a, -0.25 * b)  # a power of two: exact


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_masked_tokens_have_no_effect_by_a_bit(divergence):
    student, teacher, head, mask = operands()
    off = (mask == 0)[..., None]
    garbage = np.where(off, np.float32(1e3), student), np.where(off, np.float32(-1e3), teacher)
    loss, grads = loss_and_grads(divergence, 16)(student, teacher, head, mask)
    loss2, grads2 = loss_and_grads(divergence, 16)(*garbage, head, mask)
    assert loss == loss2
    for a, b in zip(grads, grads2, strict=True):
        np.testing.assert_array_equal(a, b)


def test_certain_and_contrary_heads_give_finite_numbers():
    student, teacher, head, mask = operands()
    for divergence in DIVERGENCES:
        loss, grads = loss_and_grads(divergence)(1e3 * student, 1e3 * teacher, head, mask)
        exact = plain(divergence, 1e3 * student, 1e3 * teacher, head, mask)
        np.testing.assert_allclose(loss, exact, rtol=1e-4)
        assert all(np.isfinite(grad).all() for grad in grads)


def test_bf16_gradients_err_by_roundings_only():
    student, teacher, head, mask = operands()
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (student, teacher, head)]
    exact = [np.asarray(x, np.float32) for x in rounded]
    loss, grads = loss_and_grads("forward_kl")(*rounded[:2], head, mask)
    wide_loss, wide = loss_and_grads("forward_kl")(*exact, mask)
    np.testing.assert_allclose(loss, wide_loss, rtol=1e-5)  # logits and sums are f32
    assert [grad.dtype for grad in grads] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for a, b in zip(grads, wide, strict=True):
        assert np.abs(np.asarray(a, np.float32) - b).max() <= 2**-7 * np.abs(b).max()


def test_an_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match="'kl' is none of forward_kl, reverse_kl"):
        linear_distillation(*operands(), divergence="kl")
