"""The train step on eight devices equals the step on one, in a process of its own."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import c2

SCRIPT = Path(__file__).with_name("sharded_step_script.py")
SEQ, HEADS, LATENT = 128, 8, 32  # of the script's model
EXACT = 1e-5
# A rounding to MXFP8 may fall on the other side of a tie: one element moves by a sixteenth.
ROUNDED = 1e-2

BOTH = {"mtp": True, "routes": True, "weights": "sharded"}
SOME = [
    {"attention": "mla", **BOTH, "context": 2, "expert": 4, "expert_micro_batches": 3},
    {"attention": "gqa", "context": 4, "expert": 8, "weights": "sharded"},
]
RANKS = (1, 2, 4, 8)
ALL = [
    {"attention": attention, **BOTH, "context": context, "expert": expert}
    for attention, context, expert in itertools.product(("mla", "gqa"), RANKS, RANKS)
] + [
    {"attention": "mla", **BOTH, "context": 2, "layout": "balanced"},
    {"attention": "mla", "context": 2, "expert": 2, "weights": "replicated"},
    {"attention": "gqa", "expert": 2},
]
MXFP8 = [
    {"attention": "mla", "weights": "sharded", "context": context, "expert": expert}
    for context, expert in itertools.product(RANKS, RANKS)
]


def results(cases, tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    subprocess.run(
        [sys.executable, SCRIPT, path],
        cwd=Path(c2.__file__).parent.parent,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        check=True,
    )
    return list(zip(cases, json.loads(path.read_text()), strict=True))


def assert_equal(case, found, bound):
    found = {name: found[name] for name in ("gradients", "metrics")}
    assert max(found.values()) < bound, (case, found)


def test_some_meshes(tmp_path):
    """Gradients, and in the first case what the devices tell each other to get them."""
    found = results(SOME, tmp_path)
    for case, result in found:
        assert_equal(case, result, EXACT)
    exchanged = found[0][1]["collectives"]
    kinds = {kind for kind, _, _ in exchanged}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    # sums over all devices: vectors of a layer, losses, loads; never a matrix
    assert max(math.prod(dims) for kind, dims, _ in exchanged if kind == "all-reduce") <= 128
    of_tokens = [dims for kind, dims, _ in exchanged if kind == "all-gather" and SEQ in dims]
    assert of_tokens and {math.prod(dims) // math.prod(dims[:2]) for dims in of_tokens} == {
        LATENT,  # of keys and values, and the rotary key
        2,  # segment and position
    }


@pytest.mark.slow
def test_keys_and_values_can_travel_instead(tmp_path):
    ((case, found),) = results([SOME[0] | {"exchange": "keys_values"}], tmp_path)
    assert_equal(case, found, EXACT)
    widths = {
        math.prod(dims[2:])
        for kind, dims, _ in found["collectives"]
        if kind == "all-gather" and SEQ in dims
    }
    assert widths == {2, HEADS * (16 + 16), HEADS * 16}


@pytest.mark.slow
def test_all_meshes(tmp_path):
    for case, found in results(ALL, tmp_path):
        assert_equal(case, found, EXACT)


@pytest.mark.slow
def test_all_meshes_with_rounded_dispatch(tmp_path):
    for case, found in results([case | {"dispatch": "mxfp8"} for case in MXFP8], tmp_path):
        assert_equal(case, found, ROUNDED)
