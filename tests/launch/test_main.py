"""The command line: what it prints, what it leaves on disk and how it exits."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import jax_setup, provenance
from launch.main import run_main, split_overrides

ROOT = Path(jax_setup.__file__).parent.parent
STUDY = '''
"""Does it [0, 1] hold?

The runbook.
"""
import dataclasses
import time
from c2.config import ConfigError, runtime
from experiments.study import Claim, Result, new_figure

VARIANTS = ("mini", "full")

@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    hidden: int = 8
    heads: int = 2

    def __post_init__(self):
        if self.hidden % self.heads:
            raise ConfigError(f"heads: {self.heads} does not divide hidden ({self.hidden})")

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 1
    model: Model = Model()
    corpus: str | None = None
    fail: str = ""
    log_every: int = runtime(10)

def get_config(variant=VARIANTS[0]):
    return Config(size={"mini": 1, "full": 100}[variant])

def run(config, run):
    with open(run.workdir / "metrics.jsonl", "a") as file:
        file.write("{}\\n")
    if config.fail == "run":
        raise RuntimeError("it broke\\nin two lines")
    if config.fail == "disk":
        raise OSError(28, "No space left on device", "checkpoint")
    if config.fail == "wait":
        print("waiting", flush=True)
        time.sleep(60)
    if config.corpus == "empty":
        raise ConfigError("config.corpus: no files in 'empty'; legal: a folder of .py files")
    figure, axes = new_figure()
    axes.plot([0, 1])
    return Result(
        summary="It was found.",
        claims=[
            Claim(statement="a | b", measured=config.size, bound=10, relation="<", seeds=3),
            Claim(statement="never", measured=float("nan"), bound=0, relation=">", seeds=1),
        ],
        figures=[run.save_figure(figure, "line", caption="A line.")],
        tables={"Rows": [{"x": 1, "y": 0.123456}, {"x": 2, "z": "w"}]},
        metrics={"loss": 0.25},
    )
'''


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The path of a small study; the process stands in an empty folder and leaves jax alone."""
    path = tmp_path / "mine.py"
    path.write_text(STUDY)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for setting in ("enable_compilation_cache", "split_cpu", "release_compiler_memory"):
        monkeypatch.setattr(jax_setup, setting, lambda: None)
    monkeypatch.setenv("COLUMNS", "120")
    return path


def launch(*words):
    return run_main(["launch/main.py", *map(str, words)])


