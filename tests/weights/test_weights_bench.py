"""The benchmark's sides do their work, at a size that takes no time."""

import re

from launch import bench_weight_sync


def test_cases_say_how_small_deltas_are(monkeypatch):
    monkeypatch.setattr(bench_weight_sync, "NUMBERS", 1 << 18)
    cases = bench_weight_sync.cases(["bfloat16", "float32"])
    assert [name.split()[0] for name in cases] == ["encode", "decode"]
    for name, case in cases.items():
        ours, peer = map(float, re.search(r"\((\S+) bytes, zstd (\S+)\)", name).groups())
        assert ours < 0.055
        assert 1.4 < peer < 2
        assert case.amount == 2 * (1 << 18) / 1e6
        assert case.ours()() > 0
        assert case.peer()() > 0
    assert bench_weight_sync.cases(["float32"]) == {}
