"""Sandboxes of a cluster, against a fake one that checks objects as a real one would."""

import datetime
import os
import time
from pathlib import Path

import pytest
import yaml

from c2.config import ConfigError
from c2.sandbox import toolserver
from c2.sandbox.egress.policy import Policy
from c2.sandbox.kubernetes import Kubernetes, KubernetesConfig, template
from c2.sandbox.protocol import (
    CAPABILITIES,
    SandboxError,
    SandboxLost,
    Spec,
    Unsupported,
)
from launch import sandboxes

LAUNCH = Path(sandboxes.__file__).parent
SERVER = Path(toolserver.__file__).parent


@pytest.fixture
def backend(cluster):
    with Kubernetes(KubernetesConfig(owner="run-1")) as backend:
        yield backend


def shell(backend, handle, script, **options):
    return backend.exec(handle, ["sh", "-c", script], **options)


def test_manifests_are_what_the_cluster_knows(fake, manifests, limits):
    found = manifests
    for body in found.values():
        fake.check(body)
    for body in yaml.safe_load_all((LAUNCH / "templates/runtime_classes.yaml").read_text()):
        fake.check(body)
    spec = found["SandboxTemplate"]["spec"]
    template.check(found["SandboxTemplate"], ["gvisor"])
    assert template.resources(found["SandboxTemplate"]) == limits
    assert found["NetworkPolicy"]["spec"]["podSelector"] == {}
    assert spec["podTemplate"]["spec"]["nodeSelector"] == {"pool": "c2"}
    # The server comes along as it is, under a name that changes with it.
    files = found["ConfigMap"]["data"]
    assert files == {file.name: file.read_text() for file in SERVER.glob("*.py")}
    assert sum(map(len, files.values())) < 1 << 19  # a ConfigMap may have 1 MiB
    volume = spec["podTemplate"]["spec"]["volumes"][-1]
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--image=", "--image: "),
        ("--image=a b", "--image: "),
        ("--name=A", "--name: "),
        ("--memory_mb=1", "memory_mb"),
        ("--node_selector=x", "--node_selector: "),
        ("--replicas=-1", "replicas"),
        ("stray", "only flags"),
    ],
)
def test_bad_flags(command, capsys, flag, message):
    assert sandboxes.run_main([*command, flag]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ")
    with pytest.raises(ConfigError, match="owner: 'Run'"):
        KubernetesConfig(owner="Run")


def test_calls(backend, cluster, limits):
    assert backend.resources == limits
    handle = backend.create(Spec(resources=limits, env={"A": "b"}, labels={"task": "7"}))
    claim = cluster.claims()[handle.id]
    assert claim["metadata"]["labels"]["c2/owner"] == "run-1"
    assert claim["metadata"]["annotations"] == {"c2/task": "7"}
    result = shell(backend, handle, "echo $A; pwd; id -u; ulimit -p; echo bad >&2; exit 3")
    assert (result.stdout, result.stderr, result.code) == (b"b\n/repo\n1000\n64\n", b"bad\n", 3)
    data = os.urandom(1_300_000)  # many messages
    backend.write(handle, "/repo/d/file", data)
    assert backend.read(handle, "/repo/d/file") == data
    assert shell(backend, handle, "cat >x; cmp x d/file", stdin=data[:400_000]).code == 1
    assert b"No space left" in shell(backend, handle, "head -c 32M /dev/zero >big").stderr
    assert shell(backend, handle, "echo > /etc/x").code != 0
    assert shell(backend, handle, "setsid sleep 60 & sleep 60", timeout_s=0.3).timed_out
    number = backend.start(handle, ["sleep", "60"])
    assert backend.jobs(handle) == [number] and backend.status(handle).alive
    for name, calls in CAPABILITIES.items():
        assert isinstance(backend, calls) == (name in backend.capabilities)
    backend.close(handle)
    backend.close(handle)
    assert handle.id not in cluster.claims()
    assert backend.status(handle).reason == "closed"
    with pytest.raises(SandboxLost):
        backend.exec(handle, ["true"])


def test_what_it_cannot_do_is_refused(backend, cluster):
    before = list(cluster.claims())
    for spec in (Spec(layers=("x",)), Spec(image="x"), Spec(network=Policy())):
        with pytest.raises(Unsupported, match="backend 'kubernetes' has no"):
            backend.create(spec)
    with pytest.raises(SandboxError, match=r"the template gives .*memory_mb=256"):
        backend.create(Spec())
    assert list(cluster.claims()) == before


def test_leases_are_the_clusters(backend, cluster, limits):
    def left(handle) -> float:
        life = cluster.claims()[handle.id]["spec"]["lifecycle"]
        assert life["shutdownPolicy"] == "Delete"
        end = datetime.datetime.fromisoformat(life["shutdownTime"])
        return (end - datetime.datetime.now(datetime.UTC)).total_seconds()

    kept = backend.create(Spec(resources=limits, ttl_s=100, deadline_s=1000))
    short = backend.create(Spec(resources=limits, ttl_s=1, deadline_s=1000))
    late = backend.create(Spec(resources=limits, ttl_s=1000, deadline_s=1))
    assert 90 < left(kept) <= 100 and left(late) <= 1
    asked = len(cluster.requests)
    backend.renew(kept)  # too early for traffic
    assert len(cluster.requests) == asked
    backend._sandboxes[kept.id].renewed -= 50
    cluster.claims()[kept.id]["spec"]["lifecycle"]["shutdownTime"] = "2999-01-01T00:00:00Z"
    backend.renew(kept)
    assert 90 < left(kept) <= 100
    for handle, reason in ((short, "lease"), (late, "deadline")):
        with pytest.raises(SandboxLost) as lost:
            backend.exec(handle, ["sleep", "60"])
        assert lost.value.reason == backend.status(handle).reason == reason
        assert handle.id not in cluster.claims()
    assert backend.exec(kept, ["true"]).ok


@pytest.mark.parametrize("how, reason", [("kill_pod", "backend"), ("finish", "exited")])
def test_lost_with_its_pod(backend, cluster, how, reason, limits):
    handle = backend.create(Spec(resources=limits))
    backend.exec(handle, ["true"])
    getattr(cluster, how)(handle.id)
    with pytest.raises(SandboxLost) as lost:
        backend.exec(handle, ["sleep", "60"])
    assert lost.value.reason == backend.status(handle).reason == reason
    assert handle.id not in cluster.claims()  # nothing runs on without its connection


def test_sandboxes_of_a_dead_owner_are_deleted(cluster, limits):
    config = KubernetesConfig(owner="run-1")
    with Kubernetes(KubernetesConfig(owner="run-2")) as other, Kubernetes(config) as dead:
        kept = other.create(Spec(resources=limits))
        left = dead.create(Spec(resources=limits))
        with Kubernetes(config) as again:
            assert list(cluster.claims()) == [kept.id]
            with pytest.raises(SandboxLost):
                dead.exec(left, ["true"])
            mine = again.create(Spec(resources=limits))
            assert set(cluster.claims()) == {kept.id, mine.id}
        assert list(cluster.claims()) == [kept.id]
        assert other.exec(kept, ["true"]).ok
    assert cluster.claims() == {}


def test_create_that_fails_leaves_no_claim(backend, cluster, monkeypatch, limits):
    before = list(cluster.claims())
    cluster.ready = False
    monkeypatch.setattr(backend._cluster, "_config", KubernetesConfig(owner="run-1", start_s=1))
    with pytest.raises(SandboxError, match="is not ready after 1 s"):
        backend.create(Spec(resources=limits))
    cluster.ready = True
    (files,) = cluster.files.values()
    files["server.py"] = "raise RuntimeError('broken server')"
    with pytest.raises(SandboxError, match=r"no tool server: .*broken server"):
        backend.create(Spec(resources=limits))
    assert list(cluster.claims()) == before


def test_a_claim_that_was_made_already_is_adopted(backend, cluster):
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60)
    for _ in range(2):
        backend._cluster.claim("run-1-twice", ends, {})
    assert backend._cluster.wait("run-1-twice").startswith("pod-of-c2-warm-")


