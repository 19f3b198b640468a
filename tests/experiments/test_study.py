"""Claims decide as written; figures land in the workdir without pyplot."""

import sys

import numpy as np
import pytest
from rich.console import Console

from experiments.study import Claim, Run, new_figure


def claim(measured, relation="<", bound=1.0, seeds=1):
    return Claim(statement="s", measured=measured, bound=bound, relation=relation, seeds=seeds)


@pytest.mark.parametrize(
    ("relation", "shown_at"),
    [("<", [0.0]), ("<=", [0.0, 1.0]), (">", [2.0]), (">=", [1.0, 2.0])],
)
def test_verdict(relation, shown_at):
    for measured in (0.0, 1.0, 2.0):
        expected = "shown" if measured in shown_at else "not shown"
        assert claim(measured, relation).verdict == expected
    assert claim(float("nan"), relation).verdict == "not shown"


def test_infinite_measurement_decides():
    assert claim(float("inf"), ">").verdict == "shown"
    assert claim(float("inf"), "<").verdict == "not shown"


def test_numpy_scalars_become_floats():
    made = claim(np.float32(0.5), bound=np.int64(1))
    assert type(made.measured) is float
    assert type(made.bound) is float


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relation": "=="}, "relation"),
        ({"bound": float("inf")}, "can never decide"),
        ({"bound": float("nan")}, "can never decide"),
        ({"seeds": 0}, "seeds"),
    ],
)
def test_claim_that_cannot_fail_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        claim(0.0, **options)


def test_save_figure(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    run = Run(workdir=tmp_path, console=Console(quiet=True))
    figure, axes = new_figure(1, 2, width=2, height=1)
    assert axes.shape == (2,)
    axes[0].plot([0, 1])
    saved = run.save_figure(figure, "loss", caption="Loss.")
    assert (saved.path, saved.caption) == ("figures/loss.png", "Loss.")
    assert (tmp_path / saved.path).read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
