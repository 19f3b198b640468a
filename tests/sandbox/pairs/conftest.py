"""Two releases of a project that is made here, and a pytest without walls to run its tests."""

import dataclasses
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from c2.sandbox.protocol import ExecResult
from c2.sandbox.tasks import python_env, release_pairs
from c2.sandbox.tasks.release_pairs import changelog
from c2.sandbox.tasks.release_pairs.index import Sdist

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


@dataclass(frozen=True)
class Numb:
    """The project.

    Attributes:
      old: its code before.
      new: and after.
      base: all files of the older release.
      project: those of the newer one but its code.
      fail: tests that have to change to passing.
      keep: tests that have to stay so.
    """

    old: str
    new: str
    base: dict[str, str]
    project: dict[str, str]
    fail: list[str]
    keep: list[str]

    def with_code(self, code: str) -> dict[str, str]:
        """The files of the older release with another code."""
        return self.base | {"src/numb/__init__.py": code}


@pytest.fixture(scope="session")
def numb():
    """The project."""
    return Numb(OLD, NEW, BASE, PROJECT, FAIL, KEEP)


@pytest.fixture(scope="session")
def candidate(tmp_path_factory):
    """The task between its two releases, before its gates."""
    cache = tmp_path_factory.mktemp("cache")
    recipe = release_pairs.Recipe(
        project="numb", license="MIT", base=_sdist(cache, "1.0", BASE),
        solution=_sdist(cache, "1.1", PROJECT | {"src/numb/__init__.py": NEW}),
        source=("src/numb/*",), tests=("tests/*",),
        entry=changelog.entry(PROJECT, "1.1"),
    )  # fmt: skip
    return dataclasses.replace(release_pairs.candidate(recipe, cache), requires=PINS)


@pytest.fixture(scope="session")
def task(candidate):
    """The task behind its gates."""
    return candidate.solved(FAIL, KEEP).task


def _sdist(folder: Path, version: str, files: dict[str, str]) -> Sdist:
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


@pytest.fixture(scope="session")
def ended():
    """Makes the result of a command."""

    def result(code=0, stdout=b"", stderr=b""):
        return ExecResult(code, None, stdout, stderr, False, None, False, None, 0.0, 1, False)

    return result


@pytest.fixture
def plain(site, ended, monkeypatch):
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
