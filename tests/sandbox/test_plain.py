import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import c2.sandbox
from c2.sandbox.plain import Plain
from c2.sandbox.protocol import SandboxLost, Spec, Unsupported

ROOM = Path(c2.sandbox.__file__).parent


@pytest.fixture
def plain():
    with pytest.warns(UserWarning), Plain() as backend:
        yield backend


def test_same_calls_without_walls(plain):
    handle = plain.create(Spec(env={"A": "b"}))
    plain.write(handle, "/repo/x", b"1")
    result = plain.exec(handle, ["sh", "-c", "cat x; echo $A"])
    assert result.stdout == b"1b\n" and result.ok
    assert list(plain.list_dir(handle, "/repo")) == ["x"]
    assert plain.exec(handle, ["sleep", "60"], timeout_s=0.1).timed_out
    assert plain.status(handle).alive


def test_close_ends_what_was_left(plain):
    handle = plain.create(Spec())
    plain.exec(handle, ["sh", "-c", "setsid sleep 98.7 & echo"])
    folder = Path(plain.exec(handle, ["pwd"]).stdout.decode().strip())
    assert folder.is_dir() and len(plain.jobs(handle)) == 1
    plain.close(handle)
    assert not folder.exists()
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"98.7" in line for line in lines)
    with pytest.raises(SandboxLost):
        plain.exec(handle, ["true"])


def test_layers_are_refused(plain):
    with pytest.raises(Unsupported, match="no 'layers'"):
        plain.create(Spec(layers=("layer-1",)))


@pytest.mark.parametrize(
    "file", [*(ROOM / "toolserver").glob("*.py"), ROOM / "probes.py"], ids=lambda file: file.name
)
def test_what_runs_inside_is_python_3_8_of_the_standard_library(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 8))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module in sys.stdlib_module_names
        if isinstance(node, ast.Import):
            assert {name.name for name in node.names} <= sys.stdlib_module_names


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.13"])
def test_server_runs_in_other_pythons(plain, monkeypatch, version):
    python = shutil.which(f"python{version}")
    if not python or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"there is no python{version}")
    monkeypatch.setattr("c2.sandbox.plain.sys.executable", python)
    handle = plain.create(Spec())
    assert plain.exec(handle, ["sh", "-c", "echo hi; exit 3"]).stdout == b"hi\n"
    plain.write(handle, "/repo/a", b"\xff")
    assert plain.read(handle, "/repo/a") == b"\xff"


def test_room_imports_no_jax_and_little_else():
    code = "import c2.sandbox.bwrap, sys; print('jax' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOM.parents[1]
    )
    assert run.stdout == "False False\n", run.stderr
