"""metrics.jsonl and TensorBoard events, written, torn, rewound and read back."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from c2.training.metrics import MetricsLog, read_columns, read_rows


def write(directory, steps):
    with MetricsLog(directory) as log:
        for step in steps:
            log.write(step, {"loss": 10.0 - step})


def steps_in(directory):
    return [row["step"] for row in read_rows(directory / "metrics.jsonl")]


def test_lines_are_json_with_every_kind_of_value(tmp_path):
    with MetricsLog(tmp_path) as log:
        load = jnp.arange(6).reshape(2, 3)  # [layer, expert]
        log.write(1, {"loss": jnp.bfloat16(1.5), "expert_load": load, "phase": "main", "n": 3})
        log.write(2, {"loss": np.float32("nan"), "expert_load": np.array([[np.inf, 1.0]])})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before the log is closed

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 1, "loss": 1.5, "expert_load": [[0, 1, 2], [3, 4, 5]], "phase": "main", "n": 3},
        {"step": 2, "loss": None, "expert_load": [[None, 1.0]]},
    ]


def test_columns_hold_the_steps_where_a_metric_was_written(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(0, {"nll": 5.0})
        log.write(1, {"loss": 2.5, "load": np.ones((2, 3)), "phase": "a"})
        log.write(2, {"loss": float("inf"), "load": np.zeros((2, 3)), "phase": "b", "nll": 4})
    columns = read_columns(tmp_path / "metrics.jsonl")
    np.testing.assert_array_equal(columns["loss"][0], [1, 2])
    np.testing.assert_array_equal(columns["loss"][1], [2.5, np.nan])
    np.testing.assert_array_equal(columns["nll"][0], [0, 2])
    assert columns["nll"][1].dtype == np.float64
    assert columns["load"][1].shape == (2, 2, 3)
    assert list(columns["phase"][1]) == ["a", "b"]


@example(value="\x00")  # numpy's fixed-width strings would lose it
@given(value=st.floats(width=32) | st.integers(-(2**31), 2**31 - 1) | st.text())
def test_values_survive_exactly(tmp_path_factory, value):
    directory = tmp_path_factory.mktemp("log")
    with MetricsLog(directory) as log:
        log.write(7, {"value": value})
    (read,) = read_columns(directory / "metrics.jsonl")["value"][1]
    expected = value if isinstance(value, str) or np.isfinite(value) else np.nan
    np.testing.assert_equal(read, expected)


def test_a_mute_log_writes_nothing(tmp_path):
    with MetricsLog(tmp_path / "run", mute=True) as log:
        log.rewind(3)
        log.write(4, {"loss": 1.0})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("step", "left"), [(3, [0, 1, 2, 3]), (0, [0]), (-1, []), (9, [0, 1, 2, 3, 4, 5])]
)
def test_rewind_drops_later_steps_and_the_log_goes_on(tmp_path, step, left):
    write(tmp_path, range(6))
    with MetricsLog(tmp_path) as log:
        log.rewind(step)
        assert steps_in(tmp_path) == left
        log.write(99, {"loss": 1.0})
    assert steps_in(tmp_path) == [*left, 99]


def test_a_line_torn_at_any_byte_is_mended(tmp_path, caplog):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        caplog.clear()
        left = steps_in(tmp_path)
        assert left[:2] == [0, 1]
        # Only the newline may be missing from a line that still counts.
        assert (len(left) == 3) == (end == len(whole) - 1)
        assert bool(caplog.records) == (start < end < len(whole) - 1)
        write(tmp_path, [7])
        assert steps_in(tmp_path) == [*left, 7]


def test_a_crash_while_rewinding_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, range(6))
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(tmp_path).rewind(2)
    assert steps_in(tmp_path) == [*range(6)]


def test_tensorboard_gets_the_numbers_and_the_step_of_a_resume(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.rewind(4)
        log.write(5, {"loss": 2.5, "phase": "main", "load": np.ones(3)})
    (path,) = (tmp_path / "tensorboard").iterdir()
    events = list(read_events(path))
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [(5, "loss", 2.5)]
    starts = [e.step for e in events if e.session_log.status == event_pb2.SessionLog.START]
    assert starts == [5]


def read_events(path):
    """TFRecord framing: length u64, its crc, content, its crc."""
    content = path.read_bytes()
    while content:
        length = int.from_bytes(content[:8], "little")
        record = content[12 : 12 + length]
        assert int.from_bytes(content[12 + length : 16 + length], "little") == masked_crc32c(record)
        yield event_pb2.Event.FromString(record)
        content = content[16 + length :]
