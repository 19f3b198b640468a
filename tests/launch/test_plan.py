"""The command for plans: counts against closed forms, compilers that fail, what is saved."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from launch import plan, plan_analytic, plan_case, plan_compiled, plan_mesh, plan_sweep, targets
from launch.hlo import Shape
from launch.hlo_traffic import Collective
from launch.plan_compiled import CompileError, compile_step

STUDY = "experiments/kimi_k25.py"
GIB = 2**30
MODULE = Path(__file__).parent / "modules" / "b200_2x8.hlo.gz"


def case(topology="v5p:8x8x16", variant="32k", *overrides):
    return plan_case.case(f"{STUDY}:{variant}", overrides, None, plan_mesh.topology(topology))


@pytest.fixture
def unprepared(monkeypatch):
    """The command in this process, which has a jax already and no compiler."""
    monkeypatch.setattr(targets, "prepare", lambda: None)
    monkeypatch.setattr(targets, "missing", lambda name: f"{name}: no compiler")


# Counts -------------------------------------------------------------------------------------------


def test_state_is_spread_over_all_devices_but_for_vectors():
    needs = plan_analytic.needs(case())
    total = needs.parameters["total"]
    assert total == 1_026_408_209_408
    assert needs.state["weights"] == pytest.approx(total * 4 / 1024, rel=2e-3)
    assert needs.state["moments"] == pytest.approx(total * 8 / 1024, rel=2e-3)


@pytest.mark.parametrize(("ranks", "per_layer"), [(2, 0.1406), (8, 0.2461)])
def test_context_traffic_at_256k_is_the_known_one(ranks, per_layer):
    """Bytes received per rank and layer, for one sequence of 262,144 tokens and bf16 latents."""
    planned = case("v5p:8x8x16", "256k", f"mesh.context={ranks}", f"phases.0.batch={1024 // ranks}")
    moved = sum(t.moved for t in plan_analytic.needs(planned).traffic if t.purpose == "context")
    passes = 3  # forward, once more for the backward pass, and the gradients
    assert moved / passes / 61 / GIB == pytest.approx(per_layer, abs=1e-4)


def test_full_keys_and_values_move_as_many_times_more_as_they_are_wide():
    def moved(exchange):
        needs = plan_analytic.needs(case("v5p:8x8x16", "32k", f"mesh.exchange={exchange}"))
        return sum(t.moved for t in needs.traffic if t.purpose == "context")

    assert moved("keys_values") / moved("latents") == pytest.approx((64 * 256 + 64) / 576)


def test_weights_and_gradients_move_what_a_hand_count_gives():
    needs = plan_analytic.needs(case())
    by = {(t.purpose, t.kind, t.axes): t.moved for t in needs.traffic}
    routed = 60 * 384 * 3 * 7168 * 2048 / 8 * (1 - 1 / 128)  # elements a device lacks
    assert by["weights", "all-gather", ("data", "context")] == pytest.approx(routed * 2 * 2)
    assert by["gradients", "reduce-scatter", ("data", "context")] == pytest.approx(routed * 4)


def test_tokens_reach_the_ranks_that_chance_sends_them_to():
    needs = plan_analytic.needs(case())
    drawn = np.random.default_rng(0).integers(0, 8, (100_000, 8))
    reached = np.mean([len(set(row)) for row in drawn.tolist()])
    assert needs.sent * 8 == pytest.approx(reached, abs=0.01)
    rounded = plan_analytic.needs(case("v5p:8x8x16", "32k", "mesh.dispatch=mxfp8"))
    plain, fewer = (
        sum(t.moved for t in n.traffic if t.purpose == "experts") for n in (needs, rounded)
    )
    assert fewer / plain == pytest.approx((2 * 33 / 64 + 1 + 2) / 5)


def test_model_flops_are_three_forward_passes_over_whole_rows():
    needs = plan_analytic.needs(case())
    tokens = 16_777_216
    attention = 61 * 64 * 320 * 32_768 * tokens  # 2 of a multiply-add times half of all pairs
    head_and_matrices = 2 * (32_861_477_888 - 163_840 * 7168) * tokens  # no embedding
    expected = 3 * (attention + head_and_matrices) / 1024
    assert needs.model_flops == pytest.approx(expected, rel=1e-3)
    assert needs.hardware_flops == pytest.approx(needs.model_flops * 4 / 3)


# Reading ------------------------------------------------------------------------------------------


def found(kind, shapes, group):
    return Collective(kind, tuple(Shape(*s) for s in shapes), 1.0, group, "", None)


def test_collectives_are_sorted_by_what_they_carry():
    fabric = plan_mesh.fabric(case("b200:2x8", "32k", "phases.0.batch=16"))
    tokens, pair, everyone = {32_768, 16_384}, (0, 1), tuple(range(16))

    def why(kind, shapes, group, summed="unexpected"):
        return plan_compiled.purposes(found(kind, shapes, group), fabric, 10**6, tokens, summed)

    latents, weights = ("bf16", (2, 32_768, 576)), ("bf16", (512, 64, 256))
    assert why("all-gather", [latents], pair) == {"context": 1}
    assert why("all-gather", [weights], everyone) == {"weights": 1}
    assert why("reduce-scatter", [weights], everyone) == {"gradients": 1}
    merged = why("all-gather", [latents, weights], pair)
    sizes = [2 * 32_768 * 576, 512 * 64 * 256]
    assert merged == {"context": sizes[0] / sum(sizes), "weights": sizes[1] / sum(sizes)}
    assert why("ragged-all-to-all", [("bf16", (9, 7168))], pair) == {"experts": 1}
    assert why("all-reduce", [("f32", (61, 7168))], ()) == {"small": 1}
    assert why("all-reduce", [weights], everyone) == {"unexpected": 1}
    assert why("all-reduce", [weights], everyone, "gradients") == {"gradients": 1}
    assert why("collective-permute", [latents], everyone) == {"unexpected": 1}


WORKER = """
import json, os, sys
request = json.load(sys.stdin)
print(json.dumps({"stage": "tracing"}), flush=True)
if request["config"] == "crash":
    print("Check failed: it", file=sys.stderr, flush=True)
    os.abort()
