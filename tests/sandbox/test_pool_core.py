"""What a pool decides, in simulated clusters."""

import collections
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from c2.config import ConfigError
from c2.sandbox.pool import Limits
from c2.sandbox.pool.core import Core, Lease
from c2.sandbox.pool.ledger import Event, Ledger, LedgerError
from c2.sandbox.pool.pressure import Pressure

LIMITS = Limits(
    per_owner=3, per_node=4, starting=2, start_mb=10, reserve_mb=100, memory_pressure=20,
    cpu_pressure=90,
)  # fmt: skip
CALM = Pressure(cpu=0, memory=0, available_mb=1e6)
HOLDING = {"placed", "ready", "live", "closing"}


class Cluster(RuleBasedStateMachine):
    """Random owners, nodes and mishaps; the ledger and counts made here say what is right."""

    @initialize()
    def start(self):
        self.now, self.events, self.ledger = 0.0, [], Ledger()
        self.core = Core(LIMITS, self.note)
        self.leases: list[Lease] = []
        self.until: dict[str, tuple[float, float]] = {}  # live ones: end of lease, deadline
        self.nodes = 0
        self.add_node()
        for owner in ("a", "", "b"):
            self.ask(owner, None, 5, 9, "")
        self.core.place(self.now, CALM)

    def note(self, event: Event):
        self.ledger.add(event)  # raises if it cannot be
        self.events.append(event)

    def some(self, data, *states):
        found = [lease for lease in self.leases if lease.state in states]
        return data.draw(st.sampled_from(found)) if found else None

    def lives(self, lease):
        self.until[lease.sandbox] = (self.now + lease.ttl_s, self.now + lease.deadline_s)

    @rule()
    def add_node(self):
        if self.nodes < 5:
            self.nodes += 1
            self.core.nodes.add(f"n{self.nodes}")

    @rule(
        owner=st.sampled_from(["", "a", "b"]), key=st.sampled_from([None, "k", "l"]),
        ttl=st.integers(1, 9), deadline=st.integers(1, 20), home=st.sampled_from(["n1", "n2", ""]),
    )  # fmt: skip
    def ask(self, owner, key, ttl, deadline, home):
        known = self.core.known(owner, key)
        if known is not None:
            assert (known.owner, known.key) == (owner, key) and key is not None
            assert known.reason not in ("failed", "refused")
            return
        lease = Lease(
            sandbox=str(self.ledger.asked + 1), owner=owner, key=owner and key, ttl_s=ttl,
            deadline_s=deadline, homes=frozenset([home] if home else []),
        )  # fmt: skip
        self.core.ask(self.now, lease)
        self.leases.append(lease)

    @rule(cpu=st.floats(0, 100), memory=st.floats(0, 40), available=st.floats(80, 160))
    def place(self, cpu, memory, available):
        starting = [lease for lease in self.leases if lease.state == "placed"]
        waiting = [lease for lease in self.leases if lease.state == "asked"]
        placed = self.core.place(self.now, Pressure(cpu=cpu, memory=memory, available_mb=available))
        if placed:
            assert memory <= LIMITS.memory_pressure
            in_flight = len(starting) + len(placed)
            assert available - in_flight * LIMITS.start_mb >= LIMITS.reserve_mb
            assert cpu <= LIMITS.cpu_pressure or (not starting and len(placed) == 1)
        for lease in placed:
            # Nobody of the same owner has waited longer for nothing.
            older = [other for other in waiting if other.owner == lease.owner]
            older = older[: older.index(lease)]
            assert all(other.state == "placed" for other in older)

    @rule(data=st.data())
    def up(self, data):
        if lease := self.some(data, "placed"):
            assert self.core.up(self.now, lease)
            assert lease.state == ("live" if lease.owner else "ready")
            if lease.owner:
                self.lives(lease)

    @rule(data=st.data())
    def fail(self, data):
        if lease := self.some(data, "placed"):
            self.core.ended(self.now, lease, "failed")
            assert self.core.known(lease.owner, lease.key) is not lease  # it may be tried again

    @rule(data=st.data(), owner=st.sampled_from(["a", "b"]), ttl=st.integers(1, 9))
    def claim(self, data, owner, ttl):
        lease = self.some(data, "ready")
        if lease and self.core.may_own(owner):
            wanted = Lease(sandbox="unused", owner=owner, ttl_s=ttl, deadline_s=20)
            self.core.claim(self.now, lease, wanted)
            assert (lease.owner, lease.ttl_s, lease.state) == (owner, ttl, "live")
            self.lives(lease)

    @rule(data=st.data())
    def renew(self, data):
        if lease := self.some(data, "live"):
            self.core.renew(self.now, lease)
            self.until[lease.sandbox] = (self.now + lease.ttl_s, self.until[lease.sandbox][1])

    @rule(data=st.data())
    def close(self, data):
        if lease := self.some(data, "asked", "placed", "ready", "live", "closing", "ended"):
            before, reason = lease.state, lease.reason
            assert self.core.close(self.now, lease, "closed") == (before in ("ready", "live"))
            assert lease.state in ("closing", "ended") and lease.reason == (reason or "closed")
            if before == "placed":
                assert not self.core.up(self.now, lease)  # who starts it has to end it

    @rule(data=st.data(), reason=st.sampled_from(["exited", "closed"]))
    def end(self, data, reason):
        if lease := self.some(data, "ready", "live", "closing", "ended"):
            stands = lease.reason
            self.core.ended(self.now, lease, reason)
            assert lease.state == "ended" and lease.reason == (stands or reason)

    @rule(data=st.data())
    def lose(self, data):
        if self.core.nodes:
            node = data.draw(st.sampled_from(sorted(self.core.nodes)))
            there = {x.sandbox: x.state for x in self.leases if x.node == node}
            lost = self.core.lost(self.now, node)
            assert {x.sandbox for x in lost} == {x for x, s in there.items() if s in HOLDING}
            for lease in lost:
                was = there[lease.sandbox]
                assert lease.state == ("asked" if was == "placed" else "ended")
                assert was == "closing" or lease.reason == (None if was == "placed" else "lost")

    @rule(seconds=st.integers(1, 8))
    def advance(self, seconds):
        self.now += seconds
        live = {x.sandbox for x in self.leases if x.state == "live"}
        expected = {
            name: "deadline" if deadline <= lease else "lease"
            for name, (lease, deadline) in self.until.items()
            if name in live and min(lease, deadline) <= self.now
        }
        due = self.core.due(self.now)
        assert {lease.sandbox: reason for lease, reason in due} == expected
        ends = [min(self.until[name]) for name in live]
        assert self.core.next_due() == min(ends, default=math.inf)
        for lease, reason in due:
            assert self.core.close(self.now, lease, reason)

    @invariant()
    def limits_hold(self):
        if not hasattr(self, "core"):
            return
        held = [lease for lease in self.leases if lease.state in HOLDING]
        owners = collections.Counter(lease.owner for lease in held if lease.owner)
        assert all(count <= LIMITS.per_owner for count in owners.values())
        for node, count in collections.Counter(lease.node for lease in held).items():
            assert node in self.core.nodes and count <= LIMITS.per_node
        starting = collections.Counter(x.node for x in self.leases if x.state == "placed")
        assert all(count <= LIMITS.starting for count in starting.values())

    @invariant()
    def nothing_is_forgotten(self):
        if not hasattr(self, "core"):
            return
        open_now = {x.sandbox: x.state for x in self.leases if x.state != "ended"}
        assert {name: event.state for name, event in self.ledger.open.items()} == open_now
        assert {lease.sandbox for lease in self.core.open()} == set(open_now)
        assert self.ledger.asked == len(open_now) + self.ledger.ended.total() == len(self.leases)

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for lease in self.leases:
            if self.core.close(self.now, lease, "closed") or lease.state == "closing":
                self.core.ended(self.now, lease, "closed")
        ends = collections.Counter(x.sandbox for x in self.events if x.state == "ended")
        assert ends == collections.Counter(lease.sandbox for lease in self.leases)
        # All room has come back.
        self.core.nodes = {"new"}
        for number in range(LIMITS.per_owner):
            lease = Lease(sandbox=f"x{number}", owner="a", ttl_s=1, deadline_s=1)
            self.core.ask(self.now, lease)
            assert self.core.place(self.now, CALM) == [lease] and self.core.up(self.now, lease)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def cluster(*nodes, **limits) -> Core:
    core = Core(Limits(**limits), lambda _: None)
    core.nodes |= set(nodes)
    return core


