"""Expected gradients of the whole path, groups to loss, against exact derivatives.

The policy is a table: two words or the end after every beginning of up to two words. All 15 texts
are listed, so an expectation is a sum over them, or over all pairs of them for groups of two.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from c2.losses.config import ImportanceConfig, KLConfig, PolicyGradientConfig
from c2.losses.policy_gradient import policy_gradient
from c2.records import Effort, Generation, Group, Rollout
from c2.rl import credit
from c2.rl.kl_penalty import charge
from c2.rl.rows import pack

END, LENGTH, C = 0, 3, 4
STATES = [s for n in range(LENGTH) for s in itertools.product((1, 2), repeat=n)]
TEXTS = [(*s, w) for s in STATES for w in (0, 1, 2) if w == END or len(s) == LENGTH - 1]
PROMPT = 10  # + number of the state in which a generation begins


def random_policy(seed, spread=0.7):
    return np.random.default_rng(seed).normal(size=(len(STATES), 3)) * spread


PI, MU, REFERENCE = map(random_policy, (0, 1, 2))
REWARDS = np.random.default_rng(3).normal(size=len(TEXTS))
STATE_OF = np.array([[STATES.index(t[:i]) if i < len(t) else 0 for i in range(3)] for t in TEXTS])
WORD = np.array([[t[i] if i < len(t) else 0 for i in range(3)] for t in TEXTS])
REAL = np.array([[i < len(t) for i in range(3)] for t in TEXTS])


@jax.jit
def text_log_probs(logits):
    """Of the tokens of all texts, [text, token], 0 behind their end."""
    return jnp.where(REAL, jax.nn.log_softmax(logits)[STATE_OF, WORD], 0)


def log_table(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def probabilities(logits):
    return np.exp(np.asarray(text_log_probs(logits)).sum(1))


def expected_reward(logits):
    return jnp.exp(text_log_probs(logits).sum(1)) @ REWARDS


def divergence(logits, other):
    log_q = text_log_probs(logits).sum(1)
    return jnp.exp(log_q) @ (log_q - text_log_probs(other).sum(1))


def exact(f):
    """The derivative of a function of the policy."""
    return np.asarray(jax.jit(jax.grad(f))(PI))


def rollout(number, sampled_from, *, reward=None, cut=None, failed=False):
    """A text as the engine would record it; summed up after `cut` tokens."""
    text = TEXTS[number]
    table = log_table(sampled_from)
    links = []
    for start, end in itertools.pairwise(sorted({0, len(text), min(cut or 0, len(text))})):
        log_probs = [table[STATES.index(text[:i]), text[i]] for i in range(start, end)]
        links.append(
            Generation(
                tokens=np.array([PROMPT + STATES.index(text[:start]), *text[start:end]], np.int32),
                loss_mask=np.array([False] + [True] * (end - start)),
                log_probs=np.array([0, *log_probs], np.float32),
                versions=np.array([-1] + [0] * (end - start), np.int32),
                temperatures=np.ones(end - start + 1, np.float32),
                routes=np.zeros((end - start + 1, 0, 0), np.int16),
            )
        )
    return Rollout(
        generations=tuple(links),
        outcome="infrastructure_failure" if failed else "scored",
        stop="done",
        correct=0,
        reward=REWARDS[number] if reward is None else reward,
        effort=Effort(),
        behaviours={},
    )


def states(batch):
    """The state in which every target was chosen, [batch row, token]."""
    found = np.zeros(batch["tokens"].shape, int)
    for row, place in np.argwhere(batch["segment_ids"] > 0):
        token = batch["tokens"][row, place]
        if token >= PROMPT:
            found[row, place] = token - PROMPT
        elif (after := (*STATES[found[row, place - 1]], token)) in STATES:
            found[row, place] = STATES.index(after)
    return found


def pairs(sampled_from, **how):
    """All groups of two, and the probabilities of their members."""
    texts = [rollout(number, sampled_from, **how) for number in range(len(TEXTS))]
    chances = probabilities(sampled_from)
    for members in itertools.product(zip(texts, chances, strict=True), repeat=2):
        yield tuple(zip(*members, strict=True))


def descent(groups, config):
    """The expected gradient: groups of rollouts, each with its probability."""
    rows, rollouts = [], 0
    for members, chance in groups:
        step = credit.assign([Group(task="", rollouts=members)], config, rollouts=len(members))
        for row in step.rows:
            weights = row.weights * np.prod(chance) / step.denominator
            rows.append(dataclasses.replace(row, weights=weights, rollout=rollouts + row.rollout))
        rollouts += len(members)
    packed = pack(rows, context=32, multiple=128)  # one shape, few compilations
    batch, at = packed.batch, states(packed.batch)
    if config.kl.beta:
        reference = log_table(REFERENCE)[at, np.where(batch["weights"] > 0, batch["targets"], 0)]
        batch = charge(packed, np.where(batch["weights"] > 0, reference, np.nan), config.kl)
    del batch["routes"]  # this policy has none
    return np.asarray(loss_gradient(np.float32(PI), batch, at, config))


@functools.partial(
    jax.jit, static_argnames="config", compiler_options={"xla_backend_optimization_level": 0}
)
@jax.grad
def loss_gradient(logits, batch, at, config):
    log_probs = jax.nn.log_softmax(logits)[at, jnp.clip(batch["targets"], 0, 2)]
    return policy_gradient(log_probs, batch, config)[0]


def objective(**settings):
    return PolicyGradientConfig(tokens_per_rollout=C, **settings)


def close(got, expected):
    scale = np.abs(expected).max()
    assert scale > 1e-3
    np.testing.assert_allclose(got, expected, atol=1e-5 * scale)


@pytest.mark.parametrize(("baseline", "share"), [("mean", 1 / 2), ("leave_one_out", 1)])
def test_on_policy_it_ascends_the_expected_reward(baseline, share):
    gradient = descent(pairs(PI), objective(baseline=baseline))
    close(gradient, -share / C * exact(expected_reward))


@pytest.mark.parametrize("cut", [1, 2])
def test_summaries_change_nothing(cut):
    """A token has its one share of the gradient, in whichever link of the chain it is."""
    config = objective(kl=KLConfig(beta=0.5))
    whole = descent(pairs(PI), config)
    close(descent(pairs(PI, cut=cut), config), whole)


def test_kl_in_the_reward_is_the_kl_of_whole_rollouts():
    """Also where all rewards are equal: such groups have no advantage, but the KL goes on."""
    config = objective(kl=KLConfig(beta=0.5), baseline="leave_one_out")
    true = exact(lambda pi: divergence(pi, REFERENCE))
    close(descent(pairs(PI, reward=1.0), config), 0.5 / C * true)
    close(descent(pairs(PI), config), (0.5 * true - exact(expected_reward)) / C)


def test_kl_of_single_tokens_leaves_out_what_they_lead_to():
    def per_token(horizon="to_go", **kl):
        config = objective(kl=KLConfig(beta=0.5, horizon=horizon, **kl))
        return descent(pairs(PI, reward=1.0), config)

    alone = per_token("token")
    close(per_token(estimator="k2", placement="loss"), alone)
    true = 0.5 / C * exact(lambda pi: divergence(pi, REFERENCE))
    assert np.abs(alone - true).max() > 0.1 * np.abs(true).max()
    # what it is: at every state, as often as it is seen, the gradient of the KL of the next token
    seen = np.zeros(len(STATES))
    for text, chance in zip(TEXTS, probabilities(PI), strict=True):
        seen[[STATES.index(text[:i]) for i in range(len(text))]] += chance

    def local(logits):
        log_q = jax.nn.log_softmax(logits)
        return seen @ (jnp.exp(log_q) * (log_q - jax.nn.log_softmax(REFERENCE))).sum(1)

    close(alone, 0.5 / C * exact(local))


def test_k3_in_the_loss_is_the_other_divergence():
    gradient = descent(
        pairs(PI, reward=1.0), objective(kl=KLConfig(beta=1.0, estimator="k3", placement="loss"))
    )
    seen = np.zeros(len(STATES))
    for text, chance in zip(TEXTS, probabilities(PI), strict=True):
        seen[[STATES.index(text[:i]) for i in range(len(text))]] += chance
    q, p = (np.asarray(jax.nn.softmax(x)) for x in (PI, REFERENCE))
    close(gradient, seen[:, None] * (q - p) / C)


def weighted(weight):
    """-E[weight * (reward - mean reward) * d log pi] / C for samples of MU, written out."""
    ratio = np.exp(np.asarray(text_log_probs(PI) - text_log_probs(MU)))
    chance = probabilities(MU)
    advantage = REWARDS - chance @ REWARDS
    jacobian = jax.jit(jax.jacobian(text_log_probs))(PI)
    coefficient = (chance * advantage)[:, None] * np.where(REAL, weight(ratio), 0)
    return -np.tensordot(coefficient, jacobian, axes=2) / C


@pytest.mark.parametrize(
    ("importance", "weight"),
    [
        ({"kind": "off"}, np.ones_like),
        ({"kind": "token_tis", "high": 1.3}, lambda r: np.minimum(r, 1.3)),
        (
            {"kind": "sequence_tis", "high": 1.3},
            lambda r: np.broadcast_to(np.minimum(r.prod(1, keepdims=True), 1.3), r.shape),
        ),
        (
            {"kind": "mis", "low": 0.8, "high": 1.3},
            lambda r: np.where((r < 0.8) | (r > 1.3), 0, r),
        ),
    ],
)
def test_off_policy_every_weight_has_its_own_bias(importance, weight):
    config = objective(importance=ImportanceConfig(**importance), baseline="leave_one_out")
    gradient = descent(pairs(MU), config)
    close(gradient, weighted(weight))
    true = -exact(expected_reward) / C
    assert np.abs(gradient - true).max() > 0.1 * np.abs(true).max()


def test_off_policy_whole_ratios_are_exact():
    importance = ImportanceConfig(kind="sequence_tis", high=np.inf)
    config = objective(importance=importance, baseline="leave_one_out")
    close(descent(pairs(MU), config), -exact(expected_reward) / C)
    # k1 compares the reference with the policy that sampled
    config = dataclasses.replace(config, kl=KLConfig(beta=1.0))
    pull = exact(lambda pi: divergence(pi, REFERENCE) - divergence(pi, MU))
    close(descent(pairs(MU, reward=1.0), config), pull / C)


def test_failures_that_are_not_the_policys_leave_no_bias():
    """One of three is lost, whichever; as a reward of 0 it would be in the others' baseline."""
    lost = rollout(4, PI, failed=True)
    groups = (((*pair[:1], lost, *pair[1:]), chance) for pair, chance in pairs(PI))
    gradient = descent(groups, objective())
    # a third of the rollouts is missing, and nobody else's share has changed
    close(gradient, 2 / 3 * descent(pairs(PI), objective()))


