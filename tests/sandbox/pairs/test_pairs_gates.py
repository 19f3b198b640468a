"""Gates let through what is sound."""

import dataclasses
import json

import pytest

from c2.config import ConfigError
from c2.sandbox.protocol import SandboxError
from c2.sandbox.tasks import gates, release_pairs
from c2.sandbox.tasks.gates import GateConfig, gate, sort_tests


def test_the_candidate(numb, candidate):
    assert "clamp looks at `high`" in candidate.prompt and "First" not in candidate.prompt
    assert candidate.files == numb.base
    assert candidate.solution == numb.with_code(numb.new)
    assert set(candidate.hidden_tests) == {p for p in numb.project if p.startswith("tests/")}


def test_gates(numb, candidate, plain):
    found = gate(candidate, plain, GateConfig(mutants=12))
    assert found.reason == ""
    task = found.solved.task
    assert (list(task.fail_to_pass), list(task.pass_to_pass)) == (numb.fail, numb.keep)
    test = "tests/test_numb.py::test_{}".format
    assert found.dropped == {
        test("broken"): "the solution fails: E AssertionError",
        test("flaky_second"): "flaky",
        test("only_a_name"): "it misses only a name before",
        test("skipped"): "the solution fails: skipped",
        "tests/test_half.py::test_half": "it cannot be imported before",
    } | {test("broken"): found.dropped[test("broken")]}
    assert found.dropped[test("broken")].startswith("the solution fails: ")
    # All but those of `half`, whose only tests have been dropped.
    assert (found.mutants, found.killed) == (7, 4)
    recorded = release_pairs.found(found, "3.11")
    assert recorded.fail_to_pass == {
        "tests/test_numb.py": ("TestClamp::test_above", "test_order"),
    }  # fmt: skip


@pytest.fixture
def simulated(ended):
    """Runs tests that are functions of what the code defines, without pytest."""

    def runner(**checks):
        def run(argv, files, stdin):
            request, space = json.loads(stdin), {}
            exec(files["src/numb/__init__.py"], space)
            results = {f"tests/test_a.py::{name}": check(space) for name, check in checks.items()}
            wanted = results if request["ids"] is None else request["ids"]
            answer = {"nonce": request["nonce"], "state": "done"}
            answer["results"] = {name: results.get(name, "planted") for name in wanted}
            lines = ({"nonce": request["nonce"], "state": "ready"}, answer)
            return ended(stdout="".join(json.dumps(line) + "\n" for line in lines).encode())

        return run

    return runner


def has(name):
    return lambda space: "" if name in space else "E"


@pytest.fixture
def small(candidate):
    """The candidate with one file of tests, which `simulated` runs."""
    return dataclasses.replace(candidate, hidden_tests={"tests/test_a.py": ""})


@pytest.mark.parametrize(
    ("code", "checks", "reason"),
    [
        ("old", {"a": has("clamp")}, "no test fails before and passes"),
        ("new", {"a": lambda space: "" if "half" in space else "ImportError: no"}, "no test fails"),
        # The test sees only whether there is a change at all.
        ("A = 1\nB = 2\nC = 3\n", {"a": has("A")}, "1 of 4 wrong solutions are found out"),
    ],
)
def test_what_does_not_pass_the_gates(numb, small, simulated, code, checks, reason):
    made = dataclasses.replace(small, solution=numb.with_code(getattr(numb, code, code)))
    found = gate(made, simulated(**checks), GateConfig(mutants=4))
    assert found.solved is None and reason in found.reason


def test_no_tests_no_task(candidate, simulated):
    made = dataclasses.replace(candidate, hidden_tests={"tests/data.txt": ""})
    assert gate(made, simulated()).reason == "it has no tests"


def test_tests_that_do_not_end_make_no_task(small, simulated):
    def run(argv, files, stdin):
        result = simulated(a=has("clamp"))(argv, files, stdin)
        return dataclasses.replace(result, stdout=result.stdout.splitlines(keepends=True)[0])

    assert "do not come to an end" in gate(small, run).reason


def test_a_simulated_candidate_passes(small, simulated):
    found = gate(small, simulated(a=has("half"), b=has("clamp")), GateConfig(mutants=1, killed=0))
    assert found.reason == "" and found.solved.task.fail_to_pass == ("tests/test_a.py::a",)


def test_forged_results_are_found_at_the_gates(small, simulated):
    honest = simulated(a=has("half"))

    def forged(argv, files, stdin):
        result = honest(argv, files, stdin)
        return dataclasses.replace(result, stdout=result.stdout.replace(b'"planted"', b'""'))

    assert "forged" in gate(small, forged, GateConfig(mutants=1)).reason


def test_trouble_of_the_machinery_is_no_verdict_on_a_candidate(candidate, ended):
    with pytest.raises(SandboxError, match="pytest does not start"):
        gate(candidate, lambda *_: ended(1, stderr=b"no module named pytest"))


def test_sorting_tests():
    before = [{"f::a": "E bad", "f::b": "", "f::d": "", "g": "E no"}] * 2
    before += [{"f::a": "E worse", "f::b": "", "f::d": "E", "g": "E no"}]
    after = [{"f::a": "", "f::b": "", "f::c": "", "f::d": "", "g::e": ""}] * 2
    fail, keep, dropped = sort_tests(before, after)
    assert (fail, keep) == (["f::a"], ["f::b"])
    assert dropped == {
        "f::c": "it cannot be imported before", "f::d": "flaky before",
        "g::e": "it cannot be imported before",
    }  # fmt: skip
    after[1] = after[1] | {"f::a": "E"}
    assert sort_tests(before, after)[2]["f::a"] == "flaky"


def test_which_tests_decide_when_there_are_too_many():
    keep = [f"f::{n}" for n in range(10)] + [f"g::{n}" for n in range(10)]
    some = gates.chosen(["f::x"], keep, 13)
    assert len(some) == 12 and {name for name in some if name[0] == "f"} == set(keep[:10])
    assert some == gates.chosen(["f::x"], keep[::-1], 13)
    assert gates.chosen(["f::x"] * 5, keep, 3) == []


@pytest.mark.parametrize("field", [{"repeats": 1}, {"mutants": -1}, {"killed": 1.5}])
def test_bad_gates(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        GateConfig(**field)
