"""The value of --services: what Ray needs is missed at once, before hours of other work."""

import socket
import sys

import pytest

from launch import services
from launch.main import run_main


def refused(tmp_path, capsys):
    """What a command line that wants Ray is told."""
    words = ["--config=experiments/kl_estimators.py", f"--workdir={tmp_path / 'run'}"]
    assert run_main(["launch/main.py", *words, "--services=ray"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "run").exists()
    return line


def test_ray_that_is_not_installed_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--services=ray needs `pip install -e .[ray]`" in refused(tmp_path, capsys)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://[::1]:1", "127.0.0.1:99999", "head"])
def test_a_cluster_that_does_not_answer_is_one_line(address, tmp_path, monkeypatch, capsys):
    pytest.importorskip("ray", reason="needs the extra `ray`")
    monkeypatch.setenv("RAY_ADDRESS", address)
    line = refused(tmp_path, capsys)
    assert line.startswith(f"error: RAY_ADDRESS: no cluster answers at {address!r}")
    assert "legal: HOST:PORT" in line


def test_nothing_is_started_before_a_study_asks_for_it(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        assert callable(services.launcher("ray", tmp_path))
    assert not ray.is_initialized()
