"""`python -m launch.agent`: a copy goes in, a patch comes out, and people can read what happens."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from c2.agent import transcript
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.protocol import SandboxError
from launch import agent, agent_repo
from launch.agent_screen import Screen, cut


@pytest.fixture
def sandboxes():
    """Waits until no other test has a sandbox: the leak tests look at the whole machine."""
    with open(Path(tempfile.gettempdir()) / "c2-tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with Bwrap():
                pass
        except SandboxError as error:
            pytest.skip(str(error))
        yield


def command(*words):
    """Exit status and output of a command line in this process."""
    console = Console(file=io.StringIO(), width=100)
    status = agent.run_main(["agent", *map(str, words)], console)
    return status, console.file.getvalue()


@pytest.fixture
def endpoint():
    """A model that says what a test puts into `turns`: texts, or lists of calls."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            said = server.turns.pop(0) if server.turns else "no more"
            message = {"content": said if isinstance(said, str) else None}
            if not isinstance(said, str):
                message["tool_calls"] = [
                    {"id": str(i), "function": {"name": name, "arguments": json.dumps(arguments)}}
                    for i, (name, arguments) in enumerate(said)
                ]
            data = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.turns = []
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def repo(tmp_path):
    folder = tmp_path / "repo"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/a.py").write_text("def f():\n    return 1\n")
    (folder / "old.txt").write_text("old\n")
    (folder / "keep.bin").write_bytes(b"\0\1")
    (folder / "link").symlink_to("old.txt")
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if ".git" not in path.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if p.is_file()}


def test_the_scripted_demonstration(sandboxes, tmp_path):
    out, path = tmp_path / "a.patch", tmp_path / "a.jsonl"
    status, shown = command(
        "--policy=scripted", "--family=operator", "--seed=0", f"--out={out}",
        f"--transcript={path}", "--config.harness.max_turns=9",
    )  # fmt: skip
    assert status == 0
    lines = shown.splitlines()
    assert lines[0].startswith("task       news/reader.py: ")
    assert any(line.startswith("turn 1 of 9: 114 tokens read, 36 written ") for line in lines)
    assert "> read_file path='news/page.py'" in lines
    assert "    1|def points(costs):" in lines and "    pass" in lines
    assert "+    return [item + mark for item in costs]" in lines
    assert any(line.startswith("grade      solved: passes 10 tests") for line in lines)
    assert out.read_text().startswith("diff --git a/news/page.py b/news/page.py\n")
    events = list(transcript.read(path))
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["start", "message"] and kinds[-3:] == ["end", "patch", "grade"]
    assert events[-1]["reward"] == 1 and events[-2]["text"] == out.read_text()


