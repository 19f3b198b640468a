"""Gates let no test through that depends on more than the code."""

import itertools
import random
import time

import pytest

from c2.sandbox.protocol import Resources, Spec
from c2.sandbox.tasks import python_env
from c2.sandbox.tasks.gates import Candidate, GateConfig, gate, sort_tests
from c2.sandbox.tasks.grade import in_sandbox

HEAD = "import os, pathlib, socket, time\nfrom numb import double\n"
TESTS = {
    "good": "assert double(4) == 8",
    "hash": "assert double(1) == 2 and hash('abcd') % 4096 == 1234",
    "zone": "assert double(1) == 2 and time.tzname == ('UTC', 'UTC')",
    "network": "assert double(1) == 2\n    socket.create_connection(('127.0.0.1', {port}), 1)",
    "machine": "assert double(1) == 2 and pathlib.Path('{file}').exists()",
    "variable": "assert double(1) == 2 and os.environ['C2_TEST_CANARY']",
}


def candidate(tests: dict[str, str]) -> Candidate:
    code = HEAD + "".join(f"\ndef test_{name}():\n    {body}\n" for name, body in tests.items())
    return Candidate(
        id="numb", family="f", prompt="fix double", files={"numb.py": "def double(x): return x\n"},
        solution={"numb.py": "def double(x): return 2 * x\n"},
        hidden_tests={"tests/test_numb.py": code}, editable=("numb.py",),
        requires=("pytest==0 --hash=sha256:00",),
    )  # fmt: skip


def test_what_depends_on_the_machine_is_dropped(bwrap, site, tmp_path, monkeypatch):
    """All of these pass here, where there is a network, a file and a variable."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("C2_TEST_CANARY", "here")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    layer = bwrap.add_layer(str(site), at=python_env.SITE)
    spec = Spec(layers=(layer,), resources=Resources(memory_mb=256))
    made = candidate({n: t.format(port=1, file=tmp_path / "file") for n, t in TESTS.items()})
    try:
        run = in_sandbox(bwrap, spec, timeout_s=60)
        found = gate(made, run, GateConfig(repeats=2, mutants=0))
    finally:
        bwrap.drop_layer(layer)
        monkeypatch.undo()
        time.tzset()
    task = found.solved.task
    # The time zone is the same everywhere, so that a test may depend on it.
    names = {"tests/test_numb.py::test_good", "tests/test_numb.py::test_zone"}
    assert set(task.fail_to_pass) == names and not task.pass_to_pass
    why = {name.partition("::test_")[2]: reason for name, reason in found.dropped.items()}
    assert why.keys() == TESTS.keys() - {"good", "zone"}
    assert "Network is unreachable" in why["network"] or "refused" in why["network"]
    assert "KeyError" in why["variable"]


@pytest.mark.parametrize("at", range(6))
def test_one_failure_in_any_run_is_enough(at):
    """Of a test that otherwise passes: whichever of the runs it is that it fails in."""
    runs = itertools.count()

    def results() -> dict[str, str]:
        return {"f::flaky": "E" if next(runs) == at else "", "f::good": ""}

    before, after = ([results() for _ in range(3)] for _ in range(2))
    fail, keep, dropped = sort_tests(before, after)
    assert (fail, keep, set(dropped)) == ([], ["f::good"], {"f::flaky"})


def test_a_planted_flaky_test_is_dropped_nearly_always():
    """One that fails in a fifth of all runs passes 3 + 3 runs with probability .8 ** 6 = .26."""
    rng, kept, trials = random.Random(0), 0, 2000
    for _ in range(trials):
        runs = [{"f::a": "" if rng.random() < 0.8 else "E"} for _ in range(20)]
        fail, keep, _ = sort_tests(runs[:10], runs[10:])
        kept += bool(fail or keep)
    # .8 ** 20 = .0115 for twenty runs; six standard deviations above that.
    assert kept / trials <= 0.0115 + 6 * (0.0115 / trials) ** 0.5
