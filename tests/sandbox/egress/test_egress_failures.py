"""Without a sound gate there is no network, and it is said why."""

import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from c2.config import ConfigError, to_dict
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.egress import namespace
from c2.sandbox.egress.keeper import Keeper
from c2.sandbox.egress.policy import Policy
from c2.sandbox.plain import Plain
from c2.sandbox.protocol import SandboxError, Spec, Unsupported
from c2.sandbox.zygote import Zygote

# A node whose gate knows all names.
GATE = "from c2.sandbox.egress import gate; gate.Policy.resolves = lambda *_: True; gate.main()"
NODE = f"""
from c2.sandbox import node
from c2.sandbox.egress import keeper
keeper.GATE = ("-c", {GATE!r})
node.main()
"""


@pytest.fixture
def unchecked(monkeypatch, walls):
    """Backends start without breaking out first, which is not the subject here."""
    monkeypatch.setattr("c2.sandbox.battery.check", lambda *_: None)


@pytest.fixture
def other(settings, tmp_path, gated):
    """`gated` with another backend, which a test may break."""

    def with_backend(backend: Bwrap):
        return dataclasses.replace(gated, backend=backend, log=tmp_path / "log", made=[])

    return with_backend


def test_default_backend_and_the_death_of_its_gate(settings, tmp_path, other, gate_of, caplog):
    with Bwrap(egress=dataclasses.replace(settings, log=str(tmp_path / "log"))) as backend:
        gated = other(backend)
        box = gated.box(gated.rule(), gated.plain_rule())
        assert gated.curl(box, "") == "ok"
        assert gated.sh(box, "curl -sS http://203.0.113.7:22/").startswith("curl: (7)")
        assert gated.denied(box, "packet")[0]["port"] == 22

        os.kill(int(gate_of(backend).name), signal.SIGKILL)
        for address in ("198.18.0.1", "127.0.0.1", "203.0.113.7"):
            connect = f"origin.test:{gated.https.port}:{address}"
            assert "curl: (7)" in gated.curl(box, f"--connect-to :: --resolve {connect}")
        assert "Could not resolve host" in gated.curl(box, "")
        assert len(gated.https.seen) == 1
        with pytest.raises(SandboxError, match=r"the egress gate has ended \(signal 9\)"):
            backend.set_network_policy(box, Policy())
        assert backend.exec(backend.create(Spec()), ["true"]).ok
        assert caplog.messages == [
            "the egress gate has ended (signal 9); sandboxes reach nothing any more"
        ]

        other_box = gated.box(gated.rule())  # gets another gate
        assert gated.curl(other_box, "") == "ok" and len(gated.https.seen) == 2
        assert "another egress gate has been started" in caplog.messages[1]
        for options in ("", "-k"):
            assert "Could not resolve host" in gated.curl(box, options)
        with pytest.raises(SandboxError, match="its egress gate has ended; it has no network"):
            backend.set_network_policy(box, Policy())
        backend.close(box)
        assert gated.curl(other_box, "") == "ok"


def test_a_log_that_takes_nothing_more_ends_the_network(
    unchecked, settings, tmp_path, other, gate_of, caplog
):
    log = tmp_path / "log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    with Zygote(egress=dataclasses.replace(settings, log=str(log))) as backend:
        gated = other(backend)
        box = gated.box(gated.rule())
        assert gated.curl(box, "") == "ok"
        os.close(reader)
        assert gated.curl(box, "") != "ok" and len(gated.https.seen) == 1
        with pytest.raises(SandboxError, match=r"the gate cannot start: .*No such device"):
            gated.box(gated.rule())
        assert gated.curl(box, "") != "ok" and len(gated.https.seen) == 1
    assert "the log cannot be written: Broken pipe" in caplog.text


@pytest.mark.parametrize(
    "change, message",
    [
        ({"log": "/dev/full"}, "the log cannot be written: No space left on device"),
        ({"log": "/proc/1/x"}, "/proc/1/x"),
        ({"secrets": {"a": "/nowhere"}}, "No such file or directory: '/nowhere'"),
        ({"secrets": {"a": "/dev/null"}}, "egress.secrets.a: /dev/null must hold one line"),
        ({"authorities": "/dev/null"}, "egress.authorities: /dev/null"),
    ],
)  # fmt: skip
def test_a_gate_that_cannot_start(settings, tmp_path, change, message):
    config = to_dict(dataclasses.replace(settings, **change))
    with pytest.raises(SandboxError, match=f"the gate cannot start: .*{message}"):
        Keeper(config, "node", tmp_path, root=False)


