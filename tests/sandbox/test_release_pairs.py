"""Tasks from releases: gates let through what is sound, and pytest's verdict cannot be had."""

import ast
import dataclasses
import functools
import hashlib
import http.server
import importlib.util
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile
from pathlib import Path

import pytest

from c2.config import ConfigError
from c2.sandbox.protocol import ExecResult, Resources, SandboxError, Spec
from c2.sandbox.tasks import gates, leaks, python_env, release_pairs, tools
from c2.sandbox.tasks.gates import GateConfig, gate, sort_tests
from c2.sandbox.tasks.grade import grade, in_sandbox
from c2.sandbox.tasks.mutants import mutants
from c2.sandbox.tasks.release_pairs import changelog, index
from c2.sandbox.tasks.release_pairs.index import Sdist
from c2.sandbox.tasks.tools import MemoryRepo, play

OLD = "def clamp(x, low, high):\n    return max(x, low)\n\n\ndef double(x):\n    return 2 * x\n"
NEW = (
    '"""Numbers."""\n\n\ndef clamp(x, low, high):\n    if low > high:\n        raise ValueError\n'
    "    return min(max(x, low), high)\n\n\ndef double(x):\n    return 2 * x\n\n\n"
    "def half(x):\n    return x / 2\n"
)
TESTS = """
import pytest
from numb import clamp, double

@pytest.fixture
def high():
    return 9

class TestClamp:
    def test_above(self, high):
        assert clamp(12, 0, high) == 9

    @pytest.mark.parametrize("x", [-3, 4])
    def test_inside(self, x, high):
        assert clamp(x, -3, high) == x

def test_order():
    with pytest.raises(ValueError):
        clamp(1, 2, 0)

def test_double():
    assert double(4) == 8

def test_only_a_name():
    from numb import half
    assert half(4) == 2

seen = []

def test_flaky_first():
    seen.append(1)

def test_flaky_second():
    assert not seen

def test_broken():
    assert double(1) == 3

@pytest.mark.skip
def test_skipped():
    pass
"""
PROJECT = {
    "CHANGES.md": "# Changes\n\n## 1.1 (2026-01-02)\n\n- clamp looks at `high`, and refuses a "
    "range that is empty\n\n## 1.0\n\n- First\n",
    "tests/conftest.py": "",
    "tests/test_numb.py": TESTS,
    "tests/test_half.py": "from numb import half\n\ndef test_half():\n    assert half(3) == 1.5\n",
}
BASE = {"src/numb/__init__.py": OLD, "tests/test_numb.py": "", "setup.py": "raise SystemExit\n"}
FAIL = ["tests/test_numb.py::TestClamp::test_above", "tests/test_numb.py::test_order"]
KEEP = [
    "tests/test_numb.py::TestClamp::test_inside[-3]",
    "tests/test_numb.py::TestClamp::test_inside[4]",
    "tests/test_numb.py::test_double",
    "tests/test_numb.py::test_flaky_first",
]
PINS = ("pytest==0 --hash=sha256:00",)  # what is installed here takes its place


def ended(code=0, stdout=b"", stderr=b""):
    return ExecResult(code, None, stdout, stderr, False, None, False, None, 0.0, 1, False)


