"""A pool of real nodes: what it lends, what becomes of it, and who is told."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from c2.config import ConfigError
from c2.sandbox import cgroups
from c2.sandbox.node import PREFIX
from c2.sandbox.pool import Limits, Pool, PoolConfig
from c2.sandbox.pool.log import read
from c2.sandbox.protocol import Resources, SandboxError, SandboxLost, Spec, Unsupported, require

SPEC = Spec(resources=Resources(memory_mb=64, disk_mb=16, pids=48))
# Tests run on busy machines, where a start must not wait for rest.
LIMITS = Limits(reserve_mb=64, cpu_pressure=100, memory_pressure=100, per_owner=12)


def config(**fields) -> PoolConfig:
    return PoolConfig(**{"backend": "zygote", "limits": LIMITS, "wait_s": 30.0} | fields)


@pytest.fixture(scope="module")
def pool(bwrap):
    with Pool(config(nodes=2)) as pool:
        yield pool


@pytest.fixture
def owner(pool, request):
    """An owner of the test's own, whose sandboxes end with the test."""
    name = request.node.name
    yield name
    pool.close_owner(name)


def until(true, seconds=20.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_it_is_a_backend(pool, owner, tmp_path):
    (tmp_path / "file").write_text("content")
    layer = pool.add_layer(str(tmp_path))
    spec = Spec(resources=SPEC.resources, layers=(layer,), env={"A": "b"})
    one, other = (pool.create(spec, owner=owner) for _ in range(2))
    pool.drop_layer(layer)  # stays as long as it is used
    # They are on two nodes, to the second of which the layer was copied.
    assert len({id(pool._engine.at(handle).member) for handle in (one, other)}) == 2
    for handle in (one, other):
        result = pool.exec(handle, ["sh", "-c", "cat file; echo $A; echo x > new"])
        assert result.stdout == b"contentb\n" and result.ok
        assert pool.read(handle, "/repo/new") == b"x\n"
        pool.write(handle, "/repo/w", b"data")
        assert set(pool.list_dir(handle, "/repo")) == {"file", "new", "w"}
        job = pool.start(handle, ["sleep", "60"])
        assert pool.jobs(handle) == [job]
        assert pool.status(handle).alive
    pool.close(one)
    pool.close(one)
    assert (pool.status(one).alive, pool.status(one).reason) == (False, "closed")
    for call in (lambda: pool.exec(one, ["true"]), lambda: pool.fork(one), lambda: pool.renew(one)):
        with pytest.raises(SandboxLost) as lost:
            call()
        assert lost.value.reason == "closed"
    assert pool.read(other, "/repo/file") == b"content"
    pool.close(other)
    with pytest.raises(SandboxError, match="there is no"):
        pool.create(spec, owner=owner)
    for capability in ("pause", "memory_snapshot"):  # the latter not even if its nodes have it
        with pytest.raises(Unsupported, match=f"backend 'pool' has no '{capability}'; it has: "):
            require(pool, capability)


def test_forks_stay_at_home_and_go_elsewhere_when_it_is_full(pool, owner):
    parent = pool.create(SPEC, owner=owner)
    pool.write(parent, "/repo/file", b"1")
    home = pool._engine.at(parent).member
    forks = pool.fork(parent, 2)
    assert all(pool._engine.at(fork).member is home for fork in forks)
    held = pool._engine.core._held[home.name]
    pool._engine.core._held[home.name] = LIMITS.per_node  # it takes nothing more
    away = pool.fork(forks[0])[0]
    pool._engine.core._held[home.name] = held
    assert pool._engine.at(away).member is not home
    pool.write(forks[0], "/repo/file", b"2")
    read_all = [pool.read(handle, "/repo/file") for handle in (parent, *forks, away)]
    assert read_all == [b"1", b"2", b"1", b"1"]


def test_a_create_that_is_repeated_gives_the_same_sandbox(pool, owner):
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(lambda _: pool.create(SPEC, owner=owner, key="k"), range(6)))
    assert len(set(made)) == 1
    assert pool.create(SPEC, owner=owner, key="other") not in made
    assert pool.create(SPEC, owner=owner) not in made
    pool.close(made[0])
    with pytest.raises(SandboxLost) as lost:
        pool.create(SPEC, owner=owner, key="k")
    assert lost.value.reason == "closed"
    bad = Spec(layers=("none",))
    for _ in range(2):  # one that never was can be repeated
        with pytest.raises(SandboxError, match="there is no"):
            pool.create(bad, owner=owner, key="bad")
    assert pool.create(SPEC, owner=owner, key="bad")


def test_leases_end_unless_they_are_renewed(pool, owner):
    short = Spec(resources=SPEC.resources, ttl_s=0.6)
    kept, left = (pool.create(short, owner=owner) for _ in range(2))
    last = pool.create(Spec(resources=SPEC.resources, deadline_s=0.9), owner=owner)
    for _ in range(5):
        time.sleep(0.2)
        pool.renew(kept)
    assert pool.status(left).reason == "lease" and pool.status(last).reason == "deadline"
    with pytest.raises(SandboxLost) as lost:
        pool.exec(left, ["true"])
    assert lost.value.reason == "lease"
    assert pool.renew_owner(owner) == 1 and pool.exec(kept, ["true"]).ok


