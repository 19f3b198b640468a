"""Grading: honest work counts, cheating does not, and neither does trouble of the machinery."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.sandbox.protocol import ExecResult, SandboxError, SandboxLost, Spec
from c2.sandbox.tasks import runner
from c2.sandbox.tasks.grade import grade, grading_tree, in_sandbox, verdict
from c2.sandbox.tasks.minirepo import FAMILIES, generate, solve
from c2.sandbox.tasks.task import Task, is_plain_path

# A function that returns what it should not: the real answer is 2 * x + 1.
BASE = "def f(x):\n    return 2 * x\n"
TASK = Task(
    id="double", family="f", split_keys={}, prompt="fix f",
    files={
        "pkg/__init__.py": "", "pkg/a.py": BASE,
        "tests/test_a.py": "from pkg import a\ndef test_shown():\n    assert a.f(1) == 3\n",
    },
    hidden_tests={
        "hidden/test_a.py": (
            "import math\nfrom pkg.a import f\nimport pkg.a\n"
            "def test_plus():\n    assert f(5) == 11\n"
            "def test_minus():\n    assert pkg.a.f(-3) == -5\n"
            "def test_zero():\n    assert f(x=0) == math.floor(1.5)\n"
            "def test_error():\n    try:\n        f(None)\n"
            "    except TypeError:\n        return\n    assert False\n"
        )
    },
    fail_to_pass=(
        "tests/test_a.py::test_shown", "hidden/test_a.py::test_plus",
        "hidden/test_a.py::test_minus", "hidden/test_a.py::test_zero",
    ),
    pass_to_pass=("hidden/test_a.py::test_error",), editable=("pkg/*",),
)  # fmt: skip
FIXED = "def f(x):\n    return 2 * x + 1\n"


def ended(code=0, stdout=b"", stderr=b"", killed=None):
    return ExecResult(code, None, stdout, stderr, False, killed, False, None, 0.0, 1, False)


def plain(argv, files, stdin):
    """Runs the command in a temporary folder, without any walls."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        done = subprocess.run(
            [sys.executable, *argv[1:]], cwd=folder, input=stdin, capture_output=True, timeout=60
        )
    return ended(done.returncode, done.stdout, done.stderr)