def test_a_model_works_on_a_copy_and_the_patch_holds_its_work(
    sandboxes, tmp_path, repo, endpoint, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    edit = {"path": "lib/a.py", "old": "return 1", "new": "return 2"}
    endpoint.turns = [
        [("edit_file", edit), ("write_file", {"path": "new/é b.txt", "text": "odd name"})],
        [("write_file", {"path": "new/b.txt", "text": "no newline at the end"}),
         ("shell", {"command": "rm old.txt; ln -s . l; printf '\\000' > keep.bin; env; ls -a"})],
        [("run_tests", {}), ("todo", {"items": [{"text": "x"}]})],
        "Done \x1b[31mred.",
    ]  # fmt: skip
    before, out = tree(repo), tmp_path / "a.patch"
    status, shown = command(
        f"--repo={repo}", "--prompt=change it", f"--endpoint={endpoint.url}", "--model=m",
        f"--out={out}", f"--transcript={tmp_path / 'a.jsonl'}", "--tests=echo tested",
    )  # fmt: skip
    assert status == 0, shown
    assert "left out   .git\n" in shown and "    tested\n" in shown and "    [ ] x\n" in shown
    assert "Done \ufffd[31mred." in shown and "\x1b" not in shown
    assert "odd names): l, keep.bin" in shown and f"git -C {repo} apply {out}" in shown
    assert "very-secret" not in shown + (tmp_path / "a.jsonl").read_text()
    assert tree(repo) == before
    subprocess.run(["git", "-C", repo, "apply", out], check=True)
    gone = {path: data for path, data in before.items() if path not in ("old.txt", "link")}
    new = {"lib/a.py": b"def f():\n    return 2\n", "new/b.txt": b"no newline at the end"}
    new["new/é b.txt"] = b"odd name"
    assert tree(repo) == gone | new


def test_a_model_that_cannot_be_reached(sandboxes, tmp_path, repo, monkeypatch):
    monkeypatch.setattr("c2.agent.endpoint.RETRIES", 1)
    status, shown = command(
        f"--repo={repo}", "--prompt=x", "--endpoint=http://127.0.0.1:1", "--model=m",
        f"--transcript={tmp_path / 'a.jsonl'}",
    )  # fmt: skip
    assert status == 1
    assert "ended      the agent cannot be reached (http://127.0.0.1:1/chat/completions" in shown
    assert "no text was changed" in shown


def test_ctrl_c_ends_a_long_command_and_still_shows_the_changes(
    sandboxes, tmp_path, repo, endpoint
):
    endpoint.turns = [
        [("write_file", {"path": "b.txt", "text": "b\n"})], [("shell", {"command": "sleep 600"})],
    ]  # fmt: skip
    words = [
        f"--repo={repo}", "--prompt=x", f"--endpoint={endpoint.url}", "--model=m",
        f"--transcript={tmp_path / 'a.jsonl'}",
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "launch.agent", *words], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        shown = ""
        while "sleep 600" not in shown:
            shown += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        shown += process.stdout.read()
    assert process.returncode == 130
    assert "interrupted\n" in shown and "+b\n" in shown


def test_an_endpoint_without_its_extra(repo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "c2.agent.endpoint", None)
    status, _ = command(f"--repo={repo}", "--prompt=x", *MODEL)
    assert status == 2 and "--endpoint needs `pip install -e .[agent]`" in capsys.readouterr().err


MODEL = ("--endpoint=http://x", "--model=m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--repo is missing; needed are --repo, --prompt, --endpoint and --model, or"),
        (["--repo=.", "--prompt=x", "--model=m"], "--endpoint is missing"),
        (["--repo=.", "--prompt=", *MODEL], "--prompt is missing"),
        (["--repo=nowhere", "--prompt=x", *MODEL], "--repo: 'nowhere' is no folder"),
        (["--policy=scripted", "--prompt=x"], "--prompt: --policy=scripted brings its own"),
        (["--policy=scripted", "--level=9"], "--level: 9; legal are 1 to 4"),
        (["--policy=script"], "--policy"),
        (["--policy=scripted", "--family=x"], "--family"),
        (["--policy=scripted", "--out=nowhere/a"], "--out: 'nowhere/a'; legal is a file in a"),
        (["--policy=scripted", "--out=."], "--out: '.'; legal is a file"),
        (["--policy=scripted", "--config.harness.turns=1"], "config.harness.turns: unknown key"),
        (["--policy=scripted", "--config.harness.max_turns=x"], "config.harness.max_turns"),
        (["--policy=scripted", "--config.harness.max_turns=0"], "config.harness.max_turns: 0"),
        (["--unknown"], "Unknown command line flag 'unknown'"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert agent.run_main(["agent", *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err
    assert err.count("\n") == 1 and not out


def test_help_and_config(capsys):
    with pytest.raises(SystemExit) as ended:
        agent.run_main(["agent", "--help"])
    assert ended.value.code == 0 and "--endpoint" in capsys.readouterr().out
    assert agent.run_main(["agent", "--print_config", "--config.tools.reading=strict"]) == 0
    assert json.loads(capsys.readouterr().out)["tools"]["reading"] == "strict"


LINES = st.text(st.sampled_from("ab\n\r"), max_size=12)
FILES = st.dictionaries(st.sampled_from(["a", "b/c", "d e"]), LINES)


@settings(max_examples=25, deadline=None)
@given(FILES, FILES)
@example({}, {"a": ""})
@example({"a": ""}, {})
@example({"a": "x"}, {"a": "x\n"})
def test_git_applies_patches(old, new):
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        for path, text in old.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(text.encode())
        changed = {
            path: new[path].encode() if path in new else None
            for path in sorted(old.keys() | new.keys())
            if old.get(path) != new.get(path)
        }
        patch, binary = agent_repo.patch(folder, changed)
        assert not binary
        if changed:
            applied = ["git", "apply", "--whitespace=nowarn", "-"]
            subprocess.run(applied, input=patch.encode(), cwd=folder, check=True)
        assert tree(folder) == {path: text.encode() for path, text in new.items()}


def test_nothing_that_a_model_says_reaches_the_terminal_as_a_command():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    screen, evil = Screen(console, 9), "\x1b]0;title\x07\x9b2J\r\b[red]x[/red]\u202e"
    call = {"name": evil, "arguments": {"a": evil, "b": evil * 9}}
    turn = {"text": evil, "thinking": evil, "calls": [call, {"raw": evil}]}
    screen({"event": "turn", "tokens": 1, "prompt_tokens": 1, "cut": True, **turn})
    screen({"event": "result", "text": evil})
    screen.diff(evil)
    screen.note(evil)
    screen.facts(task=evil)
    shown = console.file.getvalue()
    assert not set("\x1b\x07\x9b\r\b\u202e") & set(shown)
    assert shown.count("[red]x[/red]") >= 8


def test_answers_to_several_calls_say_to_which_they_belong():
    console = Console(file=io.StringIO(), width=80, highlight=False)
    screen = Screen(console, 9)
    calls = [{"name": "list_dir", "arguments": {}}, {"raw": "x {", "error": "e"}]
    numbers = {"tokens": 1, "prompt_tokens": 1, "cut": False, "text": ""}
    screen({"event": "turn", "calls": calls, **numbers})
    screen({"event": "result", "text": "a.py"})
    screen({"event": "result", "text": "error: e"})
    screen({"event": "turn", "calls": calls[:1], **numbers})
    screen({"event": "result", "text": "a.py"})
    rule, *lines = (line.rstrip() for line in console.file.getvalue().splitlines())
    assert rule.startswith("turn 1 of 9: 1 tokens read, 1 written")
    assert lines[:6] == [
        "> 1 list_dir", "> 2 a call that cannot be read x {", "  1 list_dir:", "    a.py",
        "  2 a call that cannot be read:", "    error: e",
    ]  # fmt: skip
    assert lines[7:] == ["> list_dir", "    a.py"]


def test_long_texts_are_cut_and_counted():
    assert cut("a\nb\nc", 2) == "a\nb\n[1 more lines]"
    assert cut("x" * 200, 1) == "x" * 157 + "..."
