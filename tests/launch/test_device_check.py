"""The device check on a CPU: right kernels, wrong ones, and ones that raise."""

import dataclasses
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import device_check, kernel_cases
from launch.device_check import Check, Peak, difference
from pallas_kernels import nvfp4
from pallas_kernels.nvfp4 import arg_specs, reference

CPU = jax.devices("cpu")[0]
QUANTISE = kernel_cases.Case(
    op="nvfp4",
    what="near ties",
    run=lambda impl, x: nvfp4.quantize(x, impl=impl),
    shapes=(jax.ShapeDtypeStruct((32, 64), jnp.float32),),
    impls=("xla", "reciprocal"),
    exact=True,
    arrays=lambda: (arg_specs.near_ties(32, 64),),
    oracle=reference.quantize,
    tolerance=None,
    work=32 * 64 * 4.0,
    unit="B",
)
PRODUCT = dataclasses.replace(
    QUANTISE,
    op="product",
    arrays=lambda: (np.eye(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)),
    oracle=jnp.matmul,
    tolerance=(1e-6, 1e-6),
    work=2.0 * 8**3,
    unit="FLOP",
)


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr(device_check, "ROUND_SECONDS", 0.0)


def check(case, *programs):
    checks = [Check(f"{case.op} {i}", program, case) for i, program in enumerate(programs)]
    return list(device_check.run(checks, CPU, Peak("cpu", {"bf16": 1e9}, 1e9)))


def test_codes_of_a_right_kernel_pass_and_those_of_fast_division_do_not():
    right, wrong = check(QUANTISE, *(partial(QUANTISE.run, impl) for impl in QUANTISE.impls))
    assert right.failure is None
    assert "result 0 is wrong in" in wrong.failure


def test_a_wrong_or_raising_kernel_hides_no_other():
    def unable(a, b):
        raise NotImplementedError("not on this chip")

    outcomes = check(
        PRODUCT, unable, jnp.matmul, lambda a, b: (a @ b).at[7, 7].mul(1.001), lambda a, b: b[:4]
    )
    assert [outcome.failure for outcome in outcomes] == [
        "NotImplementedError: not on this chip",
        None,
        "result 0 is wrong in 1 of 64 places",
        "result 0 has shape (4, 8), not (8, 8)",
    ]
    assert outcomes[0].seconds is None and "FAILED: NotImpl" in device_check.describe(outcomes[0])


def test_throughput_is_work_per_second_and_its_share_of_the_peak():
    (outcome,) = check(PRODUCT, jnp.matmul)
    assert outcome.rate * outcome.seconds == pytest.approx(PRODUCT.work)
    assert outcome.share == pytest.approx(outcome.rate / 1e9)
    outcome = dataclasses.replace(outcome, seconds=0.002, rate=2e12, share=0.25)
    assert device_check.describe(outcome) == "product 0: 2.000 ms, 2 TFLOP/s (25% of the peak), ok"


@pytest.mark.parametrize(
    ("got", "tolerance", "equal"),
    [
        ([1.0, 2.0], None, True),
        ([1.0, -2.0], None, False),
        ([1.0, np.nan], (1.0, 1.0), False),
        ([1.01, 2.0], (0.0101, 0.0), True),
        ([1.01, 2.0], (0.0099, 0.0), False),
        ([1.01, 2.0], (0.0, 0.0101 / np.sqrt(2.5)), True),
        ([1.01, 2.0], (0.0, 0.0099 / np.sqrt(2.5)), False),
    ],
)
def test_differences_are_relative_to_elements_and_to_the_root_mean_square(got, tolerance, equal):
    assert (difference(np.array(got), np.array([1.0, 2.0]), tolerance) is None) == equal


def test_bytes_of_scalars_and_signs_of_zeros_are_compared():
    assert difference(np.float32(3), np.float32(3), None) is None
    assert difference(np.float32(-0.0), np.float32(0), None) is not None


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h100"),
        ("NVIDIA B200", "b200"),
        ("TPU v5", "v5p:2x2x1"),
        ("TPU v5 lite", None),
        ("TPU v6 lite", "v6e:2x2"),
        ("NVIDIA A100-SXM4-40GB", None),
    ],
)
def test_a_device_is_known_by_its_name(kind, chip):
    peak = device_check.peak_of(types.SimpleNamespace(device_kind=kind))
    assert (peak and peak.chip) == chip


def test_without_an_accelerator_one_line_says_so(capsys):
    device_check.main([])
    assert capsys.readouterr().out == "jax sees no accelerator: nothing to check\n"
