"""A small run of the study, that it continues after an interruption, and that claims can fail."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from c2.config import ConfigError
from experiments import low_precision as study
from experiments.study import Run

SMOKE = study.get_config("smoke")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def result(workdir):
    """One model per precision; three steps to compile take their time."""
    return study.run(replace(SMOKE, seeds=1), Run(workdir=workdir, console=Console(quiet=True)))


@pytest.mark.slow
def test_models_learn_and_differ(result, workdir):
    assert [claim.verdict for claim in result.claims] == ["shown"] * 3
    assert len(set(result.metrics.values())) == 3  # each precision is another computation
    (figure,) = result.figures
    assert (workdir / figure.path).read_bytes().startswith(b"\x89PNG")
    (rows,) = result.tables.values()
    assert [row["experts"] for row in rows] == list(study.NAMES.values())
    for precision in study.NAMES:
        curve = study.Curve(**json.loads((workdir / f"curves/{precision}_0.json").read_text()))
        assert curve.held_out[1] < curve.held_out[0] < np.log(512)
        assert len(curve.loss) == SMOKE.training.steps


@pytest.mark.slow
def test_an_interrupted_study_continues(result, workdir, monkeypatch):
    (workdir / "curves" / "mxfp8_0.json").unlink()
    trained = []
    train = study._train

    def spy(*args):
        trained.append(args[-2])
        return train(*args)

    monkeypatch.setattr(study, "_train", spy)
    again = study.run(replace(SMOKE, seeds=1), Run(workdir=workdir, console=Console(quiet=True)))
    assert trained == ["mxfp8"]
    assert again.metrics == result.metrics  # bitwise


def curves(mxfp8=(2.0, 3.0), nvfp4=(2.0, 3.0), seconds=1.0):
    def of(final, seconds):
        return [study.Curve([5.0, one], [6.0], seconds) for one in final]

    return {
        study.BF16: of((2.0, 3.0), 1.0),
        study.MXFP8: of(mxfp8, 1.0),
        study.NVFP4: of(nvfp4, seconds),
    }


@pytest.mark.parametrize(
    ("change", "verdicts"),
    [
        ({}, ["shown", "shown", "shown"]),
        ({"mxfp8": (2.03, 3.05)}, ["shown", "shown", "shown"]),
        ({"mxfp8": (2.05, 3.0)}, ["not shown", "shown", "shown"]),
        ({"nvfp4": (2.0, 2.9)}, ["shown", "not shown", "shown"]),  # better is no agreement, too
        ({"nvfp4": (2.0, np.nan)}, ["shown", "not shown", "shown"]),
        ({"seconds": 3.1}, ["shown", "shown", "not shown"]),
    ],
)
def test_each_claim_can_fail(change, verdicts):
    assert [claim.verdict for claim in study.judge(SMOKE, curves(**change))] == verdicts


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model.moe", {"model": replace(SMOKE.model, moe=None, dense_layers=1)}),
        ("seeds", {"seeds": 0}),
        ("evaluations", {"evaluations": 31}),
        ("stride", {"stride": 1.0}),
    ],
)
def test_bad_config_names_the_key(key, change):
    with pytest.raises(ConfigError, match=rf"^{key}: .*legal: "):
        replace(SMOKE, **change)


def test_precisions_differ_in_the_experts_only():
    models = [SMOKE.model_in(precision) for precision in study.NAMES]
    assert {replace(m, moe=replace(m.moe, precision="native")) for m in models} == {SMOKE.model}
    assert len(set(models)) == 3
    assert study.get_config().model.dtype == "bfloat16"
    assert study.get_config().evaluate_at == [70, 140, 210, 280]