def test_a_gate_with_a_hole_is_found(walls, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("c2.sandbox.bwrap.NODE", ("-c", NODE))
    with pytest.raises(SandboxError, match="network: a name was resolved"):
        Zygote(egress=dataclasses.replace(settings, log=str(tmp_path / "log")))


def test_without_the_extra_there_is_no_network(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "h11" else name)
    with pytest.raises(ConfigError, match=r"egress: the package 'h11' is missing.*c2\[egress\]"):
        Bwrap(egress=object())


def test_without_a_gate_there_is_no_network(bwrap):
    message = "has no 'network_policy'; it has: "
    with pytest.raises(Unsupported, match=message):
        bwrap.create(Spec(network=Policy()))
    with pytest.raises(Unsupported, match=message):
        bwrap.set_network_policy(bwrap.create(Spec()), Policy())
    with pytest.warns(UserWarning), Plain() as plain, pytest.raises(Unsupported, match=message):
        plain.create(Spec(network=Policy()))


def test_the_gate_dies_with_its_node(unchecked, settings, tmp_path, gate_of):
    backend = Zygote(egress=dataclasses.replace(settings, log=str(tmp_path / "log")))
    gate = gate_of(backend)
    os.kill(backend.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while gate.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not gate.exists()
    backend.shutdown()


def test_nothing_is_left_of_sandboxes_with_network(gated, gate_of):
    def held() -> list[int]:
        folders = (gate_of(gated.backend) / "fd", Path(f"/proc/{gated.backend.pid}/fd"))
        return [len(list(folder.iterdir())) for folder in folders]

    gated.backend.close(gated.box(gated.rule()))
    gated.lines(gated.made[-1], "close")
    before = held()
    for _ in range(20):
        box = gated.box(gated.rule(), gated.plain_rule())
        gated.backend.set_network_policy(box, Policy(rules=(gated.plain_rule(),)))
        gated.backend.close(box)
        gated.lines(box, "close")
    assert held() == before


def test_a_port_that_a_program_inside_has_taken(gated):
    box = gated.box(gated.plain_rule())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = f"import socket, time; s = socket.create_server(('', {port})); print(); time.sleep(60)"
    gated.backend.start(box, ["sh", "-c", f'python3 -uc "{serve}" > /tmp/out'])
    gated.sh(box, "until [ -s /tmp/out ]; do sleep .01; done")
    with pytest.raises(SandboxError, match=f"cannot listen at port {port}: Address already in use"):
        gated.backend.set_network_policy(box, Policy(rules=(gated.rule(port=port),)))
    assert gated.sh(box, f"curl -sS http://origin.test:{gated.http.port}/") == "ok"


# A process that sets up its network when it is told to.
SLOW = """
import fcntl, socket, struct, sys
from c2.sandbox import linux
linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNET)
print(flush=True)
if sys.stdin.readline():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh22x", b"lo", 1))
    sys.stdin.readline()
"""


@pytest.mark.parametrize("line", ["up\n", ""])
def test_nobody_meddles_with_a_network_that_is_being_set_up(walls, line):
    with (
        subprocess.Popen(
            [sys.executable, "-c", SLOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        ThreadPoolExecutor(1) as threads,
    ):
        process.stdout.readline()
        fd = os.pidfd_open(process.pid)
        opened = threads.submit(namespace.open_sockets, fd, [8080])
        with pytest.raises(TimeoutError):
            opened.result(0.2)
        process.stdin.write(line)
        process.stdin.flush() if line else process.stdin.close()
        if line:
            sockets = opened.result(10)
            assert [sock.getsockname()[1] for sock in sockets[:2] + sockets[3:]] == [53, 53, 8080]
            for sock in sockets:
                sock.close()
        else:
            with pytest.raises(SandboxError, match="the sandbox has not set up its network"):
                opened.result(10)
        os.close(fd)
