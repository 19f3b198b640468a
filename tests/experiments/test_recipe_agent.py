"""The whole recipe from pretraining to an agent, as small as it can be."""

import json

import pytest

from launch.main import run_main


@pytest.mark.slow
def test_every_stage_runs_once_and_says_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setenv("C2_CACHE_DIR", str(tmp_path / "cache"))
    words = ["--config=experiments/recipe.py:smoke", f"--workdir={tmp_path / 'run'}"]
    assert run_main(["launch/main.py", *words, "--services=inside"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    statements = [claim["statement"] for claim in result["claims"]]
    assert sum("gain in standard errors" in text for text in statements) == 8
    assert sum("gzip" in text for text in statements) == 1
    figures = {figure["path"] for figure in result["figures"]}
    assert {"figures/reinforcement.png", "figures/held_out_tasks.png", "figures/loss.png"} < figures
    (rows,) = (rows for title, rows in result["tables"].items() if "Held-out tasks" in title)
    assert {"start", "shuffled rewards", "more demonstrations", "reinforcement"} < set(rows[0])
    pages = tmp_path / "run" / "agent" / "reinforcement" / "trajectories.html"
    assert pages.stat().st_size > 8000
    for stage in ("before/fine_tuning", "fine_tuning", "more_fine_tuning", "more_sound"):
        assert (tmp_path / "run" / "agent" / stage / "checkpoints").is_dir()
