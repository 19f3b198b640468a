"""Commits as tasks: what an agent gets, what it cannot reach, and what no command runs."""

import os
import subprocess

import pytest

from c2.config import ConfigError
from c2.sandbox.protocol import WORKDIR, Spec
from c2.sandbox.tasks import git_tasks

PINS = ("pytest==1 --hash=sha256:00",)
SECRET = "return 2 * x + 1  # the answer"


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def write(folder, files):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture
def repository(tmp_path):
    """Three commits; the last is the task."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    write(folder, {"README": "old\n", "pkg/a.py": "x = 0\n"})
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "First")
    write(folder, {
        "pkg/a.py": "def f(x):\n    return 2 * x\n", "pkg/b.py": "", "setup.cfg": "",
        "tests/conftest.py": "", "tests/test_old.py": "def test_old(): pass\n",
    })  # fmt: skip
    (folder / "link").symlink_to("/etc/passwd")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Second")
    write(folder, {
        "pkg/a.py": f"def f(x):\n    {SECRET}\n", "pkg/sub/c.py": "y = 1\n", "setup.cfg": "[x]\n",
        "tests/test_new.py": "from pkg.a import f\ndef test_f():\n    assert f(1) == 3\n",
    })  # fmt: skip
    (folder / "pkg/b.py").unlink()
    git(folder, "add", "-A")
    message = "Fix f\n\nIt was off by one.\n\nSigned-off-by: A <a@b>\nRefs: 12\n"
    git(folder, "commit", "-q", "-m", message)
    git(folder, "tag", "v1")
    return folder


def test_a_commit_becomes_a_task(repository):
    made = git_tasks.candidate(repository, "HEAD", requires=PINS)
    assert made.prompt == "Fix f\n\nIt was off by one."
    assert made.files == {
        "README": "old\n", "pkg/a.py": "def f(x):\n    return 2 * x\n", "pkg/b.py": "",
        "setup.cfg": "", "tests/conftest.py": "", "tests/test_old.py": "def test_old(): pass\n",
    }  # fmt: skip
    changed = {path for path in made.solution if made.solution[path] != made.files.get(path)}
    assert changed == {"pkg/a.py", "pkg/sub/c.py"}  # no deletions, nothing that steers programs
    assert set(made.hidden_tests) == {
        "tests/conftest.py", "tests/test_old.py", "tests/test_new.py",
    }  # fmt: skip
    assert made.editable == ("pkg/*",)
    task = made.solved(["tests/test_new.py::test_f"], ["tests/test_old.py::test_old"]).task
    assert SECRET not in task.prompt + "".join(task.files.values())
    assert task.id == f"commit/project/{git(repository, 'rev-parse', 'HEAD')[:12]}"


def test_bare_repositories_and_patterns_of_ones_own(repository, tmp_path):
    bare = tmp_path / "copy.git"
    git(tmp_path, "clone", "-q", "--bare", str(repository), str(bare))
    here = git_tasks.candidate(repository, "v1", requires=PINS)
    there = git_tasks.candidate(bare, "v1", requires=PINS)
    assert (there.files, there.solution) == (here.files, here.solution)
    some = git_tasks.candidate(
        bare, "v1", requires=PINS, source=["pkg/a.py"], tests=["tests/*w.py"]
    )
    assert set(some.hidden_tests) == {"tests/test_new.py"} and "pkg/sub/c.py" not in some.solution


@pytest.mark.parametrize(
    ("commit", "words"),
    [
        ("nowhere", "nowhere"),
        ("HEAD~2", "HEAD~2 has 0 parents"),
        ("--all", "--all"),
        ("HEAD~1", None),
    ],
)
def test_commits_that_make_no_task(repository, commit, words):
    if words:
        with pytest.raises(ConfigError, match=words):
            git_tasks.candidate(repository, commit, requires=PINS)
    write(repository, {"README": "new\n"})
    git(repository, "commit", "-q", "-a", "-m", "Docs")
    with pytest.raises(ConfigError, match="changes no test"):
        git_tasks.candidate(repository, "HEAD", requires=PINS)


def test_a_folder_that_is_no_repository(tmp_path):
    with pytest.raises(ConfigError, match="repository: "):
        git_tasks.candidate(tmp_path, "HEAD", requires=PINS)


def test_nothing_that_a_repository_names_is_run(repository, tmp_path, monkeypatch):
    """Hooks, filters, monitors, helpers of remotes and pagers are for those who trust it."""
    canary = tmp_path / "canary"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {canary}\nexit 1\n")
    script.chmod(0o755)
    for name in (
        "core.fsmonitor", "core.pager", "filter.x.clean", "filter.x.smudge", "filter.x.process",
        "diff.external", "diff.x.textconv", "core.sshCommand", "core.askPass", "gpg.program",
    ):  # fmt: skip
        git(repository, "config", name, str(script))
    write(repository, {".git/info/attributes": "* filter=x diff=x\n"})
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(script))
    # Objects that a partial clone would fetch, through the program above.
    git(repository, "config", "extensions.partialClone", "origin")
    git(repository, "config", "remote.origin.url", "ssh://nowhere/project")
    git(repository, "config", "remote.origin.promisor", "true")
    git_tasks.candidate(repository, "HEAD", requires=PINS)
    blob = git(repository, "rev-parse", "HEAD:pkg/a.py")
    os.unlink(repository / ".git/objects" / blob[:2] / blob[2:])
    with pytest.raises(ConfigError):
        git_tasks.candidate(repository, "HEAD", requires=PINS)
    assert not canary.exists()


def test_an_agents_repository_holds_its_own_start_and_nothing_else(bwrap, repository):
    made = git_tasks.candidate(repository, "HEAD", requires=PINS)
    future = [git(repository, "rev-parse", name) for name in ("HEAD", "HEAD:pkg/a.py")]
    handle = bwrap.create(Spec())
    try:
        for path, text in made.files.items():
            bwrap.write(handle, f"{WORKDIR}/{path}", text.encode())
        git_tasks.start_history(bwrap, handle, WORKDIR)

        def ask(*words):
            result = bwrap.exec(handle, ["git", *words])
            return result.code, result.stdout.decode().strip()

        listed = ask("rev-list", "--all", "--objects", "--reflog", "--no-object-names")[1]
        there = ask("cat-file", "--batch-all-objects", "--batch-check=%(objectname)")[1]
        assert sorted(listed.split()) == sorted(there.split())  # packs and alternates included
        assert ask("rev-list", "--all", "--reflog", "--count") == (0, "1")
        assert ask("status", "--porcelain") == (0, "")
        assert ask("fsck", "--lost-found", "--unreachable") == (0, "")
        assert ask("remote")[1] == ask("tag")[1] == ask("stash", "list")[1] == ""
        assert all(ask("cat-file", "-e", name)[0] for name in future)
        # In no file of the whole root that is not of the machine's programs.
        grep = ["find", "/", "-xdev", "-type", "f", "-exec", "grep", "-lF", SECRET, "{}", "+"]
        assert not bwrap.exec(handle, grep).stdout
        bwrap.write(handle, "/var/tmp/copy", f"# {SECRET}".encode())
        assert bwrap.exec(handle, grep).stdout == b"/var/tmp/copy\n"
        files = ask("ls-tree", "-r", "--name-only", "HEAD")[1].splitlines()
        assert sorted(files) == sorted(made.files)
    finally:
        bwrap.close(handle)


def test_messages():
    assert git_tasks.prompt("Subject\n") == "Subject"
    assert git_tasks.prompt("Fixes: 12\n") == "Fixes: 12"  # the only paragraph there is
    text = "Do it\n\nNote: this stays, as it has\na second line\n\nCo-authored-by: B <b@c>\n"
    assert git_tasks.prompt(text) == "Do it\n\nNote: this stays, as it has\na second line"
