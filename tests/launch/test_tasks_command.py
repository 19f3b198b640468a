"""The command line of tasks, without a package index and without sandboxes."""

import hashlib
import io
import json
import shutil
import tarfile

import pytest

from c2.sandbox.tasks import release_pairs, task
from launch import tasks


def archive(cache, version, files):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as packed:
        for path, text in files.items():
            info = tarfile.TarInfo(f"numb-{version}/{path}")
            info.size = len(text)
            packed.addfile(info, io.BytesIO(text.encode()))
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    path = cache / "sdists" / digest / f"numb-{version}.tar.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(data.getvalue())
    return {"version": version, "file": path.name, "sha256": digest}


@pytest.fixture
def numb(tmp_path, monkeypatch):
    """A recipe folder with one release pair, whose files are in the cache; flags for it."""
    cache, folder = tmp_path / "cache", tmp_path / "recipes"
    folder.mkdir()
    found = {
        "python": "3.11", "fail_to_pass": {"tests/test_a.py": ["test_x[[bold]]"]},
        "pass_to_pass": {}, "dropped": {"flaky": 2}, "mutants": 4, "killed": 3,
    }  # fmt: skip
    recipe = {
        "project": "numb", "license": "MIT", "source": ["numb/*"], "tests": ["tests/*"],
        "entry": "Be [bold]right[/] about x", "found": found,
        "base": archive(cache, "1", {"numb/a.py": "x = 1\n"}),
        "solution": archive(cache, "2", {"numb/a.py": "x = 2\n", "tests/test_a.py": "# hidden"}),
    }  # fmt: skip
    (folder / "numb.json").write_text(json.dumps(recipe))
    monkeypatch.setattr(tasks, "RECIPES", folder)
    monkeypatch.setattr(tasks._chosen, "__defaults__", (folder,))
    return [f"--cache={cache}", f"--recipes={folder}", f"--out={tmp_path / 'tasks.jsonl'}"]


def run(*words):
    return tasks.run_main(["tasks", *words])


def test_list(numb, capsys):
    assert run("list") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "numb" in line)
    assert line.split() == ["numb", "1", "2", "MIT", "1", "0", "3", "of", "4"]


def test_show(numb, capsys):
    assert run("show", "numb", *numb) == 0
    out = capsys.readouterr().out
    assert "release/numb/2" in out and "Be [bold]right[/] about x" in out
    assert "numb/a.py" in out and "test_x[[bold]]" in out


def test_build(numb, tmp_path, capsys):
    assert run("build", *numb) == 0
    (line,) = (tmp_path / "tasks.jsonl").read_text().splitlines()
    made = task.from_json(line)
    assert made.files == {"numb/a.py": "x = 1\n"} and made.fail_to_pass
    assert made.hidden_tests == {"tests/test_a.py": "# hidden"}
    assert made.requires == release_pairs.requires()
    # Nothing half written.
    shutil.rmtree(tmp_path / "cache")
    before = line
    assert run("build", *numb[1:], f"--cache={tmp_path / 'sdists'}", "nothing") == 2
    assert (tmp_path / "tasks.jsonl").read_text().strip() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shwo"], "'shwo' is no verb; legal are list"),
        (["show"], "show: name a project"),
        (["show", "other"], "no recipe for 'other'; there are numb"),
        (["build"], "--out is missing"),
        (["draft", "numb"], "draft: needed are PROJECT BASE SOLUTION"),
        (["commit", "--repo=x"], "commit: needed are --repo, --commit"),
        (["commit", "--repo=/nowhere", "--commit=HEAD", "--out=x"], "repository: /nowhere"),
        (["list", "--colour=red"], "Unknown command line flag 'colour'"),
    ],
)
def test_bad_command_lines(numb, capsys, words, said):
    assert run(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


def test_help(capsys):
    assert run("--help") == 0 and run() == 0
    assert "python -m launch.tasks gate" in capsys.readouterr().out
