"""The benchmark's table and ratios, for sides whose times are known."""

import io
import types

import pytest
import rich.console
from absl import flags

from launch import bench
from launch.bench_case import SLOW_SECONDS, Case, timed


@pytest.fixture
def printed(monkeypatch):
    flags.FLAGS.mark_as_parsed()
    console = rich.console.Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(bench.rich, "get_console", lambda: console)
    return console.file


def side(calls, name, times):
    """Prepares a side whose steps take the given seconds."""
    left = iter(times)

    def step():
        calls.append(name)
        return next(left)

    return lambda: step


def test_best_rounds_are_compared_and_slow_sides_run_less_often(printed):
    calls = []
    cases = {
        "float32": Case(
            side(calls, "a", [4.0, 2.0, 3.0, 2.5, 4.0]), side(calls, "b", [5.0] * 5), 100
        ),
        "bfloat16": Case(side(calls, "c", [2.5] * 5), side(calls, "d", [40.0, 1.0]), 100),
    }
    module = types.SimpleNamespace(
        __doc__="What it is.\nMore.", PEER="them", UNIT="tokens", SAME_WORK=False
    )
    bench._compare("fake", module, cases)
    text = printed.getvalue()
    assert text.startswith("fake: What it is.\n")
    assert "float32: 2.50 x the tokens per second of them" in text
    assert "bfloat16: 16.00 x the tokens per second of them" in text
    assert calls == [*"abcd", *"abc" * 4]  # d alone took longer than our patience


def test_memory_and_the_fastest_are_compared_where_the_work_is_the_same(printed, monkeypatch):
    cases = {
        "float32": Case(side([], "", [1.0] * 5), side([], "", [3.0] * 5), 8),
        "bfloat16": Case(side([], "", [0.5] * 5), side([], "", [6.0] * 5), 8),
    }
    module = types.SimpleNamespace(__doc__="It.", PEER="them", UNIT="tokens", SAME_WORK=True)
    memory = {"float32/ours": 1, "float32/peer": 2, "bfloat16/ours": 3, "bfloat16/peer": 4}
    monkeypatch.setattr(bench, "_peak_memory", lambda _, name: memory[name] * 2**20)
    bench._compare("fake", module, cases)
    rows = [line.split() for line in printed.getvalue().splitlines() if "GiB" in line]
    assert rows == [
        ["float32", "ours", "8", "1.00", "GiB"],
        ["float32", "them", "3", "2.00", "GiB"],
        ["bfloat16", "ours", "16", "3.00", "GiB"],
        ["bfloat16", "them", "1", "4.00", "GiB"],
    ]
    assert "fastest against fastest: 6.00 x" in printed.getvalue()


def test_a_slow_step_is_not_warmed_up_twice(monkeypatch):
    runs = []
    clock = iter([0.0, SLOW_SECONDS + 1, 0.0, 1.0, 0.0, 1.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timed(lambda: runs.append("slow"))
    timed(lambda: runs.append("quick"))
    assert runs == ["slow", "quick", "quick"]