def ask(core, sandbox, owner="a", **fields) -> Lease:
    lease = Lease(sandbox=sandbox, owner=owner, ttl_s=10, deadline_s=100, **fields)
    core.ask(0.0, lease)
    return lease


def test_load_is_spread_but_forks_stay_at_home():
    core = cluster("m", "n")
    spread = [ask(core, str(number)) for number in range(4)]
    core.place(0.0, CALM)
    assert sorted(lease.node for lease in spread) == ["m", "m", "n", "n"]
    for lease in spread:
        core.up(0.0, lease)
    forks = [ask(core, f"f{number}", homes=frozenset("n")) for number in range(5)]
    core.place(0.0, CALM)
    # Four starts are as many as a node takes at once; the fifth does not wait for it.
    assert [lease.node for lease in forks] == ["n"] * 4 + ["m"]


def test_an_owner_at_its_quota_holds_up_nobody_else():
    core = cluster("m", per_owner=1)
    greedy = [ask(core, "1"), ask(core, "2")]
    other = ask(core, "3", owner="b")
    assert core.place(0.0, CALM) == [greedy[0], other]
    assert "owner 'a' has 1" in core.obstacle(greedy[1], CALM)
    core.ended(0.0, greedy[0], "exited")
    assert core.place(0.0, CALM) == [greedy[1]]