def sdist(folder: Path, version: str, files: dict[str, str]) -> Sdist:
    """Puts a source distribution into a cache."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for path, text in (files | {"PKG-INFO": "", "numb.egg-info/x": ""}).items():
            info = tarfile.TarInfo(f"numb-{version}/{path}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    made = Sdist(version=version, file=f"numb-{version}.tar.gz", sha256=digest)
    path = folder / "sdists" / digest / made.file
    path.parent.mkdir(parents=True)
    path.write_bytes(data.getvalue())
    return made


@pytest.fixture(scope="module")
def candidate(tmp_path_factory):
    """The task between two releases of a project that is made here."""
    cache = tmp_path_factory.mktemp("cache")
    recipe = release_pairs.Recipe(
        project="numb", license="MIT", base=sdist(cache, "1.0", BASE),
        solution=sdist(cache, "1.1", PROJECT | {"src/numb/__init__.py": NEW}),
        source=("src/numb/*",), tests=("tests/*",),
        entry=changelog.entry(PROJECT, "1.1"),
    )  # fmt: skip
    return dataclasses.replace(release_pairs.candidate(recipe, cache), requires=PINS)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pytest that runs these tests, as a folder of packages."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        source = Path(importlib.util.find_spec(name).origin).parent
        shutil.copytree(source, folder / name)
    shutil.copy2(importlib.util.find_spec("py").origin, folder)
    return folder


@pytest.fixture
def plain(site, monkeypatch):
    """Runs commands without any walls."""
    monkeypatch.setattr(python_env, "SITE", str(site))

    def run(argv, files, stdin):
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                file = Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            done = subprocess.run(
                [sys.executable, *argv[1:]], cwd=folder, input=stdin, capture_output=True,
                timeout=60,
            )  # fmt: skip
        return ended(done.returncode, done.stdout, done.stderr)

    return run


def with_code(candidate, code, **others):
    return candidate.files | {"src/numb/__init__.py": code} | others


# Gates -----------------------------------------------------------------------------------------


def test_the_candidate(candidate):
    assert "clamp looks at `high`" in candidate.prompt and "First" not in candidate.prompt
    assert candidate.files == BASE
    assert candidate.solution == BASE | {"src/numb/__init__.py": NEW}
    assert set(candidate.hidden_tests) == {p for p in PROJECT if p.startswith("tests/")}


def test_gates(candidate, plain):
    found = gate(candidate, plain, GateConfig(mutants=12))
    assert found.reason == ""
    task = found.solved.task
    assert (list(task.fail_to_pass), list(task.pass_to_pass)) == (FAIL, KEEP)
    test = "tests/test_numb.py::test_{}".format
    assert found.dropped == {
        test("broken"): "the solution fails: E AssertionError",
        test("flaky_second"): "flaky",
        test("only_a_name"): "it misses only a name before",
        test("skipped"): "the solution fails: skipped",
        "tests/test_half.py::test_half": "it cannot be imported before",
    } | {test("broken"): found.dropped[test("broken")]}
    assert found.dropped[test("broken")].startswith("the solution fails: ")
    # All but those of `half`, whose only tests have been dropped.
    assert (found.mutants, found.killed) == (7, 4)
    recorded = release_pairs.found(found, "3.11")
    assert recorded.fail_to_pass == {
        "tests/test_numb.py": ("TestClamp::test_above", "test_order"),
    }  # fmt: skip


def simulated(**checks):
    """Runs tests that are functions of what the code defines, without pytest."""

    def run(argv, files, stdin):
        request, space = json.loads(stdin), {}
        exec(files["src/numb/__init__.py"], space)
        results = {f"tests/test_a.py::{name}": check(space) for name, check in checks.items()}
        wanted = results if request["ids"] is None else request["ids"]
        answer = {"nonce": request["nonce"], "state": "done"}
        answer["results"] = {name: results.get(name, "planted") for name in wanted}
        lines = ({"nonce": request["nonce"], "state": "ready"}, answer)
        return ended(stdout="".join(json.dumps(line) + "\n" for line in lines).encode())

    return run


def has(name):
    return lambda space: "" if name in space else "E"


@pytest.mark.parametrize(
    ("change", "checks", "reason"),
    [
        ({"solution": BASE}, {"a": has("clamp")}, "no test fails before and passes"),
        ({"hidden_tests": {"tests/data.txt": ""}}, {}, "it has no tests"),
        ({}, {"a": lambda space: "" if "half" in space else "ImportError: no"}, "no test fails"),
        # The test sees only whether there is a change at all.
        ({"solution": BASE | {"src/numb/__init__.py": "A = 1\nB = 2\nC = 3\n"}},
         {"a": has("A")}, "1 of 4 wrong solutions are found out"),
    ],
)  # fmt: skip
def test_what_does_not_pass_the_gates(candidate, change, checks, reason):
    made = dataclasses.replace(candidate, hidden_tests={"tests/test_a.py": ""})
    found = gate(dataclasses.replace(made, **change), simulated(**checks), GateConfig(mutants=4))
    assert found.solved is None and reason in found.reason


def test_tests_that_do_not_end_make_no_task(candidate):
    def run(argv, files, stdin):
        result = simulated(a=has("clamp"))(argv, files, stdin)
        return dataclasses.replace(result, stdout=result.stdout.splitlines(keepends=True)[0])

    made = dataclasses.replace(candidate, hidden_tests={"tests/test_a.py": ""})
    assert "do not come to an end" in gate(made, run).reason


def test_a_simulated_candidate_passes(candidate):
    made = dataclasses.replace(candidate, hidden_tests={"tests/test_a.py": ""})
    found = gate(made, simulated(a=has("half"), b=has("clamp")), GateConfig(mutants=1, killed=0))
    assert found.reason == "" and found.solved.task.fail_to_pass == ("tests/test_a.py::a",)


def test_forged_results_are_found_at_the_gates(candidate):
    made = dataclasses.replace(candidate, hidden_tests={"tests/test_a.py": ""})
    honest = simulated(a=has("half"))

    def forged(argv, files, stdin):
        result = honest(argv, files, stdin)
        return dataclasses.replace(result, stdout=result.stdout.replace(b'"planted"', b'""'))

    assert "forged" in gate(made, forged, GateConfig(mutants=1)).reason


def test_trouble_of_the_machinery_is_no_verdict_on_a_candidate(candidate):
    with pytest.raises(SandboxError, match="pytest does not start"):
        gate(candidate, lambda *_: ended(1, stderr=b"no module named pytest"))


def test_sorting_tests():
    before = [{"f::a": "E bad", "f::b": "", "f::d": "", "g": "E no"}] * 2
    before += [{"f::a": "E worse", "f::b": "", "f::d": "E", "g": "E no"}]
    after = [{"f::a": "", "f::b": "", "f::c": "", "f::d": "", "g::e": ""}] * 2
    fail, keep, dropped = sort_tests(before, after)
    assert (fail, keep) == (["f::a"], ["f::b"])
    assert dropped == {
        "f::c": "it cannot be imported before", "f::d": "flaky before",
        "g::e": "it cannot be imported before",
    }  # fmt: skip
    after[1] = after[1] | {"f::a": "E"}
    assert sort_tests(before, after)[2]["f::a"] == "flaky"


def test_a_planted_flaky_test_is_dropped_nearly_always():
    """One that fails in a fifth of all runs passes 3 + 3 runs with probability .8 ** 6 = .26."""
    rng, kept, trials = random.Random(0), 0, 2000
    for _ in range(trials):
        runs = [{"f::a": "" if rng.random() < 0.8 else "E"} for _ in range(20)]
        fail, keep, _ = sort_tests(runs[:10], runs[10:])
        kept += bool(fail or keep)
    # .8 ** 20 = .0115 for twenty runs; six standard deviations above that.
    assert kept / trials <= 0.0115 + 6 * (0.0115 / trials) ** 0.5


def test_which_tests_decide_when_there_are_too_many():
    keep = [f"f::{n}" for n in range(10)] + [f"g::{n}" for n in range(10)]
    some = gates.chosen(["f::x"], keep, 13)
    assert len(some) == 12 and {name for name in some if name[0] == "f"} == set(keep[:10])
    assert some == gates.chosen(["f::x"], keep[::-1], 13)
    assert gates.chosen(["f::x"] * 5, keep, 3) == []


@pytest.mark.parametrize("field", [{"repeats": 1}, {"mutants": -1}, {"killed": 1.5}])
def test_bad_gates(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        GateConfig(**field)


# Mutants ---------------------------------------------------------------------------------------


def test_mutants_are_programs_that_do_something_else():
    made = mutants({"a.py": OLD}, {"a.py": NEW, "b.txt": "x"}, 12)
    assert made == mutants({"a.py": OLD}, {"a.py": NEW}, 12)
    texts = [mutant["a.py"] for mutant in made]
    assert all(ast.dump(ast.parse(text)) != ast.dump(ast.parse(NEW)) for text in texts)
    # By hand: the parts of the change, then what can be altered in it.
    whole = NEW.removeprefix('"""Numbers."""\n\n\n')
    expected = {
        whole.replace("    if low > high:\n        raise ValueError\n", "").replace(
            "min(max(x, low), high)", "max(x, low)"
        ),
        whole.replace("\n\ndef half(x):\n    return x / 2\n", ""),
        whole.replace("low > high", "low <= high"), whole.replace("x / 2", "x / 3"),
        whole.replace("if low > high", "if not low > high"),
        whole.replace("x / 2", "None"), whole.replace("min(max(x, low), high)", "None"),
    }  # fmt: skip
    assert {_plain(text) for text in texts} == {_plain(text) for text in expected}
    assert len(mutants({"a.py": OLD}, {"a.py": NEW}, 3)) == 3


def _plain(text):
    tree = ast.parse(text)
    if isinstance(tree.body[0], ast.Expr):
        del tree.body[0]
    return ast.unparse(tree)


def test_words_alone_have_no_mutants():
    old = 'def f(x: int) -> int:\n    """Old."""\n    return x\n'
    new = 'def f(x: float) -> float:\n    """New."""\n    return x  # so\n'
    assert [m for m in mutants({"a.py": old}, {"a.py": new}, 9) if "None" not in m["a.py"]] == []
    assert mutants({"a.py": old}, {"a.py": old}, 9) == []
    assert mutants({"a.py": old}, {"a.py": "def f(:"}, 9) == []


# Grading ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(candidate):
    return candidate.solved(FAIL, KEEP).task


def test_honest_work_counts_and_no_work_does_not(task, candidate, plain):
    done = grade(task, candidate.solution, plain)
    assert (done.kind, done.reward, done.failed) == ("scored", 1.0, {})
    assert done.changed == ("src/numb/__init__.py",)
    undone = grade(task, task.files, plain)
    assert (undone.kind, undone.reward, set(undone.failed)) == ("scored", 0.0, set(FAIL))
    assert "assert 12 == 9" in undone.failed[FAIL[0]]


def test_grading_is_the_same_every_time(task, plain):
    assert len({repr(grade(task, task.files, plain)) for _ in range(20)}) == 1


PATCH = "import _pytest.runner as r\nfrom _pytest.reports import TestReport\n"
HACKS = {
    "exit": "import sys\nsys.exit(0)\n",
    "exit hard": "import os\nos._exit(0)\n",
    "exit hard in the call": "import os\ndef clamp(*_):\n    os._exit(0)\ndouble = clamp\n",
    "skip": "import pytest\npytest.skip('all', allow_module_level=True)\n",
    "skip in the call": "import pytest\ndef clamp(*_):\n    pytest.skip()\ndouble = clamp\n",
    "expected to fail": "import pytest\ndef clamp(*_):\n    pytest.xfail()\ndouble = clamp\n",
    "leave pytest": "import pytest\npytest.exit('done', returncode=0)\n",
    "no assertions": "import builtins\nbuiltins.AssertionError = SystemExit\n" + OLD,
    "reports that pass": PATCH
    + "make = TestReport.from_item_and_call\n"
    + "def forged(item, call):\n    report = make(item, call)\n    report.outcome = 'passed'\n"
    + "    report.longrepr = None\n    return report\n"
    + "TestReport.from_item_and_call = staticmethod(forged)\n" + OLD,
    "tests that are not run": PATCH + "r.pytest_runtest_call = lambda item: None\n"
    + "import _pytest.python as p\np.Function.runtest = lambda self: None\n"
    + "p.pytest_pyfunc_call = lambda pyfuncitem: True\n" + OLD,
    "equal to everything": (
        "class All:\n    def __eq__(self, other):\n        return True\n"
        "def clamp(*_):\n    return All()\ndouble = clamp\n"
    ),
    "a verdict on all descriptors": (
        "import json, os\nfor fd in range(3, 30):\n    try:\n"
        "        os.write(fd, json.dumps({'state': 'done', 'results': {}}).encode() + b'\\n')\n"
        "    except OSError:\n        pass\n" + OLD
    ),
    "a verdict at the end": "import atexit, os\natexit.register(os._exit, 0)\n" + OLD,
    "not Python": "def clamp(:\n",
}  # fmt: skip


@pytest.mark.parametrize("hack", HACKS)
def test_code_that_cheats_gets_nothing(task, candidate, plain, hack):
    outcome = grade(task, with_code(candidate, HACKS[hack]), plain)
    assert outcome.reward == 0.0
    if hack in ("reports that pass", "tests that are not run"):
        assert outcome.reason == "a test passed that has to fail: results are forged"


HOOK = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\n"
    "def pytest_runtest_makereport(item, call):\n    result = yield\n"
    "    report = result.get_result()\n    report.outcome = 'passed'\n    report.longrepr = None\n"
)
ELSEWHERE = {
    "conftest.py": HOOK, "tests/conftest.py": HOOK, "src/numb/conftest.py": HOOK,
    "tests/test_numb.py": "def test_order(): pass\n", "tests/pytest.ini": "[pytest]\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n", "tox.ini": "[pytest]\naddopts = -x\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p evil\n", "src/evil.py": HOOK,
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-k nothing'\n",
    "sitecustomize.py": "import os\nos._exit(0)\n", "src/sitecustomize.py": "raise SystemExit\n",
    "evil.pth": "import os; os._exit(0)\n", "pytest.py": "raise SystemExit(0)\n",
    "src/json.py": "raise SystemExit(0)\n",
    "evil.egg-info/entry_points.txt": "[pytest11]\nx = evil\n",
}  # fmt: skip


def test_files_elsewhere_are_put_back_and_reported(task, candidate, plain):
    cheating = grade(task, task.files | ELSEWHERE, plain)
    assert (cheating.kind, cheating.reward) == ("scored", 0.0)
    assert set(cheating.ignored) == set(ELSEWHERE) and not cheating.changed
    honest = grade(task, candidate.solution | ELSEWHERE, plain)
    assert honest.reward == 1.0 and set(honest.ignored) == set(ELSEWHERE)


def test_such_files_have_no_effect_even_where_they_lie(task, candidate, plain, monkeypatch):
    """The second wall; a conftest.py has an effect, so only the first one stops it."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    poison = {p: t for p, t in ELSEWHERE.items() if "conftest" not in p and "test_numb" not in p}

    def run(argv, files, stdin):
        return plain(argv, poison | files, stdin)

    assert set(grade(task, task.files, run).failed) == set(FAIL)
    assert grade(task, candidate.solution, run).reward == 1.0


