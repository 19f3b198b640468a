"""The sandbox benchmark, in small."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
import rich.console

from launch import bench_sandbox


@pytest.mark.slow
def test_every_figure_is_there(walls, monkeypatch):
    few = {"FILES": 30, "REPO_MB": 1, "CREATES": 2, "SUSTAINED": 4, "READS": 3, "GRADES": 1}
    for name, value in few.items():
        monkeypatch.setattr(bench_sandbox, name, value)
    console = rich.console.Console(file=io.StringIO(), width=120)
    figures = bench_sandbox.report(console, rounds=2, live=2)
    assert {side for _, side in figures} == {*bench_sandbox.BACKENDS, "peer"}
    kinds = {what for what, _ in figures}
    assert len(kinds) == 8 and kinds >= bench_sandbox.GOALS.keys()
    for what in kinds:
        assert {(what, side) for side in bench_sandbox.BACKENDS} <= figures.keys()
    assert all(figure.value > 0 for figure in figures.values() if figure.unit != "MB")
    text = console.file.getvalue()
    assert all(what in text for what in kinds)
    assert all(f"{what}: zygote " in text for what in bench_sandbox.GOALS)


def test_best_is_most_of_rates_and_least_of_times():
    values = iter([1.0, 5.0, 3.0, 4.0, 2.0, 6.0])  # the sides take turns
    rows = [
        bench_sandbox.Row("rate", "peer", "/s", 2, values.__next__),
        bench_sandbox.Row("time", "peer", "ms", 1, values.__next__),
    ]
    ours = iter([0, 0.2, 1, 1.3, 2, 2.1, 3, 3.4, 4, 4.4, 5, 5.5])
    usages = (
        bench_sandbox.Usage(x, number * 0.5 * (os.cpu_count() or 1), float(number))
        for number, x in enumerate(ours)
    )  # the processors are half busy all the time
    best = bench_sandbox.best_of(rows, 3, usages.__next__, lambda _: contextlib.nullcontext())
    rate, least = best["rate", "peer"], best["time", "peer"]
    assert (rate.value, least.value) == (3.0, 4.0)
    assert rate.cpu_ms == pytest.approx(50) and least.cpu_ms == pytest.approx(400)
    assert rate.others == pytest.approx(0.5 - 0.1 / (os.cpu_count() or 1))
    assert rate.verdict(3) == "reached" and rate.verdict(3.1).startswith("not shown (4")
    assert least.verdict(4) == "reached" and least._replace(others=0.1).verdict(3.9) == "missed"


def test_usage_counts_what_nobody_waits_for():
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with bench_sandbox.usage() as clock:
        if (before := clock()).ours is None:
            pytest.skip("no control group for that can be made here")
        code = f"import os\nif os.fork() == 0:\n    {burn.replace(chr(10), chr(10) + '    ')}"
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
        after = clock()
    assert 0.3 < after.ours - before.ours <= after.all - before.all + 0.1
    assert not list(bench_sandbox.ACCOUNTING.glob(f"c2-bench-{os.getpid()}"))