def launch_process(*words):
    command = [sys.executable, "-m", "launch.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def read(path):
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_run_writes_everything_and_reports(study, tmp_path, capsys):
    workdir = tmp_path / "w"
    assert launch(f"--config={study}", f"--workdir={workdir}", "--config.model.hidden=16") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "mine:mini: Does it [0, 1] hold?" in printed.out
    assert "model.hidden: 8 -> 16" in printed.out
    assert re.search(r"a \| b +1 +< 10 +3 +shown", printed.out)
    assert re.search(r"never +nan +> 0 +1 +not shown", printed.out)
    assert f"report: {workdir}/report.md" in printed.out

    assert read(workdir / "config.json")["config"]["model"] == {"hidden": 16, "heads": 2}
    (start,) = read(workdir / "overrides.json")["starts"]
    assert start["overrides"] == ["model.hidden=16"]
    assert start["changes"] == ["model.hidden: 8 -> 16"]
    assert start["command"][:3] == ["python", "-m", "launch.main"]
    assert start["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"time", "git", "machine"} <= set(start)
    result = read(workdir / "result.json")
    assert result["claims"][0] == {
        "statement": "a | b",
        "measured": 1.0,
        "bound": 10.0,
        "relation": "<",
        "seeds": 3,
        "note": "",
        "verdict": "shown",
    }
    assert result["claims"][1]["verdict"] == "not shown"
    assert result["metrics"] == {"loss": 0.25}
    assert result["resumed"] is False

    report = (workdir / "report.md").read_text()
    assert report.startswith("# Does it [0, 1] hold?\n\n`mine:mini`: 1 of 2 claims shown, ")
    assert "| a \\| b | 1 | < 10 | 3 | **shown** |  |" in report
    assert "![A line.](figures/line.png)" in report
    assert (workdir / "figures/line.png").exists()
    assert "| x | y | z |\n| --- | --- | --- |\n| 1 | 0.1235 |  |\n| 2 |  | w |" in report
    assert "- Changes from `mine:mini`: `model.hidden: 8 -> 16`" in report


def test_finished_run_is_shown_not_repeated(study, tmp_path, capsys):
    assert launch(f"--config={study}:full") == 0
    workdir = tmp_path / "here/runs/mine-full"
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert launch(f"--config={study}:full") == 0
    printed = capsys.readouterr().out
    assert "already finished" in printed
    assert re.search(r"a \| b +100 +< 10 +3 +not shown", printed)
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_failed_run_resumes_with_the_same_command(study, tmp_path, capsys):
    workdir = tmp_path / "w"
    command = (f"--config={study}", f"--workdir={workdir}")
    study.write_text(STUDY.replace('fail: str = ""', 'fail: str = "run"'))
    assert launch(*command) == 1
    assert capsys.readouterr().err == (
        f"error: RuntimeError: it broke (traceback: {workdir}/error.log)\n"
    )
    assert "in two lines" in (workdir / "error.log").read_text()
    assert not (workdir / "result.json").exists()
    study.write_text(
        STUDY.replace('fail: str = ""', 'fail: str = "run"').replace('== "run"', '== "fixed"')
    )
    assert launch(*command, "--config.log_every=1") == 0
    assert "changed  log_every: 10 -> 1 (since the last start)" in capsys.readouterr().out
    assert len(read(workdir / "overrides.json")["starts"]) == 2
    assert read(workdir / "result.json")["resumed"] is True
    assert (workdir / "metrics.jsonl").read_text() == "{}\n{}\n"


def test_debug_shows_the_traceback(study, capsys):
    assert launch(f"--config={study}", "--config.fail=run", "--debug") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_saved_and_printed_configs_can_be_rerun(study, tmp_path, capsys):
    assert launch(f"--config={study}:full", "--config.model.heads=4", "--print_config") == 0
    text = capsys.readouterr().out
    assert json.loads(text)["runtime"] == ["log_every"]
    saved = tmp_path / "saved.json"
    saved.write_text(text)
    assert launch(f"--config={saved}", "--workdir=w", "--config.log_every=3") == 0
    capsys.readouterr()
    assert launch("--config=w/config.json", "--print_config") == 0
    again = json.loads(capsys.readouterr().out)
    assert again["variant"] == "full"
    assert again["config"] == {**json.loads(text)["config"], "log_every": 3}
    saved.write_text(text.replace("heads", "haeds"))
    assert launch(f"--config={saved}") == 2
    assert "saved.json: config.model.haeds: unknown key; did you mean 'heads'?" in (
        capsys.readouterr().err
    )


def test_dry_run_writes_nothing(study, tmp_path, capsys):
    assert launch(f"--config={study}", "--config.size", "7", "--dry_run") == 0
    printed = capsys.readouterr().out
    assert "workdir  runs/mine-mini (new run)" in printed
    assert "config   size: 1 -> 7" in printed
    assert os.listdir(tmp_path / "here") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--config is missing"),
        (["--config=no_such_study"], "unknown study; legal: "),
        (["--config=STUDY:ful"], "unknown variant 'ful' of mine; did you mean 'full'?"),
        (["--config=STUDY", "--config.model.hiden=3"], "did you mean 'hidden'? legal keys: hidden"),
        (["--config=STUDY", "--config.size=big"], "config.size: expected int, got 'big'"),
        (["--config=STUDY", "--config.model.heads=3"], "config.model.heads: 3 does not divide"),
        (["--config=STUDY", "--config.size"], "--config.size: no value; write --config.size=VALUE"),
        (["--config=STUDY", "--config.size", "--dry_run"], "--config.size: no value"),
        (["--config=STUDY", "--workdri=w"], "Unknown command line flag 'workdri'. Did you mean"),
        (["--config=STUDY", "--dry_run=maybe"], "dry_run"),
        (["STUDY"], "unexpected argument"),
        (["--config=no.json"], "no.json: cannot be read: No such file or directory"),
        (["--config=STUDY", "--workdir=STUDY"], "Not a directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(study, tmp_path, capsys, words, message):
    assert launch(*(word.replace("STUDY", str(study)) for word in words)) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert os.listdir(tmp_path / "here") == []


def test_bad_input_found_by_the_study(study, capsys):
    assert launch(f"--config={study}", "--config.corpus=empty", "--workdir=w") == 2
    assert capsys.readouterr().err == (
        "error: config.corpus: no files in 'empty'; legal: a folder of .py files\n"
    )


def test_another_config_in_an_old_workdir(study, capsys):
    assert launch(f"--config={study}", "--workdir=w") == 0
    capsys.readouterr()
    assert launch(f"--config={study}", "--workdir=w", "--config.size=2") == 2
    assert "holds a run with another config: size: 1 -> 2;" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["at the start", "in the study", "at the end"])
def test_full_disk_is_one_line_and_status_1(study, tmp_path, capsys, monkeypatch, when):
    words = [f"--config={study}", "--workdir=w"]
    if when == "in the study":
        words.append("--config.fail=disk")
    else:
        real, name = os.replace, "config.json" if when == "at the start" else "result.json"

        def replace(old, new):
            if os.path.basename(new) == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(old, new)

        monkeypatch.setattr(os, "replace", replace)
    assert launch(*words) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: No space left on device: ")
    assert printed.count("\n") == 1
    assert not (tmp_path / "here/w/result.json").exists()
    assert not list((tmp_path / "here/w").glob(".*.partial"))


def test_ctrl_c_says_how_to_resume(study, tmp_path):
    words = (f"--config={study}", f"--workdir={tmp_path / 'w'}", "--config.fail=wait")
    command = [sys.executable, "-m", "launch.main", *words]
    environment = {**os.environ, "C2_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        while process.stdout.readline() != "waiting\n":
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == f"interrupted; to resume: python -m launch.main {' '.join(words)}\n"


def test_help_and_list_are_quick_to_answer_and_need_no_jax():
    code = (
        "import sys, runpy; sys.argv[1:] = ['--list']\n"
        "try: runpy.run_module('launch.main', run_name='__main__')\n"
        "finally: print('jax' in sys.modules, file=sys.stderr)"
    )
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (listed.returncode, listed.stderr) == (0, "False\n")
    assert "question" in listed.stdout
    shown = launch_process("--help")
    assert shown.returncode == 0
    assert "--config.KEY=VALUE" in shown.stdout
    assert "--workdir" in shown.stdout


def test_process_exits_2_on_an_unknown_flag():
    done = launch_process("--confgi=x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Unknown command line flag 'confgi'. Did you mean: config")
    assert done.stderr.count("\n") == 1


def test_split_overrides():
    words = ["main", "--config=a", "--config.x=1", "-config.y.z", "-2", "--workdir=b-config.c"]
    assert split_overrides(words) == (
        ["main", "--config=a", "--workdir=b-config.c"],
        ["x=1", "y.z=-2"],
    )


def test_compilation_cache_is_filled_and_the_users_own_respected(tmp_path):
    code = (
        "import jax; from launch import jax_setup; jax_setup.quiet_logs()\n"
        "jax_setup.enable_compilation_cache()\n"
        "print(jax.config.jax_compilation_cache_dir)"
    )

    def folder(**environment):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        return done.stdout.strip()

    assert folder(C2_CACHE_DIR=str(tmp_path)) == str(tmp_path / "jax")
    assert folder(C2_CACHE_DIR="/dev/null/x") == "None"
    assert folder(JAX_COMPILATION_CACHE_DIR="/own", C2_CACHE_DIR=str(tmp_path)) == "/own"


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("C2_CACHE_DIR", "/a")
    assert str(jax_setup.cache_dir()) == "/a"
    monkeypatch.delenv("C2_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert str(jax_setup.cache_dir()) == "/b/c2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert str(jax_setup.cache_dir()) == "/c/.cache/c2"


def test_git_revision(tmp_path):
    assert provenance.git_revision(tmp_path) is None
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "file").write_text("old")
    for words in (("init", "-q"), ("add", "file"), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    clean = provenance.git_revision(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", clean["revision"])
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("new")
    assert provenance.git_revision(tmp_path) == {**clean, "dirty": True}


def test_compiler_memory_is_released_after_long_compilations():
    """In a process of its own: listeners cannot be taken back."""
    code = (
        "import ctypes, types, jax\n"
        "from launch import jax_setup\n"
        "trims, events = [], []\n"
        "ctypes.CDLL = lambda name: types.SimpleNamespace(malloc_trim=trims.append)\n"
        "jax_setup.release_compiler_memory()\n"
        "listen = lambda event, *_, **__: events.append(event)\n"
        "jax.monitoring.register_event_duration_secs_listener(listen)\n"
        "jax.jit(lambda x: x + 1)(1.0)\n"
        "compiled = [e for e in events if e.endswith('backend_compile_duration')]\n"
        "assert compiled and not trims, (events, trims)  # jax still sends it, and it was short\n"
        "jax.monitoring.record_event_duration_secs(compiled[0], 2.0)\n"
        "assert trims == [0], trims"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
