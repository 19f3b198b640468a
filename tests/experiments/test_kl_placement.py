"""The gradients against closed forms, and that each claim can fail."""

import jax
import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from experiments import kl_placement as study
from experiments.study import Run

QUICK = study.get_config("quick")


def test_gradients_of_the_example():
    gradient = jax.jit(study.gradients)(*map(np.array, study.EXAMPLE))
    reverse = [0.10575818, -0.17665001, 0.07089183]
    forward = [0.1303814, -0.21777867, 0.08739727]
    expected = {
        "KL(q||p)": reverse,
        "KL(p||q)": forward,
        "k1 as loss": [0, 0, 0],
        "k1 in reward": reverse,
        "k2 as loss": reverse,
        "k2 in reward": [-0.01776568, 0.02967437, -0.01190869],
        "k3 as loss": forward,
        "k3 in reward": [-0.02462322, 0.04112866, -0.01650544],
    }
    assert set(study.USES) | {"KL(q||p)", "KL(p||q)"} == set(expected) == set(gradient)
    for name, row in expected.items():
        np.testing.assert_allclose(gradient[name], row, atol=3e-8, err_msg=name)


def test_gradients_against_the_score_function():
    """E[weight * d log q], written out: the weight is the derivative, or the penalty itself."""
    theta, reference = study.random_policies(1, 20, 5)
    q, p = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (theta, reference))
    r = p / q
    weights = {
        "KL(q||p)": -np.log(r),
        "KL(p||q)": -r,
        "k1 as loss": np.ones_like(r),
        "k2 as loss": -np.log(r),
        "k3 as loss": 1 - r,
        "k1 in reward": -np.log(r),
        "k2 in reward": np.log(r) ** 2 / 2,
        "k3 in reward": r - 1 - np.log(r),
    }
    with jax.enable_x64(True):
        measured = jax.jit(jax.vmap(study.gradients))(theta, reference)
    assert set(measured) == set(weights)
    for name, weight in weights.items():
        expected = q * (weight - (q * weight).sum(-1, keepdims=True))  # d log q_i = e_i - q
        np.testing.assert_allclose(measured[name], expected, atol=1e-12, err_msg=name)


def test_policies_reach_from_near_to_far():
    theta, reference = study.random_policies(0, 2000, 8)
    q, p = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (theta, reference))
    divergence = (q * np.log(q / p)).sum(-1)
    assert divergence.min() < 1e-3
    assert divergence.max() > 5


def test_quick_variant_runs_to_a_result(tmp_path):
    result = study.run(QUICK, Run(workdir=tmp_path, console=Console(quiet=True)))
    assert [claim.verdict for claim in result.claims] == ["shown"] * 4
    (figure,) = result.figures
    assert (tmp_path / figure.path).read_bytes().startswith(b"\x89PNG")
    assert [len(rows) for rows in result.tables.values()] == [8]


def test_each_claim_can_fail():
    _, pairs = study.measure(QUICK)
    assert all(claim.verdict == "shown" for claim in study.judge(QUICK, pairs))
    truth = dict.fromkeys(pairs, pairs["KL(q||p)"]) | {"KL(p||q)": pairs["KL(p||q)"]}
    wrong = truth | dict.fromkeys(["k1 in reward", "k2 as loss"], pairs["k3 as loss"])
    assert all(claim.verdict == "not shown" for claim in study.judge(QUICK, wrong))


@pytest.mark.parametrize(
    ("key", "change"), [("policies", {"policies": 0}), ("vocab", {"vocab": 1})]
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}.*legal"):
        study.Config(**change)


def test_unknown_variant_names_the_legal_ones():
    with pytest.raises(ConfigError, match="legal: full, quick"):
        study.get_config("huge")