def test_a_lost_node_ends_what_it_has_and_its_starts_are_made_elsewhere():
    core = cluster("m")
    leases = {state: ask(core, state) for state in ("live", "closing", "placed")}
    core.place(0.0, CALM)
    for state in ("live", "closing"):
        core.up(0.0, leases[state])
    core.close(0.0, leases["closing"], "lease")
    assert core.lost(1.0, "m") == list(leases.values())
    assert {state: (x.state, x.reason) for state, x in leases.items()} == {
        "live": ("ended", "lost"), "closing": ("ended", "lease"), "placed": ("asked", None),
    }  # fmt: skip
    assert not core.place(1.0, CALM)
    core.nodes.add("n")
    assert core.place(1.0, CALM) == [leases["placed"]] and leases["placed"].node == "n"


def test_the_first_reason_stands():
    core = cluster("m")
    lease = ask(core, "1")
    core.place(0.0, CALM)
    core.up(0.0, lease)
    core.close(0.0, lease, "lease")
    core.ended(0.0, lease, "exited")
    assert (lease.state, lease.reason) == ("ended", "lease")


def test_a_deadline_comes_before_a_lease_that_ends_with_it():
    core = cluster("m")
    lease = Lease(sandbox="1", owner="a", ttl_s=5, deadline_s=5)
    core.ask(0.0, lease)
    core.place(0.0, CALM)
    core.up(2.0, lease)
    assert core.next_due() == 7.0 and core.due(6.9) == []
    assert core.due(7.0) == [(lease, "deadline")]


def test_owners_come_before_what_is_kept_ready():
    core = cluster("m", starting=1)
    ready, owned = ask(core, "1", owner=""), ask(core, "2")
    assert core.place(0.0, CALM) == [owned]
    core.up(0.0, owned)
    assert core.place(0.0, CALM) == [ready]


@pytest.mark.parametrize(
    "pressure, why",
    [
        (Pressure(cpu=0, memory=0, available_mb=140), "140 MiB"),
        (Pressure(cpu=0, memory=50, available_mb=1e6), "memory is short for 50 %"),
        (Pressure(cpu=99, memory=0, available_mb=1e6), "cores are short for 99 %"),
    ],
)
def test_what_is_waited_for_is_said(pressure, why):
    core = cluster("m", start_mb=30, reserve_mb=100)
    core.place(0.0, CALM)
    ask(core, "1")
    assert core.place(0.0, CALM)
    assert why in core.obstacle(ask(core, "2"), pressure)


@pytest.mark.parametrize(
    "states",
    [
        ["placed"], ["asked", "live"], ["asked", "placed", "live", "placed"], ["asked", "asked"],
        ["asked", "placed", "live", "closing", "live"], ["asked", "ended", "ended"],
        ["asked", "ended", "asked"],
    ],
)  # fmt: skip
def test_impossible_lives(states):
    *before, last = (
        Event(time=0, sandbox="1", state=x, reason="closed" if x in ("closing", "ended") else None)
        for x in states
    )
    ledger = Ledger(before)
    was = dict(ledger.open), ledger.asked
    with pytest.raises(LedgerError, match="sandbox 1: "):
        ledger.add(last)
    assert (ledger.open, ledger.asked) == was


def test_a_reason_stands():
    ledger = Ledger(
        Event(time=0, sandbox="1", state=x, reason=reason)
        for x, reason in (("asked", None), ("placed", None), ("live", None), ("closing", "lease"))
    )
    with pytest.raises(LedgerError, match="closed after lease"):
        ledger.add(Event(time=0, sandbox="1", state="ended", reason="closed"))
    with pytest.raises(LedgerError, match="ended for None"):
        ledger.add(Event(time=0, sandbox="1", state="ended"))


@pytest.mark.parametrize("field", ["per_owner", "per_node", "starting", "start_mb"])
def test_bad_limits(field):
    with pytest.raises(ConfigError, match=f"limits.{field}: -1"):
        Limits(**{field: -1})


def test_what_a_dead_node_gives_back_is_placed_before_what_was_asked_for_later():
    core = cluster("m", starting=1)
    first = ask(core, "1")
    assert core.place(0.0, CALM) == [first]
    later = ask(core, "2")
    core.lost(0.0, "m")
    core.nodes.add("n")
    assert core.place(0.0, CALM) == [first]
    assert (first.state, later.state) == ("placed", "asked")
