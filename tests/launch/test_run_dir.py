"""Who may use a run folder, and that its files appear whole or not at all."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from c2.config import ConfigError, runtime
from experiments.registry import Study, StudyInfo
from launch import run_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 1
    rate: float = 0.5
    log_every: int = runtime(10)


def study(name="mine", variant=""):
    info = StudyInfo(name=name, path=Path(f"/somewhere/{name}.py"), question="Q?")
    return Study(info=info, variant=variant, module=types.ModuleType(name))


def start(workdir, config=None, **entry):
    with run_dir.opened(
        workdir, study(), config or Config(), {"command": ["x"], **entry}
    ) as folder:
        return folder


def content(workdir):
    return {path.name: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def starts(workdir):
    return json.loads((workdir / "overrides.json").read_text())["starts"]


def test_new_then_resumed_then_finished(tmp_path):
    workdir = tmp_path / "runs" / "a"
    assert run_dir.check(workdir, study(), Config()).state == "new"
    assert not workdir.exists()
    assert start(workdir, time="1").state == "new"
    assert json.loads((workdir / "config.json").read_text()) == {
        "study": "/somewhere/mine.py",
        "variant": "",
        "config": {"size": 1, "rate": 0.5, "log_every": 10},
        "runtime": ["log_every"],
    }
    assert start(workdir, time="2").state == "started"
    assert [entry["time"] for entry in starts(workdir)] == ["1", "2"]
    run_dir.write_json(workdir / "result.json", {})
    assert run_dir.check(workdir, study(), Config()).state == "finished"


def test_identity_change_is_refused_and_touches_nothing(tmp_path):
    start(tmp_path)
    before = content(tmp_path)
    with pytest.raises(ConfigError) as caught:
        start(tmp_path, Config(size=2, rate=0.25, log_every=1))
    assert "size: 1 -> 2; rate: 0.5 -> 0.25; choose another --workdir" in str(caught.value)
    assert content(tmp_path) == before
    with pytest.raises(ConfigError, match="study: mine -> other"):
        run_dir.check(tmp_path, study("other"), Config())


def test_runtime_change_is_accepted_and_recorded(tmp_path):
    start(tmp_path)
    folder = start(tmp_path, Config(log_every=1))
    assert folder.runtime_changes == ["log_every: 10 -> 1"]
    assert [entry["runtime_changes"] for entry in starts(tmp_path)] == [[], ["log_every: 10 -> 1"]]
    assert json.loads((tmp_path / "config.json").read_text())["config"]["log_every"] == 1


def test_a_long_list_of_differences_is_cut(tmp_path):
    many = dataclasses.make_dataclass(
        "Many", [(f"k{n}", int, 0) for n in range(12)], frozen=True, kw_only=True
    )
    with run_dir.opened(tmp_path, study(), many(), {}):
        pass
    changed = many(**{f"k{n}": 1 for n in range(12)})
    with pytest.raises(ConfigError, match=r"k9: 0 -> 1; and 2 more; choose another"):
        run_dir.check(tmp_path, study(), changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not valid JSON"),
        ("\x00\xff", "config.json: not valid JSON"),
        ("[]", "config.json: not a saved config; it needs the keys study, variant, config"),
        ('{"study": "mine"}', "config.json: not a saved config"),
        (
            '{"study": "mine", "variant": "", "config": {"sizes": 1}}',
            "config.json: config.sizes: unknown key; did you mean 'size'?",
        ),
    ],
)
def test_damaged_config_json(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    before = content(tmp_path)
    with pytest.raises(ConfigError) as caught:
        start(tmp_path)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert content(tmp_path) == before


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds files \(thesis.tex, ...\) but no config.json"):
        start(tmp_path)
    assert list(content(tmp_path)) == ["thesis.tex"]
    with pytest.raises(ConfigError, match="Not a directory"):
        start(tmp_path / "thesis.tex")
    with pytest.raises(ConfigError, match="Not a directory"):
        start(tmp_path / "thesis.tex" / "deeper")


def test_folder_of_a_start_killed_before_its_first_file_can_be_used(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.partial").write_text("{")
    assert start(tmp_path).state == "new"


def fail_late(workdir, prepared=(), error=ConfigError):
    """A start that finds bad input after it has written some files."""
    with pytest.raises(error, match="empty"), run_dir.opened(workdir, study(), Config(), {}):
        for name, text in dict(prepared).items():
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_text(text)
        raise error("corpus is empty")


def test_bad_input_found_late_takes_a_new_folder_back(tmp_path):
    prepared = {"data/documents.npz": "1", "metrics.jsonl": "", "tensorboard/events": "1"}
    fail_late(tmp_path / "runs" / "a", prepared)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    fail_late(tmp_path / "mine", prepared)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    (tmp_path / "runs" / "other").mkdir(parents=True)
    fail_late(tmp_path / "runs" / "a")
    assert os.listdir(tmp_path / "runs") == ["other"]


@pytest.mark.parametrize("result", [{"metrics.jsonl": "{}\n"}, {"checkpoints/00000002/x": ""}])
def test_bad_input_found_late_leaves_results_alone(tmp_path, result):
    fail_late(tmp_path / "a", result)
    assert {"config.json", *(Path(name).name for name in result)} <= set(content(tmp_path / "a"))


def test_only_bad_input_in_a_new_folder_removes_it(tmp_path):
    fail_late(tmp_path / "failed", error=RuntimeError)
    start(tmp_path / "old")
    fail_late(tmp_path / "old")
    for name in ("failed", "old"):
        assert (tmp_path / name / "config.json").exists()


def test_a_link_in_a_folder_is_removed_but_not_what_it_leads_to(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.py").touch()
    with (
        pytest.raises(ConfigError, match="bad"),
        run_dir.opened(tmp_path / "w", study(), Config(), {}),
    ):
        (tmp_path / "w" / "data").symlink_to(tmp_path / "corpus")
        raise ConfigError("bad")
    assert list(content(tmp_path)) == ["a.py"]


def test_second_process_is_refused_until_the_first_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from launch import run_dir\n"
        f"with run_dir._locked(Path({str(tmp_path)!r})):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    start(tmp_path)
    before = content(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use by another process"):
            start(tmp_path)
        assert content(tmp_path) == before
        holder.send_signal(signal.SIGKILL)
    assert start(tmp_path).state == "started"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "result.json"
    run_dir.write_json(path, {"old": 1})

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        run_dir.write_json(path, {"new": 1})
    assert caught.value.filename == str(path)
    assert list(content(tmp_path)) == ["result.json"]
    assert json.loads(path.read_text()) == {"old": 1}


def test_strict_json(tmp_path):
    path = tmp_path / "x.json"
    data = {"nan": float("nan"), "array": np.arange(2), "scalar": np.float32(0.5), "inf": -np.inf}
    run_dir.write_json(path, {**data, 1: (True, None, "s")})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "nan": "nan",
        "array": [0, 1],
        "scalar": 0.5,
        "inf": "-inf",
        "1": [True, None, "s"],
    }