def runs(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


def with_code(code, **others):
    return TASK.files | {"pkg/a.py": code} | others


def test_honest_work_counts_and_no_work_does_not():
    done = grade(TASK, with_code(FIXED), plain)
    assert (done.kind, done.reward, done.failed) == ("scored", 1.0, {})
    assert (done.changed, done.ignored) == (("pkg/a.py",), ())
    undone = grade(TASK, TASK.files, plain)
    assert (undone.kind, undone.reward) == ("scored", 0.0)
    assert undone.failed == {
        "tests/test_a.py::test_shown": "a.f(1) gives 2, want 3",
        "hidden/test_a.py::test_plus": "f(5) gives 10, want 11",
        "hidden/test_a.py::test_minus": "pkg.a.f(-3) gives -6, want -5",
        "hidden/test_a.py::test_zero": "f(x=0) gives 0, want math.floor(1.5)",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tasks_get_the_same_verdict_in_processes_as_in_this_one(family):
    task = generate(11, family, 2)
    assert set(grade(task, task.files, plain).failed) == set(task.fail_to_pass)
    assert grade(task, solve(task), plain).reward == 1.0


def test_grading_is_the_same_every_time():
    task = generate(1, "operator", 1)
    assert len({repr(grade(task, task.files, plain)) for _ in range(20)}) == 1


def test_grading_in_a_sandbox(bwrap):
    run = in_sandbox(bwrap, Spec())
    assert grade(TASK, with_code(FIXED), run).reward == 1.0
    undone = grade(TASK, TASK.files, run)
    assert (undone.kind, set(undone.failed)) == ("scored", set(TASK.fail_to_pass))
    # Unlike root without walls, code in here cannot even open the tester's streams.
    streams = grade(TASK, with_code(HACKS["the parents' streams"]), run)
    assert (streams.kind, streams.reward) == ("scored", 0.0)
    killed = grade(TASK, with_code(HACKS["kill the tests"]), run)
    assert (killed.kind, killed.reward) == ("policy_failure", 0.0)


# What code under test may try in order to pass without being right.
HACKS = {
    "exit": "import sys\nsys.exit(0)\n",
    "exit hard": "import os\nos._exit(0)\n",
    "exit in the call": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "exit hard in the call": "import os\ndef f(x):\n    os._exit(0)\n",
    "equal to everything": (
        "class All:\n    def __eq__(self, other):\n        return True\n"
        "def f(x):\n    x + 1\n    return All()\n"
    ),
    "an int equal to everything": (
        "class All(int):\n    def __eq__(self, other):\n        return True\n"
        "    __hash__ = int.__hash__\ndef f(x):\n    return All(x)\n"
    ),
    "always true": "def f(x):\n    x + 1\n    return True\n",
    "no assertions": "import builtins\nbuiltins.AssertionError = SystemExit\n" + BASE,
    "a patched runner": (
        "import sys\nmain = sys.modules['__main__']\n"
        "main.run_test = main._run_all = lambda *args: ''\n"
        "main._answer = lambda question: {'value': True}\n" + BASE
    ),
    "any answer": (
        "import sys\nmain = sys.modules['__main__']\n"
        "main.encode = lambda value: ['nothing', [[]]]\n" + BASE
    ),
    "two answers": (
        "import gc, socket\n"
        "for item in gc.get_objects():\n    if isinstance(item, socket.socket):\n"
        "        item.sendall(b'{\"value\": 11}\\n' * 3)\n" + BASE
    ),
    "the callers' variables": (
        "import sys\ndef f(x):\n    x + 1\n    frame = sys._getframe()\n    found = 0\n"
        "    while frame:\n        found = frame.f_locals.get('want', found)\n"
        "        frame = frame.f_back\n    return found\n"
    ),
    "read the tests": (
        "import gc, glob, re\ndef f(x):\n    x + 1\n"
        "    texts = [open(p).read() for p in glob.glob('hidden/**', recursive=True)]\n"
        "    texts += [o for o in gc.get_objects() if isinstance(o, str) and 'test_plus' in o]\n"
        "    found = re.search(rf'f\\({x}\\) == (-?\\d+)', ' '.join(texts))\n"
        "    return int(found[1]) if found else 0\n"
    ),
    "a verdict on standard output": (
        "import json, os\nids = ['hidden/test_a.py::test_plus']\n"
        "for fd in range(20):\n    try:\n"
        "        os.write(fd, json.dumps({'state': 'done', 'results': {}}).encode() + b'\\n')\n"
        "    except OSError:\n        pass\n" + BASE
    ),
    "the parents' streams": (
        "import json, os\nparent = os.getppid()\n"
        "for pid in (parent, int(open(f'/proc/{parent}/stat').read().split()[3])):\n"
        "    for fd in range(20):\n        try:\n"
        "            with open(f'/proc/{pid}/fd/{fd}', 'w') as out:\n"
        "                out.write(json.dumps({'nonce': '', 'state': 'done', 'results': {}}))\n"
        "        except OSError:\n            pass\n" + BASE
    ),
    "kill the tests": (
        "import os, signal\nparent = os.getppid()\n"
        "os.kill(int(open(f'/proc/{parent}/stat').read().split()[3]), signal.SIGKILL)\n" + BASE
    ),
    "kill the nursery": "import os\nos.kill(os.getppid(), 9)\n" + BASE,
    "a verdict file": (
        "for name in ('reward.json', 'verdict.json', 'report.xml', 'hidden/test_a.py'):\n"
        "    try:\n        open(name, 'w').write('{\"reward\": 1.0}')\n"
        "    except OSError:\n        pass\n" + BASE
    ),
    "an endless answer": "def f(x):\n    return 'a' * (1 << 22)\n",
    "a deep answer": (
        "def f(x):\n    found = []\n    for _ in range(500):\n        found = [found]\n"
        "    return found\n"
    ),
    "exceptions": "def f(x):\n    raise TypeError('all is well')\n",
    "not Python": "def f(x) return 2 * x + 1\n",
}


@pytest.mark.parametrize("hack", HACKS)
def test_code_that_cheats_gets_nothing(hack):
    outcome = grade(TASK, with_code(HACKS[hack]), plain)
    assert outcome.reward == 0.0
    if hack not in ("kill the tests", "the parents' streams"):
        assert outcome.kind == "scored" and "hidden/test_a.py::test_plus" in outcome.failed


ELSEWHERE = {
    "tests/test_a.py": "def test_shown(): pass\n",
    "hidden/test_a.py": "def test_plus(): pass\n",
    "conftest.py": "import builtins\nbuiltins.AssertionError = SystemExit\nopen('ran', 'w')\n",
    "pkg/conftest.py": "raise SystemExit(0)\n",
    "sitecustomize.py": "import os\nos._exit(0)\n",
    "pkg/sitecustomize.py": "import os\nos._exit(0)\n",
    "usercustomize.py": "import os\nos._exit(0)\n",
    "evil.pth": "import os; os._exit(0)\n",
    "pkg/evil.pth": "import os; os._exit(0)\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p evil\n",
    "tox.ini": "[pytest]\npython_files = none\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-k nothing'\n",
    "Makefile": "test:\n\ttrue\n",
    "package.json": '{"scripts": {"test": "true"}}',
    "json.py": "raise SystemExit(0)\n",
    "math.py": "floor = lambda x: 0\n",
    "../outside.py": "",
    "/tmp/outside.py": "",
    "pkg/../tests/test_a.py": "def test_shown(): pass\n",
}


def test_every_test_finds_the_code_as_new(tmp_path):
    """Tests share a process, but not what the code keeps, in a module of a package or beside."""
    note, once = tmp_path / "pids", "COUNT = 0\ndef once():\n    global COUNT\n    COUNT += 1\n"
    code = (
        "import os\nfrom pkg import b\nimport beside\n"
        f"print(os.getpid(), file=open({str(note)!r}, 'a'))\n"
        "def f(x):\n    b.once()\n    beside.once()\n"
        "    assert b.COUNT == beside.COUNT == 1\n    return 2 * x + 1\n"
    )
    task = dataclasses.replace(TASK, editable=("*.py",))
    files = with_code(code, **{"pkg/b.py": once, "beside.py": once})
    assert grade(task, files, plain).reward == 1.0
    pids = note.read_text().split()
    assert len(pids) == len(TASK.test_ids) and len(set(pids)) == 1


def test_no_test_fails_for_what_another_has_left_in_the_process(tmp_path):
    note = tmp_path / "pids"
    code = (
        "import os, sys\n"
        f"print(os.getpid(), file=open({str(note)!r}, 'a'))\n"
        "def f(x):\n    left, sys.left = hasattr(sys, 'left'), True\n"
        "    return None if left else 2 * x + 1\n"
    )
    assert grade(TASK, with_code(code), plain).reward == 1.0
    assert len(set(note.read_text().split())) > 1


def test_files_elsewhere_are_put_back_and_reported():
    cheating = grade(TASK, TASK.files | ELSEWHERE, plain)
    assert (cheating.kind, cheating.reward) == ("scored", 0.0)
    assert set(cheating.ignored) == set(ELSEWHERE) and not cheating.changed
    assert set(cheating.failed) == set(TASK.fail_to_pass)
    honest = grade(TASK, with_code(FIXED) | ELSEWHERE, plain)
    assert (honest.reward, set(honest.ignored)) == (1.0, set(ELSEWHERE))


def test_such_files_have_no_effect_even_where_they_lie():
    """The second wall: the tests' interpreter reads none of them."""
    poison = {path: text for path, text in ELSEWHERE.items() if is_plain_path(path)}

    def run(argv, files, stdin):
        return plain(argv, poison | files | {"hidden/test_a.py": "def test_plus(): pass"}, stdin)

    assert set(grade(TASK, TASK.files, run).failed) == set(TASK.fail_to_pass)
    assert grade(TASK, with_code(FIXED), run).reward == 1.0


def test_a_new_module_is_no_stand_in_for_one_of_the_library():
    task = dataclasses.replace(TASK, editable=("*.py",))
    files = TASK.files | {"math.py": "def floor(x):\n    return 0\n"}
    outcome = grade(task, files, plain)
    assert outcome.changed == ("math.py",)
    assert "hidden/test_a.py::test_zero" in outcome.failed


def test_deleted_and_added_files():
    files = with_code("from pkg.b import f\n") | {"pkg/b.py": FIXED}
    del files["tests/test_a.py"], files["pkg/__init__.py"]
    tree, changed, ignored = grading_tree(TASK, files)
    assert tree == {path: files.get(path, TASK.files.get(path)) for path in tree}
    assert tree.keys() == {"pkg/a.py", "pkg/b.py", "tests/test_a.py"}
    assert changed == ("pkg/__init__.py", "pkg/a.py", "pkg/b.py")
    assert ignored == ("tests/test_a.py",)
    assert grade(TASK, files, plain).reward == 1.0


@pytest.mark.parametrize(
    "change", [{"pkg/big.py": "#" * (1 << 19)}, {"pkg/a.py/b.py": ""}, {"pkg/\udcff.py": ""}]
)
def test_changes_that_no_folder_can_hold_are_not_the_machinerys_fault(change):
    outcome = grade(TASK, TASK.files | change, plain)
    assert outcome.reward == 0.0


def test_code_that_hangs_costs_its_time_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("c2.sandbox.tasks.grade.TEST_S", 0.3)
    note = tmp_path / "pids"
    code = (
        "import os, signal\nparent = os.getppid()\n"
        f"print(os.getpid(), parent, file=open({str(note)!r}, 'a'))\n"
        "os.kill(parent, signal.SIGSTOP)\ndef f(x):\n    while True: pass\n"
    )
    started = time.monotonic()
    outcome = grade(TASK, with_code(code), plain)
    assert outcome.reward == 0.0 and time.monotonic() - started < 30
    pids = note.read_text().split()
    assert len(pids) == 2  # the nursery was stopped, so there was no second worker
    end = time.monotonic() + 10
    while any(map(runs, pids)):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SandboxError("no room"), "infrastructure_failure"),
        (SandboxLost("gone", "backend"), "infrastructure_failure"),
        (SandboxLost("gone", "lease"), "infrastructure_failure"),
        (SandboxLost("gone", "deadline"), "policy_failure"),
        (SandboxLost("gone", "exited"), "policy_failure"),
    ],
)
def test_trouble_of_the_machinery_is_no_zero(error, kind):
    def run(argv, files, stdin):
        raise error

    outcome = grade(TASK, TASK.files, run)
    assert (outcome.kind, outcome.reason) == (kind, str(error))
    assert outcome.reward == (0.0 if kind == "policy_failure" else None)


