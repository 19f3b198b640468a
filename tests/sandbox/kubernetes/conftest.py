"""A fake cluster that holds what `launch.sandboxes` prints."""

import copy
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from c2.sandbox.protocol import Resources
from launch import sandboxes

_EXTRA = ("aiohttp", "kubernetes")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, _EXTRA)) else ["test_*.py"]

LIMITS = Resources(memory_mb=256, disk_mb=16, pids=64, cpus=0.5)
COMMAND = (
    "launch/sandboxes.py", "--image=registry.io/python:3.12@sha256:0", "--runtime_class=gvisor",
    "--memory_mb=256", "--disk_mb=16", "--pids=64", "--cpus=0.5", "--node_selector=pool=c2",
)  # fmt: skip


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module `fake_cluster`, which needs what the tests of this folder need."""
    file = Path(__file__).with_name("fake_cluster.py")
    spec = importlib.util.spec_from_file_location("fake_cluster", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command() -> list[str]:
    return list(COMMAND)


@pytest.fixture
def limits() -> Resources:
    """What the command asks for."""
    return LIMITS


@pytest.fixture(scope="session")
def printed() -> list[dict]:
    """What the command prints."""
    return list(yaml.safe_load_all(sandboxes.render(COMMAND)))


@pytest.fixture
def manifests(printed) -> dict[str, dict]:
    """The same by kind, to be changed."""
    return {body["kind"]: body for body in copy.deepcopy(printed)}


@pytest.fixture
def cluster(fake, manifests, tmp_path, monkeypatch):
    """A running one, which a kubeconfig file leads to."""
    running = fake.FakeCluster(list(manifests.values()), tmp_path)
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": running.url}}],
        "users": [{"name": "u", "user": {"token": running.token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config")
    )
    yield running
    running.close()