# --- A rollout goes on with probability 1 - s after every token, which changes no reward ---


@pytest.mark.parametrize(("length_norm", "expected"), [("rollout", 0.212098), ("constant", 0.0)])
def test_one_over_length_shortens_what_is_right(length_norm, expected):
    """The gradient of an advantage of 1 to the logit of stopping is -s log(s) / (1 - s) - s > 0."""
    stop, longest = 0.25, 120
    logit = np.log(stop / (1 - stop))
    rows = []
    for length in range(1, longest + 1):
        member = Rollout(
            generations=(
                Generation(
                    tokens=np.array([2] + [1] * (length - 1) + [0], np.int32),
                    loss_mask=np.array([False] + [True] * length),
                    log_probs=np.zeros(length + 1, np.float32),
                    versions=np.zeros(length + 1, np.int32),
                    temperatures=np.ones(length + 1, np.float32),
                    routes=np.zeros((length + 1, 0, 0), np.int16),
                ),
            ),
            outcome="scored",
            stop="done",
            correct=1,
            reward=2.0,  # and the other one 0: an advantage of 1
            effort=Effort(),
            behaviours={},
        )
        other = dataclasses.replace(member, reward=0.0)
        config = objective(length_norm=length_norm)
        step = credit.assign([Group(task="", rollouts=(member, other))], config, rollouts=1)
        chance = stop * (1 - stop) ** (length - 1)
        scale = C if length_norm == "constant" else 1
        assert step.denominator == scale
        rows.append(dataclasses.replace(step.rows[0], weights=step.rows[0].weights * chance))
    batch = pack(rows, context=256).batch

    @jax.jit
    def gain(logit):
        log_probs = jnp.stack([jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit)])
        return -policy_gradient(log_probs[batch["targets"]], batch, config)[0]

    np.testing.assert_allclose(jax.grad(gain)(jnp.float32(logit)), expected, atol=2e-6)