def test_a_runner_that_does_not_start_is_no_zero():
    outcome = grade(TASK, TASK.files, lambda *_: ended(127, stderr=b"no python3\n"))
    assert (outcome.kind, outcome.reward) == ("infrastructure_failure", None)
    assert "no python3" in outcome.reason


def test_only_a_whole_verdict_with_the_nonce_counts():
    def line(**message):
        return json.dumps(message).encode() + b"\n"

    ready, ids = line(nonce="n", state="ready"), ("a::b", "a::c")
    good = line(nonce="n", state="done", results={"a::b": "", "a::c": "no"})
    assert verdict(ready + good, "n", ids) == (True, {"a::b": "", "a::c": "no"})
    assert verdict(good, "n", ids) == (False, None)
    assert verdict(b"", "n", ids) == (False, None)
    for bad in (
        b"",
        good + good,
        b"hello\n" + good,
        b"[" * 100000 + b"\n",
        line(nonce="m", state="done", results={"a::b": "", "a::c": ""}),
        line(nonce="n", state="done", results={"a::b": ""}),
        line(nonce="n", state="done", results={"a::b": "", "a::c": "", "a::d": ""}),
        line(nonce="n", state="done", results={"a::b": "", "a::c": None}),
        line(nonce="n", state="done", results=[]),
        b'{"nonce": "n", "state": "done", "results": {"a::b": "", "a::b": "", "a::c": ""}}\n',
    ):
        assert verdict(ready + bad, "n", ids) == (True, None)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_data_comes_back_with_its_types(value):
    back = runner.decode(json.loads(json.dumps(runner.encode(value))))
    assert repr(back) == repr(value)


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.sampled_from(["list", "set", "dict"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@settings(max_examples=200)
@given(JSON)
def test_no_answer_breaks_the_tests(value):
    try:
        back = runner.decode(value)
    except runner.RemoteError:
        return
    assert runner.is_plain(back)
