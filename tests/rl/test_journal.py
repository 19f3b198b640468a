"""The journal: what is written is read, and a torn end costs the last record alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.rl import simulated
from c2.rl.journal import Journal, JournalError, pack, unpack
from c2.rl.schedule import Job


def same(a, b):
    assert len(a.generations) == len(b.generations)
    for one, two in zip(a.generations, b.generations, strict=True):
        for name, values in vars(one).items():
            got = getattr(two, name)
            assert got.dtype == values.dtype and got.shape == values.shape
            np.testing.assert_array_equal(got, values)
    rest = [{k: v for k, v in vars(x).items() if k != "generations"} for x in (a, b)]
    assert rest[0] == rest[1]


def written(path):
    """A journal of two groups, one of them trained; returns where each record ends."""
    ends = [0]
    with Journal(path) as journal:

        def note(method, *args):
            getattr(journal, method)(*args)
            ends.append(path.stat().st_size)

        for group in range(2):
            note("begun", group, f"task-{group}", 5 + group)
        for group, sample in [(0, 1), (1, 0), (0, 0), (1, 2)]:
            versions = (group, group + 1)
            note("scored", Job(group, sample, 1), simulated.rollout("t", sample, versions))
        note("lost", Job(0, 2, 3))
        note("batch", [0])
        note("evaluated", 1, {"pass": 0.5})
    return ends


def test_rollouts_come_back_to_the_bit(tmp_path):
    first = simulated.rollout("t", 1, (3, 5))
    fields = vars(first) | {
        "behaviours": {"todo": 0.25},
        "correct": 0.1,
        "reward": -0.30000000000000004,
    }
    second = type(first)(**(fields | {"generations": (*first.generations, *first.generations)}))
    for rollout in (first, second):
        same(rollout, unpack(pack(rollout)))


def test_what_was_written_is_there_after_a_restart(tmp_path):
    path = tmp_path / "deep" / "journal"
    written(path)
    with Journal(path) as journal:
        assert journal.prompts == ["task-0", "task-1"] and journal.batches == [[0]]
        assert journal.evaluations == {1: {"pass": 0.5}}
        assert list(journal.rollouts(0)) == [0, 1] and list(journal.rollouts(1)) == [0, 2]
        same(journal.rollouts(1)[2], simulated.rollout("t", 2, (1, 2)))
        (group,) = journal.open_groups(3, 2)
        assert (group.index, group.version) == (1, 6)
        assert (group.scored, group.lost) == ({0: 1, 2: 1}, set())
        journal.begun(2, "task-2", 6)
    with Journal(path) as journal:
        assert journal.prompts[2] == "task-2"


@settings(max_examples=60)
@given(st.data())
def test_a_torn_end_costs_the_last_record_alone(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("torn") / "journal"
    ends = written(path)
    size = data.draw(st.integers(0, ends[-1]))
    whole = sum(end <= size for end in ends) - 1
    path.write_bytes(path.read_bytes()[:size])
    if data.draw(st.booleans()):  # the length may be there before the content
        with open(path, "ab") as file:
            file.write(bytes(data.draw(st.integers(1, 30))))
    with Journal(path) as journal:
        lists = (journal.prompts, journal.batches, journal.evaluations, *journal._places)
        found = sum(map(len, lists))
        assert found == whole and path.stat().st_size == ends[whole]
        journal.begun(len(journal.prompts), "next", 0)  # and it can be written to
    with Journal(path) as journal:
        assert journal.prompts[-1] == "next"


def test_a_void_group_is_not_open(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        journal.begun(0, "task-0", 0)
        for sample in range(2):
            journal.lost(Job(0, sample, 3))
        journal.scored(Job(0, 2, 1), simulated.rollout("t", 2, (0,)))
        assert journal.open_groups(3, 2) == []
        assert [g.lost for g in journal.open_groups(3, 1)] == [{0, 1}]


def test_records_that_do_not_fit_together_are_refused(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        with pytest.raises(JournalError, match="group 1 begins after 0"):
            journal.begun(1, "x", 0)
        journal.begun(0, "x", 0)
        journal.lost(Job(0, 0, 1))
        with pytest.raises(JournalError, match="rollout 0 of group 0"):
            journal.lost(Job(0, 0, 2))
