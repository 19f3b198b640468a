"""What is graded is what the agent left: nothing changes it any more, and nothing comes with it."""

import time

import pytest

from c2.sandbox.protocol import Resources, SandboxError, Spec
from c2.sandbox.tasks import place
from c2.sandbox.tasks.grade import in_sandbox

SPEC = Spec(resources=Resources(memory_mb=64, disk_mb=8, pids=48))


@pytest.fixture
def box(bwrap):
    handle = bwrap.create(SPEC)
    yield handle
    bwrap.close(handle)


def test_files_go_in_and_come_out(bwrap, box):
    files = {"a.py": "x = 1\n", "deep/er/b.txt": "caf\udce9", "empty": ""}
    place.put(bwrap, box, files)
    script = "ln -s a.py link; mkfifo pipe; head -c 2M /dev/zero > big; mkdir .git; touch .git/x"
    assert bwrap.exec(box, ["sh", "-c", script]).ok
    found = place.take(bwrap, box)
    assert {path: text for path, text in found.items() if not path.startswith(".git")} == files


def test_no_writer_outlives_the_reading(bwrap, box):
    """One in a session of its own that ignores SIGTERM, and one that was left by a command."""
    writer = "trap '' TERM HUP; i=0; while :; do i=$((i+1)); echo $i > {}; done"
    bwrap.start(box, ["setsid", "sh", "-c", writer.format("reward.json")])
    assert bwrap.exec(box, ["sh", "-c", f"({writer.format('code.py')}) &"]).left
    names = {"reward.json", "code.py"}
    end = time.monotonic() + 10
    while names - bwrap.list_dir(box, "/repo").keys() and time.monotonic() < end:
        time.sleep(0.01)
    found = place.take(bwrap, box)
    assert found.keys() == names and bwrap.jobs(box) == []
    for path, text in found.items():
        assert bwrap.read(box, f"/repo/{path}") == text.encode()


def test_what_does_not_end_is_not_read(bwrap, box, monkeypatch):
    monkeypatch.setattr("c2.sandbox.jobs.END_S", 0.1)
    monkeypatch.setattr(type(bwrap), "kill", lambda *_: None)
    bwrap.start(box, ["sleep", "60"])
    with pytest.raises(SandboxError, match="its jobs do not end"):
        place.take(bwrap, box)


def test_every_grade_has_a_sandbox_of_its_own(bwrap):
    run = in_sandbox(bwrap, SPEC)
    script = "cat /tmp/x /dev/shm/x x; for f in /tmp/x /dev/shm/x x; do echo seen > $f; done"
    for _ in range(2):
        assert run(["sh", "-c", script], {}, b"").stdout == b""
