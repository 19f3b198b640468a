"""The sandbox benchmark, in small."""

import contextlib
import io

import pytest
import rich.console

from launch import bench_sandbox


@pytest.mark.slow
def test_every_figure_is_there(bwrap, monkeypatch):
    for name, value in {"FILES": 30, "REPO_MB": 1, "CREATES": 2, "READS": 3}.items():
        monkeypatch.setattr(bench_sandbox, name, value)
    console = rich.console.Console(file=io.StringIO(), width=100)
    figures = bench_sandbox.report(console, rounds=2, live=2)
    assert {side for _, side in figures} == {*bench_sandbox.BACKENDS, "peer"}
    kinds = {what for what, _ in figures}
    assert len(kinds) == 8
    for what in kinds:
        assert {(what, side) for side in bench_sandbox.BACKENDS} <= figures.keys()
    assert all(value > 0 for (what, _), value in figures.items() if not what.startswith("memory"))
    text = console.file.getvalue()
    assert all(what in text for what in kinds)


def test_best_is_most_of_rates_and_least_of_times():
    values = iter([1.0, 5.0, 3.0, 4.0, 2.0, 6.0])  # the sides take turns
    rows = [
        bench_sandbox.Row("rate", "peer", "/s", values.__next__),
        bench_sandbox.Row("time", "peer", "ms", values.__next__),
    ]
    best = bench_sandbox.best_of(rows, 3, lambda _: contextlib.nullcontext())
    assert best == {("rate", "peer"): 3.0, ("time", "peer"): 4.0}
