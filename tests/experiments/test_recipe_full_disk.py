"""The recipe on a disk that is too small: one line, nothing half written, and it can go on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from c2.training.checkpoint import Checkpoints
from c2.training.metrics import read_rows
from launch import jax_setup

ROOT = Path(jax_setup.__file__).parent.parent
SCRIPT = """
mount -t tmpfs -o size={size} tmpfs {disk} || exit
{command}
echo $? > {result}/status
cp -r {disk}/. {result}/disk
mount -o remount,size=64m {disk}
if {again}; then {command} && cp -r {disk}/. {result}/later; fi
"""


@pytest.fixture
def run_on_a_small_disk(tiny_json, tmp_path):
    """Runs the recipe on a file system of its own; gives the status, stderr and copies of it."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")

    def run(size, *, again=False):
        disk, result = tmp_path / "mount", tmp_path / "result"
        disk.mkdir()
        result.mkdir()
        command = f"{sys.executable} -m launch.main --config={tiny_json} --workdir={disk}/run"
        script = SCRIPT.format(
            size=size, disk=disk, result=result, command=command, again=str(again).lower()
        )
        done = subprocess.run(
            ["unshare", "-Urm", "sh", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "C2_CACHE_DIR": str(tmp_path / "cache")},
        )
        if not (result / "status").exists():
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
        assert int((result / "status").read_text()) == 1
        error, *more = done.stderr.splitlines()
        assert error.startswith("error: ")
        assert "No space left on device" in error
        assert more == []
        return error, result

    return run


def test_full_before_the_data_are_there(run_on_a_small_disk):
    error, result = run_on_a_small_disk("64k")
    assert "run/data/documents.npz" in error
    data = {path.name for path in (result / "disk/run/data").iterdir()}
    assert data == {"tokenizer.json", "tokenizer.stamp"}


@pytest.mark.slow
def test_full_while_training(run_on_a_small_disk, tiny_recipe):
    """The second checkpoint does not fit; with more room the run goes on from the first."""
    error, result = run_on_a_small_disk("1100k", again=True)
    assert "checkpoints/00000010: could not be saved" in error
    assert [path.name for path in (result / "disk/run/checkpoints").iterdir()] == ["00000005"]
    assert Checkpoints(result / "disk/run/checkpoints").latest() == 5
    later = result / "later" / "run"
    assert (later / "report.md").exists()
    steps = sum(phase.steps for phase in tiny_recipe.phases)
    assert [row["step"] for row in read_rows(later / "metrics.jsonl")] == list(range(steps + 1))
