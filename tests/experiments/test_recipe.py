"""One small run of the whole recipe through the launcher, and what can be done with its folder."""

import json
import shutil

import jax
import matplotlib.image
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from c2.training.checkpoint import Checkpoints
from c2.training.metrics import read_columns, read_rows
from launch.main import run_main

STEPS = 22


def launch(*words):
    return run_main(["launch/main.py", *map(str, words)])


@pytest.fixture(scope="module", autouse=True)
def one_device_and_a_compilation_cache(tmp_path_factory):
    """What the launcher would set up, without traces in the home folder or in later tests."""
    before = jax.config.jax_compilation_cache_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("C2_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("JAX_NUM_CPU_DEVICES", str(jax.device_count()))
        yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def finished(tiny_json, tmp_path_factory):
    """The folder of a finished run; not to be changed."""
    workdir = tmp_path_factory.mktemp("recipe") / "run"
    assert launch(f"--config={tiny_json}", f"--workdir={workdir}") == 0
    return workdir


@pytest.fixture
def unfinished(finished, tmp_path):
    """A copy of the folder, as if the run had been killed before its result was written."""
    workdir = tmp_path / "copy"
    shutil.copytree(finished, workdir)
    for name in ("result.json", "report.md"):
        (workdir / name).unlink()
    return workdir


@pytest.fixture(scope="module")
def result(finished):
    return json.loads((finished / "result.json").read_text(), parse_constant=pytest.fail)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines_without_speed(workdir):
    return [row | {"tokens_per_second": None} for row in read_rows(workdir / "metrics.jsonl")]


def test_held_out_loss_falls(result):
    (stages,) = (rows for title, rows in result["tables"].items() if "Held-out" in title)
    assert [row["after"] for row in stages] == ["start", "main", "mtp", "fine_tuning"]
    for window in ("window 32", "window 128"):
        start, main, distilled, _ = (row[window] for row in stages)
        assert 4.5 < start < 5  # 9 bits per token of a vocabulary of 512, two bytes per token
        assert main < start - 0.1
        assert distilled == main
    assert result["metrics"]["held_out/bits_per_byte"] == stages[-1]["window 32"]


def test_claims_are_judged(result):
    assert len(result["claims"]) == 6
    verdicts = {claim["statement"]: claim["verdict"] for claim in result["claims"]}
    (gzip,) = (verdict for statement, verdict in verdicts.items() if "gzip" in statement)
    assert gzip == "not shown"  # a dozen steps can't reach it
    (frozen,) = (claim for claim in result["claims"] if "frozen" in claim["statement"])
    assert frozen["verdict"] == "shown" and frozen["measured"] == 0


def test_the_modules_drafts_are_accepted_more_often(finished, result):
    (stages,) = (rows for title, rows in result["tables"].items() if "Drafts" in title)
    assert [row["after"] for row in stages] == ["untrained", "mtp", "fine_tuning"]
    untrained, distilled, last = (row["acceptance"] for row in stages)
    assert distilled > untrained + 0.01
    assert result["metrics"]["held_out/acceptance"] == last
    assert stages[1]["tokens per step with one draft"] == pytest.approx(1 + distilled)
    columns = read_columns(finished / "metrics.jsonl")
    steps, rates = columns["held_out/acceptance"]
    assert steps.tolist() == [12, 15, 18, 21, 22]
    assert rates[[0, 2, 4]].tolist() == [untrained, distilled, last]
    assert columns["mtp_loss"][0].tolist() == list(range(13, 19))


def test_figures_show_something(finished, result):
    paths = [figure["path"] for figure in result["figures"]]
    assert paths == [
        f"figures/{name}.png" for name in ("loss", "held_out", "expert_load", "acceptance")
    ]
    for path in paths:
        image = matplotlib.image.imread(finished / path)  # [row, column, rgba]
        assert min(image.shape[:2]) > 400
        assert len(np.unique(image[..., :3] @ [1, 256, 65536])) > 100  # colours
        drawn = (image[..., :3] < 0.9).any(-1)
        assert 0.01 < drawn.mean() < 0.6


def test_report_mentions_everything(finished, result):
    report = (finished / "report.md").read_text()
    for figure in result["figures"]:
        assert f"]({figure['path']})" in report
    for claim in result["claims"]:
        assert claim["statement"] in report
    for title in result["tables"]:
        assert f"## {title}" in report
    assert "| stdlib:email | PSF-2.0 |" in report
    assert "nan" not in report


def test_every_step_of_every_phase_is_logged(finished):
    rows = read_rows(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    phases = [row["phase"] for row in rows[1:]]
    assert phases == ["main"] * 12 + ["mtp"] * 6 + ["fine_tuning"] * 4
    assert [row["step"] for row in rows if "held_out_32/nats" in row] == [
        *range(0, 22, 3),
        22,
    ]
    assert [row["step"] for row in rows if "held_out_128/nats" in row] == [0, 12, 18, 22]
    assert list(finished.glob("tensorboard/events*"))


def test_tokens_are_accounted_for(finished, result):
    columns = read_columns(finished / "metrics.jsonl")
    tokens, targets, total = (
        columns[name][1] for name in ("tokens", "target_tokens", "total_tokens")
    )
    np.testing.assert_array_equal(total, np.cumsum(tokens))
    size = 4 * 128
    assert (tokens <= size).all()
    assert (tokens[:18] > 0.95 * size).all()  # long documents leave hardly any padding
    assert (targets < tokens).all()
    # Fine-tuning learns solutions only.
    assert (targets[:18] > 0.9 * tokens[:18]).all()
    assert (targets[18:] < 0.9 * tokens[18:]).all()
    # Every token is sent to two experts.
    load = columns["expert_load"][1]  # [step, moe_layer, expert]
    np.testing.assert_array_equal(load.sum(-1)[:, 0], 2 * tokens)
    assert [row["tokens"] for row in result["tables"]["Phases"]] == [
        tokens[:12].sum(),
        tokens[12:18].sum(),
        tokens[18:].sum(),
    ]


def test_a_finished_run_is_shown_again(finished, tiny_json, capsys):
    before = content(finished)
    for config in (tiny_json, finished / "config.json"):
        assert launch(f"--config={config}", f"--workdir={finished}") == 0
        printed = capsys.readouterr()
        assert "already finished" in printed.out
        assert "not shown" in printed.out
        assert printed.err == ""
    assert content(finished) == before


def test_a_torn_checkpoint_is_skipped_with_a_warning(finished, unfinished, caplog):
    """The saved config resumes the run, from the checkpoint before, to the same end."""
    torn = unfinished / "checkpoints" / f"{STEPS:08d}"
    largest = max(torn.rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert launch(f"--config={unfinished}/config.json", f"--workdir={unfinished}") == 0
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "checkpoint skipped" in warning.getMessage()
    assert f"{STEPS:08d}" in warning.getMessage()
    assert lines_without_speed(unfinished) == lines_without_speed(finished)
    assert Checkpoints(unfinished / "checkpoints").latest() == STEPS


def test_a_foreign_checkpoint_is_refused(unfinished, tiny_json, capsys):
    """A run of one model finds the checkpoints of another in its folder."""
    other = (f"--config={tiny_json}", f"--workdir={unfinished}", "--config.model.vocab=520")
    before = content(unfinished)
    assert launch(*other) == 2
    assert "model.vocab: 512 -> 520; choose another --workdir" in capsys.readouterr().err
    assert content(unfinished) == before
    stored = json.loads((unfinished / "config.json").read_text())
    stored["config"]["model"]["vocab"] = 520
    (unfinished / "config.json").write_text(json.dumps(stored))
    before = content(unfinished)
    assert launch(*other) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "00000022: belongs to another run: .params.embed is float32[512,16] in the" in printed
    del before[unfinished / "overrides.json"]  # has one more start
    assert content(unfinished).items() >= before.items()
