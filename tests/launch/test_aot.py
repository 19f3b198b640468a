"""Ahead-of-time checks: what counts as failure, crashes of compilers, the search for division."""

import json
import subprocess
import sys

import pytest

from launch import aot, divisions, kernel_cases, targets

CLEAN = {"seconds": 1.0, "temp_bytes": 3 << 20, "texts": 2, "divisions": []}


@pytest.mark.parametrize(
    ("result", "exact", "approximate", "expected"),
    [
        (CLEAN, True, False, None),
        (CLEAN | {"divisions": ["div.full.f32"]}, False, False, None),
        (CLEAN | {"divisions": ["div.full.f32"]}, True, False, "division: div.full.f32"),
        (CLEAN | {"divisions": ["div.full.f32"]}, True, True, None),
        (CLEAN, True, True, "division: none, on purpose"),
        (CLEAN | {"texts": 0}, True, False, "nothing to search"),
        (CLEAN | {"texts": 0}, False, False, None),
        ({"seconds": 1.0, "error": "too large"}, True, False, "too large"),
    ],
)
def test_failures_are_errors_wrong_divisions_and_searches_of_nothing(
    result, exact, approximate, expected
):
    failure = aot.failure(result, exact=exact, approximate=approximate)
    assert failure is None if expected is None else expected in failure


def test_the_table_has_a_row_a_program_and_a_column_a_chip(monkeypatch):
    monkeypatch.setattr(aot, "versions", lambda: ["jax 1"])
    clean = CLEAN | {"exact": True}
    results = {
        ("op, xla, a, b", "h100"): clean,
        ("op, xla, a, b", "b200"): {"seconds": 1.0, "error": "too large", "exact": True},
        ("op, reciprocal, a", "b200"): clean | {"divisions": ["div.full.f32", "rcp.approx.f32"]},
        ("other, gpu, c", "b200"): CLEAN | {"exact": False},
    }
    rows = [line for line in aot.table(results).splitlines() if line.startswith("|")]
    assert rows == [
        "| op | backend | program | h100 | b200 |",
        "| --- | --- | --- | --- | --- |",
        "| op | xla | a, b | ok, 3.0 MiB | too large |",
        "| op | reciprocal | a |  | ok, 3.0 MiB |",
        "| other | gpu | c |  | ok, 3.0 MiB |",
        "| op | backend | program | h100 | b200 |",
        "| --- | --- | --- | --- | --- |",
        "| op | xla | a, b | none in 2 |  |",
        "| op | reciprocal | a |  | div.full.f32, rcp.approx.f32 in 2 |",
    ]


WORKER = """
import json, os, sys
for name in json.load(sys.stdin):
    print(json.dumps(name), flush=True)
    if name == "crash":
        print("Check failed: it", file=sys.stderr, flush=True)
        os.abort()
    print(json.dumps({"seconds": 0.0, "chip": sys.argv[1]}), flush=True)
"""


def test_a_crash_of_the_compiler_costs_one_program():
    worker = ("-c", WORKER)
    results = dict(aot.compile_all("b200", ["a", "crash", "b", "c"], worker))
    assert list(results) == ["a", "crash", "b", "c"]
    assert "crashed with status -6: Check failed: it" in results["crash"]["error"]
    assert all(results[name] == {"seconds": 0.0, "chip": "b200"} for name in "abc")


def test_a_worker_that_does_not_start_is_an_error_and_not_a_loop():
    with pytest.raises(RuntimeError, match="b200 ended: no such thing"):
        list(aot.compile_all("b200", ["a"], ("-c", "import sys; sys.exit('no such thing')")))


