"""Pools whose nodes have gates."""

import dataclasses
import os
import signal
from types import SimpleNamespace

import pytest

from c2.config import ConfigError
from c2.sandbox.egress.config import GateConfig
from c2.sandbox.egress.policy import Policy
from c2.sandbox.pool import Limits, Pool, PoolConfig
from c2.sandbox.pool.log import read
from c2.sandbox.protocol import SandboxError, Spec, SupportsNetworkPolicy, Unsupported

LIMITS = Limits(reserve_mb=64, cpu_pressure=100, memory_pressure=100)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return tmp_path_factory.mktemp("pool") / "book"


@pytest.fixture(scope="module")
def pool(walls, settings, book):
    gate = dataclasses.replace(settings, log=str(book.with_name("egress")))
    config = PoolConfig(backend="zygote", limits=LIMITS, egress=gate, log=str(book))
    with Pool(config) as pool:
        yield pool


@pytest.fixture
def pooled(gated, pool, book):
    """`gated` with the pool; a test closes its own sandboxes."""
    return dataclasses.replace(gated, backend=pool, log=book.with_name("egress"), made=[])


def test_policies_of_a_pool(pooled, pool, book):
    assert isinstance(pool, SupportsNetworkPolicy) and "network_policy" in pool.capabilities
    policy = Policy(rules=(pooled.rule(),))
    box = pool.create(Spec(network=policy, labels={"run": "7"}), owner="a")
    inner = pool._engine.at(box).inner
    assert pooled.curl(box, "") == "ok"
    (opened,) = pooled.lines(inner, "open")
    assert opened["labels"] == {"run": "7", "pool": box.id}
    pool.set_network_policy(box, Policy(rules=(pooled.rule(methods=("POST",)),)))
    assert pooled.curl(box, "") != "ok" and pooled.curl(box, "-d x") == "ok"
    (fork,) = pool.fork(box)
    assert pooled.curl(fork, "") != "ok" and pooled.curl(fork, "-d x") == "ok"
    pool.set_network_policy(box, "none")
    assert "Could not resolve host" in pooled.curl(box, "-d x")
    assert pooled.curl(fork, "-d x") == "ok"
    pool.close_owner("a")
    assert pooled.lines(inner, "close")


def test_ready_sandboxes_have_their_policy(pooled, pool):
    spec = Spec(network=Policy(rules=(pooled.rule(),)))
    pool.keep_ready(spec, 1)
    with pool._engine.turn:
        assert pool._engine.turn.wait_for(lambda: pool.ready(spec) == 1, 20)
    asked = pool.ledger.asked
    pool.keep_ready(spec, 0)
    box = pool.create(spec)
    assert int(box.id) <= asked and pooled.curl(box, "") == "ok"
    pool.close(box)


def test_a_pool_whose_gate_is_killed_gets_another_gate(pooled, pool, gate_of, caplog):
    spec = Spec(network=Policy(rules=(pooled.rule(),)))
    box = pool.create(spec)
    assert pooled.curl(box, "") == "ok"
    os.kill(int(gate_of(SimpleNamespace(pid=pool.node_pids()[0])).name), signal.SIGKILL)
    assert "Could not resolve host" in pooled.curl(box, "")
    assert "curl: (7)" in pooled.curl(box, "-k", host="203.0.113.7")
    with pytest.raises(SandboxError, match=r"the egress gate has ended \(signal 9\)"):
        pool.set_network_policy(box, Policy())
    other = pool.create(spec)
    assert pooled.curl(other, "") == "ok" and "Could not" in pooled.curl(box, "")
    assert [message.split(";")[0] for message in caplog.messages] == [
        "the egress gate has ended (signal 9)",
        "another egress gate has been started, for sandboxes to come",
    ]
    pool.close(box)
    pool.close(other)


def test_what_a_pool_cannot_do_is_refused(walls, pooled, pool, book):
    plain, failed = pool.create(Spec()), pool.ledger.ended["failed"]
    with pytest.raises(Unsupported, match="was made without network and cannot get one"):
        pool.set_network_policy(plain, Policy())
    with pytest.raises(ConfigError, match="the gate has no secret 'none'"):
        rule = pooled.rule(secrets={"Authorization": "{none}"})
        pool.create(Spec(network=Policy(rules=(rule,))))
    pool.close(plain)
    with pytest.raises(ConfigError, match="egress: backend 'gvisor' can have no gate"):
        PoolConfig(backend="gvisor", egress=GateConfig(log="x"))
    message = "backend 'pool' has no 'network_policy'; it has: "
    with Pool(PoolConfig(backend="zygote", limits=LIMITS)) as other:
        with pytest.raises(Unsupported, match=message):
            other.create(Spec(network=Policy()))
        with pytest.raises(Unsupported, match=message):
            other.set_network_policy(other.create(Spec()), Policy())
        assert other.ledger.asked == 1
    assert read(book).ended["failed"] == failed + 1