if request["config"] == "error":
    print(json.dumps({"error": "too large"}), flush=True)
    sys.exit()
open(request["hlo"], "w").write("HloModule m")
print(json.dumps({"memory": {}}), flush=True)
"""


def test_a_worker_gives_a_result_and_a_text_and_its_failures_are_one_line():
    def work(config):
        return compile_step({"config": config}, lambda *_: None, ("-c", WORKER))

    assert work("fine") == ({"memory": {}}, "HloModule m")
    with pytest.raises(CompileError, match="too large"):
        work("error")
    with pytest.raises(CompileError, match="crashed with status -6: Check failed"):
        work("crash")


# The command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "--config is missing"),
        ([f"--config={STUDY}"], "--topology is missing"),
        ([f"--config={STUDY}", "--topology=v5p"], "'v5p' is not legal"),
        ([f"--config={STUDY}", "--topology=v5p:0x2"], "'v5p:0x2' is not legal"),
        ([f"--config={STUDY}", "--topology=b100:2x8"], "'b100' is not a chip"),
        ([f"--config={STUDY}", "--topology=v5p:4x4x4", "--phase=x"], "--phase: 'x'"),
        ([f"--config={STUDY}", "--topology=v5p:4x4x4", "--config.mesh.context=3"], "3 ranks"),
        ([f"--config={STUDY}", "--topology=v5p:8x8x16", "--config.mesh.contxt=3"], "contxt"),
        (["--config=kl_estimators", "--topology=v5p:4x4x4"], "no pretraining study"),
        (["--what=3"], "what"),
        (["stray"], "stray"),
    ],
)
def test_bad_input_is_one_line_and_status_2(unprepared, capsys, arguments, line):
    assert plan.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error and error.startswith("error: ") and error.count("\n") == 1


def test_without_a_compiler_the_analytic_part_is_printed_and_saved(unprepared, capsys, tmp_path):
    status = plan.main(
        ["plan", f"--config={STUDY}:32k", "--topology=v5p:8x8x16", f"--out={tmp_path}"]
    )
    printed = capsys.readouterr().out
    assert status == 0 and "not compiled: v5p:8x8x16: no compiler" in printed
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["analytic"]["parameters"]["active"] == 32_861_477_888
    assert "compiled" not in saved
    assert "| context | all-gather |" in (tmp_path / "plan.md").read_text()


@pytest.mark.parametrize(("peak", "status"), [(50 * GIB, 0), (190 * GIB, 1)])
def test_a_module_is_read_and_a_step_that_does_not_fit_is_status_1(
    unprepared, monkeypatch, tmp_path, peak, status
):
    monkeypatch.setattr(targets, "missing", lambda name: None)
    sizes = dict.fromkeys(("arguments", "outputs", "aliased", "code", "temporaries"), GIB)
    result = {
        "memory": sizes | {"peak": peak},
        "seconds": {"trace": 1.0, "compile": 2.0},
        "host_bytes": GIB,
    }
    text = gzip.decompress(MODULE.read_bytes()).decode()
    asked = []

    def compile_it(request, tell):
        asked.append(request)
        return result, text

    monkeypatch.setattr(plan_compiled, "compile_step", compile_it)
    arguments = [f"--config={STUDY}:32k", "--topology=b200:2x8", "--config.phases.0.batch=16"]
    assert plan.main(["plan", *arguments, f"--out={tmp_path}"]) == status
    assert asked[0]["topology"] == "b200:2x8" and "phases.0.batch=16" in asked[0]["overrides"]
    saved = json.loads((tmp_path / "plan.json").read_text())["compiled"]
    assert saved["hbm"] == peak + GIB
    assert saved["unexpected"] == {}
    assert saved["schedule"]["seconds"] > saved["schedule"]["compute"] > 0
    text = (tmp_path / "plan.md").read_text()
    assert "## Collectives of the module" in text and "| b200:2x8 | 32k | 2, 8 |" in text


def test_a_sweep_ranks_the_meshes_that_fit():
    planned = case("v5p:8x8x16", "256k")
    ranked = plan_sweep.candidates(planned)
    layouts = [(one.planned.layout.context, one.planned.layout.expert) for one in ranked]
    assert (8, 8) in layouts and len(set(layouts)) == len(layouts)
    assert all(one.memory <= 95 * GIB for one in ranked)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    for context, expert in layouts:
        assert 384 % expert == 0 and 128 % (1024 // context) == 0


def test_a_sweep_plans_the_best_and_succeeds_if_one_does(monkeypatch):
    planned, tried = case(), []
    ranked = [
        plan_sweep.Candidate(planned=planned, seconds=n, links=0.0, binds="compute", memory=GIB)
        for n in (1.0, 2.0, 3.0)
    ]
    monkeypatch.setattr(plan_sweep, "candidates", lambda planned: ranked)

    def one(candidate):
        tried.append(candidate)
        return len(tried) % 2

    assert plan_sweep.run(Console(quiet=True), planned, 2, one) == 0
    assert tried == ranked[:2]


PLACES = """
from launch import targets
targets.prepare()
import numpy as np
from c2.parallel import mesh
from launch import plan_case, plan_mesh
for name, experts in (("v5p:4x4x4", 8), ("tpu7x:2x2x2", 4), ("b200:4x8", 8)):
    case = plan_case.case("experiments/kimi_k25.py", ["mesh.expert=%d" % experts], None,
                          plan_mesh.topology(name))
    grid = mesh.make(case.layout, targets.devices(name)).devices
    fabric = plan_mesh.fabric(case)
    if name[:4] == "b200":
        places = [(d.process_index, d.id % 8) for d in grid.flat]
    else:
        cores = fabric.chip.devices > 1
        places = [(*d.coords, *[d.core_on_chip] * cores) for d in grid.flat]
    assert (np.array(places) == fabric.places).all(), name
print("same")
"""


@pytest.mark.slow
def test_devices_are_where_their_compilers_say():
    for name in ("v5p:4x4x4", "b200:4x8"):
        if reason := targets.missing(name):
            pytest.skip(reason)
    done = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True)
    assert done.stdout == "same\n", done.stderr