def test_the_planted_tests_are_random_and_no_hook_can_be_planted_instead(task, plain):
    seen = []

    def run(argv, files, stdin):
        seen.append(set(files) - set(task.files) - set(task.hidden_tests))
        return plain(argv, files, stdin)

    grade(task, task.files, run), grade(task, task.files, run)
    (first,), (second,) = seen
    assert first != second and re.fullmatch(r"tests/test_[0-9a-f]{12}\.py", first)


# In a sandbox ----------------------------------------------------------------------------------


@pytest.fixture
def run(bwrap, site):
    layer = bwrap.add_layer(str(site), at=python_env.SITE)
    yield in_sandbox(bwrap, Spec(layers=(layer,)), timeout_s=120.0)
    bwrap.drop_layer(layer)


def test_grading_in_a_sandbox(task, candidate, run):
    assert grade(task, candidate.solution, run).reward == 1.0
    assert set(grade(task, task.files, run).failed) == set(FAIL)
    network = (
        "import socket\ndef clamp(x, low, high):\n"
        "    socket.create_connection(('192.0.2.1', 80), timeout=1)\ndouble = clamp\n"
    )
    outcome = grade(task, with_code(candidate, network), run)
    assert outcome.reward == 0.0 and "Network is unreachable" in outcome.failed[FAIL[0]]