def test_a_sandbox_that_ends_itself_is_known_at_once(pool, owner):
    handle = pool.create(SPEC, owner=owner)
    place, before = pool._engine.at(handle), pool.ledger.ended["exited"]
    group = f"{PREFIX}*-{place.member.backend.pid}/{place.inner.id}/cgroup.procs"
    file = next(file for top in cgroups.find().folders() for file in top.glob(group))
    os.kill(int(file.read_text()), signal.SIGKILL)  # as if it had run out of memory
    assert until(lambda: pool.ledger.ended["exited"] == before + 1)
    assert pool.status(handle).reason == "exited"


def test_ready_sandboxes_are_handed_over_with_the_terms_of_their_owner(pool, owner):
    pool.keep_ready(SPEC, 2)
    assert until(lambda: pool.ready(SPEC) == 2)
    asked = pool.ledger.asked
    terms = Spec(resources=SPEC.resources, env={"X": "y"}, ttl_s=0.5)
    handle = pool.create(terms, owner=owner, key="k")
    assert int(handle.id) <= asked  # it was there before
    assert pool.create(terms, owner=owner, key="k") == handle
    assert pool.exec(handle, ["sh", "-c", "echo $X"]).stdout == b"y\n"
    assert until(lambda: pool.status(handle).reason == "lease")
    assert until(lambda: pool.ready(SPEC) == 2)
    pool.keep_ready(SPEC, 0)
    other = pool.create(Spec(resources=Resources(memory_mb=65)), owner=owner)
    assert int(other.id) > asked  # of another kind


def test_quota_and_no_room(bwrap):
    limits = Limits(reserve_mb=64, cpu_pressure=100, memory_pressure=100, per_owner=1, per_node=2)
    with Pool(config(limits=limits, wait_s=0.3)) as pool:
        first = pool.create(SPEC, owner="a")
        with pytest.raises(SandboxError, match=r"no room .* owner 'a' has 1 sandboxes"):
            pool.create(SPEC, owner="a")
        pool.create(SPEC, owner="b")
        with pytest.raises(SandboxError, match=r"no room .* all 1 nodes are busy"):
            pool.create(SPEC, owner="c")
        threading.Timer(0.1, pool.close, [first]).start()
        assert pool.exec(pool.create(SPEC, owner="c"), ["true"]).ok  # it has waited for that
    assert pool.ledger.ended == {"refused": 2, "closed": 3}


def test_a_killed_node_costs_its_leases_and_no_accounting(bwrap, tmp_path):
    log = tmp_path / "log"
    with Pool(config(nodes=2, log=str(log))) as pool:
        made = [pool.create(SPEC, owner="a", key=str(number)) for number in range(6)]
        there = [handle for handle in made if pool._engine.at(handle).member.name == "node-1"]
        assert 0 < len(there) < 6
        dead, alive = pool.node_pids()
        waits = ThreadPoolExecutor(1).submit(pool.exec, there[0], ["sleep", "60"])
        time.sleep(0.1)
        os.kill(dead, signal.SIGKILL)
        with pytest.raises(SandboxLost) as lost:
            waits.result(10)
        assert lost.value.reason == "backend"
        for handle in made:
            if handle in there:
                assert until(lambda handle=handle: pool.status(handle).reason == "backend")
                with pytest.raises(SandboxLost) as lost:
                    pool.create(SPEC, owner="a", key=str(made.index(handle)))
                assert lost.value.reason == "backend"
            else:
                assert pool.exec(handle, ["true"]).ok
        assert until(lambda: len(pool.node_pids()) == 2)
        assert alive in pool.node_pids() and dead not in pool.node_pids()
        for _ in range(4):
            assert pool.exec(pool.create(SPEC, owner="b"), ["true"]).ok
        assert pool.ledger.ended == {"lost": len(there)}
    book = read(log)
    assert not book.open and book.ended == {"lost": len(there), "closed": 10 - len(there)}


def test_a_start_moves_on_when_its_node_dies(bwrap):
    with Pool(config(nodes=2)) as pool:
        first = next(iter(pool._engine.members.values()))
        os.kill(first.backend.pid, signal.SIGSTOP)  # it takes requests, but will not answer
        waits = ThreadPoolExecutor(1).submit(pool.create, SPEC, owner="a")
        assert until(lambda: any(lease.state == "placed" for lease in pool._engine.core.of("a")))
        os.kill(first.backend.pid, signal.SIGKILL)
        handle = waits.result(20)
        assert pool.exec(handle, ["true"]).ok
        assert pool._engine.at(handle).member is not first
    assert pool.ledger.ended == {"closed": 1} and pool.ledger.asked == 1


def test_bad_configs(tmp_path):
    for field in ({"nodes": 0}, {"wait_s": float("inf")}):
        with pytest.raises(ConfigError, match=next(iter(field))):
            PoolConfig(**field)


def test_after_the_end(bwrap):
    pool = Pool(config())
    handle = pool.create(SPEC)
    pool.shutdown()
    assert not pool.status(handle).alive
    with pytest.raises(SandboxLost, match="shut down"):
        pool.create(SPEC)
