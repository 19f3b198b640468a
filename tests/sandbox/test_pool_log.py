"""The book of a pool survives any end of the pool."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.sandbox.pool import pressure
from c2.sandbox.pool.ledger import Event, Ledger
from c2.sandbox.pool.log import Log, read

EVENTS = [
    Event(time=1.5, sandbox="1", state="asked", owner="a", key="é\n", labels={"run": "x"}),
    Event(time=2, sandbox="1", state="placed", owner="a", node="n"),
    Event(time=2, sandbox="2", state="asked"),
    Event(time=3, sandbox="1", state="live", owner="a", node="n"),
    Event(time=4, sandbox="1", state="closing", owner="a", node="n", reason="lease"),
    Event(time=5, sandbox="3", state="asked"),
    Event(time=5, sandbox="3", state="ended", reason="refused"),
]


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "log"
    log = Log(path, 0.0)
    for event in EVENTS:
        log.add(event)
    expected = Ledger(EVENTS)
    assert read(path).open == log.ledger.open == expected.open
    assert read(path).ended == expected.ended == {"refused": 1}
    with pytest.raises(ConfigError, match="another pool writes"):
        Log(path, 0.0)
    log.close()


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 2000))
def test_a_pool_killed_at_any_byte_is_ended_by_the_next(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("log") / "log"
    log = Log(path, 0.0)
    for event in EVENTS:
        log.add(event)
    log.close()
    kept = path.read_bytes()[:cut]
    path.write_bytes(kept)
    whole = [line for line in kept.split(b"\n")[:-1]]
    next_log = Log(path, 99.0)
    next_log.add(Event(time=100, sandbox="9", state="asked"))
    next_log.close()
    lines = path.read_bytes().split(b"\n")
    assert lines[: len(whole)] == whole and lines[-1] == b""
    added = [json.loads(line) for line in lines[len(whole) : -1]]
    open_before = Ledger(EVENTS[: len(whole)]).open
    ends = {event["sandbox"]: event["reason"] for event in added[:-1]}
    assert ends == {name: event.reason or "lost" for name, event in open_before.items()}
    assert all(event["time"] == 99 for event in added[:-1])
    assert set(read(path).open) == {"9"}


@pytest.mark.parametrize(
    "line", ["x", "[]", '{"time": 1}', '{"time":1,"sandbox":"1","state":"up"}']
)
def test_other_files_are_refused_and_kept(tmp_path, line):
    path = tmp_path / "log"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="is not the log of a pool"):
        Log(path, 0.0)
    assert path.read_text() == line + "\n"


def test_pressure(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2097152 kB\n")
    assert pressure.read(tmp_path) == pressure.Pressure(cpu=0, memory=0, available_mb=2048)
    (tmp_path / "pressure").mkdir()
    for name, share in (("cpu", 12.5), ("memory", 0.25)):
        text = f"some avg10={share} avg60=99.00 avg300=99.00 total=7\nfull avg10=98.00 total=8\n"
        (tmp_path / "pressure" / name).write_text(text)
    assert pressure.read(tmp_path) == pressure.Pressure(cpu=12.5, memory=0.25, available_mb=2048)
    assert pressure.read().available_mb > 0