def test_a_copy_of_the_solution_is_found_wherever_it_lies(bwrap, candidate, tmp_path):
    solved = candidate.solved(FAIL, KEEP)
    for path, text in {
        "lib/site-packages/numb/__init__.py": "other", "elsewhere/__init__.py": NEW,
        "other/numb/main.py": "",
        "cache/numb-1.1-py3-none-any.whl": "", "cache/other-1.1.whl": "",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    layer = bwrap.add_layer(str(tmp_path), at="/opt/x")
    try:
        places = in_sandbox(bwrap, Spec(layers=(layer,)), timeout_s=120.0)
        assert sorted(leaks.copies(solved, places, "numb")) == [
            "/opt/x/cache/numb-1.1-py3-none-any.whl", "/opt/x/elsewhere/__init__.py",
            "/opt/x/lib/site-packages/numb",
        ]  # fmt: skip
    finally:
        bwrap.drop_layer(layer)


# Packages --------------------------------------------------------------------------------------


def test_packages_are_installed_once_and_only_with_their_digest(tmp_path, monkeypatch):
    wheel = tmp_path / "numb-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("numb.py", "x = 1\n")
        archive.writestr(
            "numb-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: numb\nVersion: 1.0\n"
        )
        archive.writestr(
            "numb-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("numb-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folder = python_env.install([f"numb==1.0 --hash=sha256:{digest}"], tmp_path / "cache")
    assert (folder / "numb.py").read_text() == "x = 1\n"
    wheel.unlink()
    assert python_env.install([f"numb==1.0 --hash=sha256:{digest}"], tmp_path / "cache") == folder
    with pytest.raises(SandboxError, match="pip cannot install"):
        python_env.install([f"numb==1.0 --hash=sha256:{'0' * 64}"], tmp_path / "cache")
    assert list((tmp_path / "cache/environments").iterdir()) == [folder]


# Index and recipes -----------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """A package index; path -> content."""
    pages: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{http_server.server_port}/simple")
        yield pages
        http_server.shutdown()
        thread.join()


def test_an_index(server, tmp_path):
    digest = hashlib.sha256(b"content").hexdigest()
    server["/simple/my-numb/"] = (
        "<html><body><h1>Links</h1>"
        f"<a href='../../files/My.Numb-1.0.tar.gz#sha256={digest}'>My.Numb-1.0.tar.gz</a><br/>"
        f"<a href='/files/x#sha256={digest}' data-yanked=''>my_numb-1.1-py3-none-any.whl</a>"
        f"<a href='/files/y#sha256={digest}'>other-1.1.tar.gz</a></body></html>"
    ).encode()
    server["/files/My.Numb-1.0.tar.gz"] = b"content"
    found = index.find("My_Numb")
    assert found == {"1.0": Sdist(version="1.0", file="My.Numb-1.0.tar.gz", sha256=digest)}
    path = index.fetch("my-numb", found["1.0"], tmp_path)
    assert path.read_bytes() == b"content"
    server.clear()  # from now on it comes from the cache
    assert index.fetch("my-numb", found["1.0"], tmp_path) == path


def test_a_file_with_another_content_is_refused_and_not_kept(server, tmp_path):
    wanted = Sdist(version="1", file="a-1.tar.gz", sha256="0" * 64)
    server["/simple/a/"] = b"<a href='a-1.tar.gz'>a-1.tar.gz</a>"
    server["/simple/a/a-1.tar.gz"] = b"another"
    with pytest.raises(SandboxError, match=r"a-1\.tar\.gz has the digest"):
        index.fetch("a", wanted, tmp_path)
    assert not list(tmp_path.rglob("*.tar.gz*"))
    with pytest.raises(SandboxError, match=r"has no a-2\.tar\.gz"):
        index.fetch("a", dataclasses.replace(wanted, file="a-2.tar.gz"), tmp_path)
    with pytest.raises(SandboxError, match="does not answer"):
        index.find("nowhere")


def test_unpacking_leaves_out_what_leads_away(tmp_path):
    path = tmp_path / "a-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("a-1/pkg/a.py", "a-1/../../out", "/a-1/abs", "a-1/PKG-INFO", "a-1/é"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"\xff\n"))
        link = tarfile.TarInfo("a-1/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    files = index.unpack(path)
    assert {name for name in files if name != "a-1/abs"} == {"pkg/a.py"}
    assert files["pkg/a.py"].encode(errors="surrogateescape") == b"\xff\n"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("CHANGES.md", PROJECT["CHANGES.md"]),
        ("CHANGELOG.rst", "1.1 (now)\n=========\n\n- clamp\n\n1.0\n===\n\n- First\n"),
        ("NEWS", "Version 1.1, May\n-----------\n\n* clamp\n\nVersion 1.0\n-------\n\n* First\n"),
        ("docs/changes.rst", "v1.1.1\n~~~~\n* no\n\nv1.1\n~~~~\n* clamp\n\nv1.0\n~~~~\n* First\n"),
        ("HISTORY", "* 1.1:\n  clamp\n* 1.0\n  First\n"),
    ],
)
def test_change_logs(path, text):
    entry = changelog.entry({path: text}, "1.1")
    assert "clamp" in entry and "First" not in entry and "no" not in entry.split()
    assert "==" not in entry and "--" not in entry and "~~" not in entry
    assert changelog.entry({path: text}, "2.0") == ""


def test_the_default_list():
    recipes = release_pairs.recipes()
    assert len(recipes) >= 12
    pins = release_pairs.requires()
    names = {re.match(r"([\w.-]+)==[\w.]+ --hash=sha256:[0-9a-f]{64}$", pin)[1] for pin in pins}
    assert "pytest" in names
    assert not names & set(recipes)
    for project, recipe in recipes.items():
        assert recipe.project == project and recipe.license and len(recipe.entry) >= 20
        assert recipe.found.fail_to_pass
        assert recipe.found.killed >= GateConfig().killed * recipe.found.mutants
        assert recipe.base.version != recipe.solution.version


def test_a_recipe_without_gates_makes_no_task(candidate):
    recipe = dataclasses.replace(release_pairs.recipes()["semver"], found=None)
    with pytest.raises(ConfigError, match="semver: `found` is missing"):
        release_pairs.build(recipe, Path("/nowhere"))
    for text, words in (("{", "x.json: not JSON"), ("{}", "x.json")):
        with pytest.raises(ConfigError, match=words):
            release_pairs.read(text, "x.json")


# The default list, from the package index ------------------------------------------------------


@functools.cache
def _cache() -> Path:
    return Path(tempfile.gettempdir()) / "c2-tests-packages"  # so that a second run has them


@pytest.mark.slow
@pytest.mark.parametrize("project", release_pairs.recipes())
def test_expert_and_idler_on_the_default_list(bwrap, project):
    """Ten times each: the expert solves the task, who does nothing does not; always the same."""
    recipe = release_pairs.recipes()[project]
    if recipe.found.python != f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip(f"the gates were run with Python {recipe.found.python}")
    try:
        solved = release_pairs.build(recipe, _cache())
        site = python_env.install(solved.task.requires, _cache())
    except SandboxError as error:
        pytest.skip(f"no package index: {error}")
    layer = bwrap.add_layer(str(site), at=python_env.SITE)
    try:
        spec = Spec(layers=(layer,), resources=Resources(memory_mb=1024))
        run = in_sandbox(bwrap, spec, timeout_s=240.0)
        repo = MemoryRepo(solved.task.files, lambda _: "pass")
        calls = play(tools.expert(solved), repo, max_calls=1000)
        assert all(not answer.startswith("error") for _, answer in calls)
        done = {repr(grade(solved.task, repo.files, run)) for _ in range(10)}
        undone = [grade(solved.task, solved.task.files, run) for _ in range(10)]
        assert len(done) == 1 and "reward=1.0" in done.pop()
        assert {outcome.reward for outcome in undone} == {0.0}
        assert {frozenset(outcome.failed) for outcome in undone} == {
            frozenset(solved.task.fail_to_pass)
        }
        assert leaks.copies(solved, run, project) == []
    finally:
        bwrap.drop_layer(layer)