def test_approximate_division_is_found_in_all_three_languages_and_nothing_else_is(tmp_path):
    (tmp_path / "a.ptx").write_text("div.rn.f32 %f1; div.s32 %r1; ex2.approx.f32 %f2; rcp.rn.f32")
    (tmp_path / "0018-post-finalize-llo.txt").write_text("llo.vmul.f32 @_reciprocal llo.sdiv")
    hlo = "%reciprocal = s32[4]{0} divide(%a, %b)\n%divide = f32[4]{0} multiply(%a, %b)"
    assert divisions.search(tmp_path, hlo) == (3, ())
    (tmp_path / "b.ptx").write_text("  div.full.f32 %f1;\n  rcp.approx.ftz.f32 %f2;")
    (tmp_path / "1018-post-finalize-llo.txt").write_text("%1 = llo.vrecip.f32 %0")
    found = divisions.search(tmp_path, f"{hlo}\n  ROOT %d = f32[4]{{0:T(1024)}} divide(%a, %b)")
    expected = ("div.full.f32", "hlo divide", "llo.vrecip.f32", "rcp.approx.ftz.f32")
    assert found == (5, expected)


def test_programs_are_chosen_by_op_and_chip():
    known = kernel_cases.jobs()
    everything = aot.select(known, [], [])
    assert list(everything) == [*kernel_cases.NVIDIA, *kernel_cases.TPUS]
    assert {name for names in everything.values() for name in names} == set(known)
    some = aot.select(known, ["nvfp4"], ["b200"])
    assert list(some) == ["b200"]
    assert some["b200"] == [name for name in everything["b200"] if name.startswith("nvfp4, ")]


@pytest.mark.parametrize(
    ("ops", "chips", "message"),
    [
        (["mxfp9"], [], "--ops: 'mxfp9' is not legal; legal: mxfp8, nvfp4"),
        ([], ["a100"], "--targets: 'a100' is not legal; legal: h100, b200"),
    ],
)
def test_unknown_names_give_one_line_with_the_legal_ones(ops, chips, message):
    with pytest.raises(ValueError, match=message):
        aot.select(kernel_cases.jobs(), ops, chips)


def test_every_backend_has_chips_and_the_device_check_the_arrays_that_were_compiled():
    cases = {case.op: case for case in kernel_cases.cases() if case.arrays}
    impls = {impl for case in cases.values() for impl in case.impls}
    assert impls - {"interpret"} == set(kernel_cases.CHIPS) & impls
    for op in ("grouped_matmul", "flash_attention"):
        arrays = cases[op].arrays()
        assert [(a.shape, a.dtype) for a in arrays] == [
            (s.shape, s.dtype) for s in cases[op].shapes
        ]


SCRIPT = """
import json, sys, tempfile
from functools import partial
from pathlib import Path
from launch import aot_worker, targets
folder = Path(tempfile.mkdtemp())
targets.prepare(folder)
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from pallas_kernels import mxfp8, nvfp4

def divide(x, y):
    return x / y

def divide_in_kernel(x, y):
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] / y_ref[...]
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

chip, backend = sys.argv[1:]
matrix = jax.ShapeDtypeStruct((32, 2048), jnp.bfloat16)
numbers = jax.ShapeDtypeStruct((64, 128), jnp.float32)
programs = {
    "nvfp4": (partial(nvfp4.quantize, impl=backend), (matrix,)),
    "mxfp8": (partial(mxfp8.quantize, impl=backend), (matrix,)),
    "reciprocal": (partial(nvfp4.quantize, impl="reciprocal"), (matrix,)),
    "divide": (divide if backend == "xla" else divide_in_kernel, (numbers, numbers)),
}
device, *_ = targets.devices(chip)
results = {n: aot_worker.compile_for(device, *p, folder) for n, p in programs.items()}
assert not any(p.is_file() for p in folder.rglob("*"))
print(json.dumps(results))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "backend", "division"),
    [
        ("h100", "xla", "div.full.f32"),
        ("b200", "xla", "div.full.f32"),
        ("h100", "gpu", "div.full.f32"),
        ("b200", "gpu", "div.full.f32"),
        ("v6e:2x2", "tpu", "llo.vrecip.f32"),
    ],
)
def test_quantisers_hold_no_approximate_division_and_a_plain_quotient_does(chip, backend, division):
    if reason := targets.missing(chip):
        pytest.skip(reason)
    command = [sys.executable, "-c", SCRIPT, chip, backend]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for name in ("nvfp4", "mxfp8"):
        assert results[name]["texts"] > 0 and results[name]["divisions"] == [], results
    assert division in results["divide"]["divisions"]
    assert results["reciprocal"]["divisions"]
