"""SIGKILL at every operation, and of readers of a share each: see `kill_points`."""

import subprocess
import sys
from pathlib import Path


def test_a_kill_at_any_operation_leaves_published_versions(tmp_path):
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("kill_points.py")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    points, killed_readers = map(int, run.stdout.split())
    assert points > 60 and killed_readers > 3