def test_no_way_to_the_cluster(cluster, monkeypatch):
    cluster.token = "another"
    with pytest.raises(SandboxError, match=r"the cluster refuses .*: 401 Unauthorized"):
        Kubernetes(KubernetesConfig(owner="run-1"))
    cluster.close()
    with pytest.raises(SandboxError, match="the cluster does not answer for sandboxwarmpools c2"):
        Kubernetes(KubernetesConfig(owner="run-1"))
    with pytest.raises(SandboxError, match="no cluster is configured"):
        Kubernetes(KubernetesConfig(owner="run-1", context="other"))


POD = ("podTemplate", "spec")
BOX = (*POD, "containers", 0)


@pytest.mark.parametrize(
    "path, value, message",
    [
        ((*POD, "runtimeClassName"), "runc", "runtimeClassName is none of gvisor"),
        ((*POD, "hostPID"), True, "hostPID is set"),
        ((*POD, "automountServiceAccountToken"), True, "automountServiceAccountToken is not false"),
        ((*POD, "restartPolicy"), "Always", "restartPolicy"),
        ((*POD, "volumes", 0), {"name": "v", "hostPath": {"path": "/"}}, "volume 'v'"),
        ((*POD, "securityContext", "seccompProfile"), {"type": "Unconfined"}, "no seccompProfile"),
        ((*POD, "securityContext", "runAsNonRoot"), False, "runAsNonRoot"),
        ((*BOX, "securityContext", "capabilities"), {"drop": ["ALL"], "add": ["X"]}, "keeps"),
        ((*BOX, "securityContext", "allowPrivilegeEscalation"), True, "allowPrivilegeEscalation"),
        ((*BOX, "securityContext", "privileged"), True, "is privileged"),
        ((*BOX, "resources", "limits"), {"cpu": "1"}, "no limit of memory"),
        ((*BOX, "name"), "other", "there is no container 'sandbox'"),
        (("networkPolicy", "egress"), [{}], "lets something through"),
        (("networkPolicy",), None, "there is no networkPolicy"),
        (("networkPolicyManagement",), "Unmanaged", "there is no networkPolicy"),
        (("service",), True, "service is set"),
    ],
)
def test_template_without_a_wall_is_refused(manifests, path, value, message):
    found = manifests["SandboxTemplate"]
    place = found["spec"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(SandboxError, match=message):
        template.check(found, KubernetesConfig(owner="x").runtime_classes)


def test_walls_are_tried(cluster):
    (found,) = cluster.objects["sandboxtemplates"].values()
    found["spec"]["podTemplate"]["spec"]["securityContext"]["runAsUser"] = 0
    with pytest.raises(SandboxError, match="walls are missing: user: "):
        Kubernetes(KubernetesConfig(owner="run-1"))
    assert cluster.claims() == {}


def test_network_is_tried(cluster, monkeypatch):
    monkeypatch.setattr("c2.sandbox.kubernetes.backend.REACH", "print('10.0.0.1')")
    with pytest.raises(SandboxError, match=r"sandboxes of the cluster reach 10\.0\.0\.1"):
        Kubernetes(KubernetesConfig(owner="run-1"))
    assert cluster.claims() == {}


def test_connection_is_kept_alive(backend, monkeypatch, limits):
    monkeypatch.setattr("c2.sandbox.kubernetes.tunnel.PING_S", 0.1)
    handle = backend.create(Spec(resources=limits))
    time.sleep(0.35)
    assert backend.exec(handle, ["echo", "hi"]).stdout == b"hi\n"
