"""Whatever happens in whatever order, what is served has been published, or there is an error."""

import contextlib

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from c2.weights import manifest
from c2.weights.lease import HeldError
from c2.weights.manifest import BrokenLinkError
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.shards import whole
from c2.weights.subscriber import Subscriber

CONFIG = PublisherConfig(anchor_every=3, keep_anchors=2, chunk=12, lease_seconds=0.02)
INTRUDER = PublisherConfig(lease_seconds=0.4)  # patient, so that a busy machine is no death
CUTS = [[], [0.4]]  # of the two groups of readers
READERS = [(0, 0), (1, 0), (1, 1)]  # group and rank

faults = st.none() | st.tuples(st.integers(0, 12), st.booleans())


def machine(toy, new_store):
    """The rules, with the names of the tests' small model bound."""

    class Interleavings(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.may_be_spoilt, self.intruded, self.newest = False, False, None
            self.store, self.trainer = new_store(), toy.Trainer()
            self.handed, self.published, self.spoilt = {}, {}, False
            self.write_end = toy.Flaky(self.store)
            self.read_ends = [toy.Flaky(self.store) for _ in READERS]
            self.publisher = self.open_publisher()
            self.readers = [self.open_reader(number) for number in range(len(READERS))]

        def open_publisher(self):
            return Publisher(self.write_end, CONFIG, owner="test")

        def open_reader(self, number):
            group, rank = READERS[number]
            return Subscriber(self.read_ends[number], toy.wanted(CUTS[group], rank))

        @initialize(may_be_spoilt=st.booleans())
        def choose(self, may_be_spoilt):
            self.may_be_spoilt = may_be_spoilt

        @rule(fault=faults)
        def publish(self, fault):
            state = self.trainer.train()
            self.handed[self.trainer.step] = state
            self.write_end.countdown, self.write_end.lost = fault or (None, False)
            with contextlib.suppress(OSError, HeldError):
                self.publisher.publish(self.trainer.step, whole(state))
                self.publisher.wait()
            self.write_end.countdown = None

        @rule(number=st.integers(0, len(READERS) - 1), fault=faults)
        def poll(self, number, fault):
            reader, before = self.readers[number], self.readers[number].current
            self.read_ends[number].countdown, self.read_ends[number].lost = fault or (None, False)
            try:
                new = reader.poll()
            except (OSError, BrokenLinkError) as error:
                assert reader.current is before
                assert self.spoilt or fault, error
            else:
                assert new == (reader.current is not before)
                if not self.spoilt:
                    self.note_published()
                    assert (reader.current and reader.current.step) == self.newest
            self.read_ends[number].countdown = None

        @rule(number=st.integers(0, len(READERS) - 1))
        def restart_reader(self, number):
            self.readers[number] = self.open_reader(number)

        @rule(killed=st.booleans())
        def restart_publisher(self, killed):
            if killed:
                lease = self.publisher._lease
                lease._released.set()
                lease._thread.join()
                self.publisher._thread.shutdown()
            else:
                self.publisher.close()
            self.publisher = self.open_publisher()

        @precondition(lambda self: not self.intruded)
        @rule()
        def second_publisher(self):
            self.intruded = True  # once is enough: it watches for a moment
            with pytest.raises(HeldError, match="test writes this chain"):
                Publisher(self.store, INTRUDER, owner="second")

        @precondition(lambda self: self.may_be_spoilt)
        @rule(
            how=st.sampled_from(["drop", "damage", "duplicate"]),
            folder=st.sampled_from(["versions", "anchors", "blobs"]),
            which=st.integers(0, 2),
            where=st.integers(0, 9999),
        )
        def spoil(self, how, folder, which, where):
            self.spoilt = True
            names = self.store.names(folder)
            if not names:
                return
            name = f"{folder}/{names[-1 - which % len(names)]}"
            if how == "drop":
                self.store.remove(name)
            elif how == "damage":
                content = bytearray(self.store.read(name))
                content[where % len(content)] ^= 4
                self.store.write(name, bytes(content))
            else:  # under another name, so that an order is broken too
                targets = [*names, f"{int(names[-1][:8]) + 1:08d}"]
                target = targets[where % len(targets)]
                self.store.write(f"{folder}/{target}", self.store.read(name))

        def note_published(self):
            for name in self.store.names("versions"):
                with contextlib.suppress(BrokenLinkError):
                    found = manifest.load_manifest(self.store.read(f"versions/{name}"))
                    self.published[found.chain] = self.newest = found.step

        @invariant()
        def only_what_was_published_is_served(self):
            self.note_published()
            for (group, rank), reader in zip(READERS, self.readers, strict=True):
                if (now := reader.current) is not None:
                    assert self.published[now.chain] == now.step
                    assert toy.same(now.tensors, self.handed[now.step], CUTS[group], rank)

        def teardown(self):
            """After a retry without failures everyone has the newest version."""
            self.restart_publisher(killed=False)
            state = self.trainer.train()
            self.publisher.publish(self.trainer.step, whole(state))
            self.publisher.close()
            for (group, rank), reader in zip(READERS, self.readers, strict=True):
                reader.poll()
                assert reader.current.step == self.trainer.step
                assert toy.same(reader.current.tensors, state, CUTS[group], rank)

    return Interleavings


def test_random_interleavings(toy, new_store):
    run_state_machine_as_test(
        machine(toy, new_store),
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            phases=[Phase.reuse, Phase.generate],  # to shrink 25 steps takes minutes
        ),
    )
