"""Publisher and subscriber together: sharding, anchors, pruning, failures one by one."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.weights import manifest
from c2.weights import publisher as publisher_module
from c2.weights.lease import HeldError
from c2.weights.manifest import BrokenLinkError, MismatchError
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.shards import Part, Want, wants, whole
from c2.weights.subscriber import Subscriber

CONFIG = PublisherConfig(anchor_every=3, chunk=10, lease_seconds=0.3, patience=0.5)


@pytest.fixture
def store(new_store):
    return new_store()


@pytest.fixture
def publisher(store):
    with Publisher(store, CONFIG, owner="test") as publisher:
        yield publisher


def publish(publisher, trainer, steps=1):
    """Publishes so many steps; the last state."""
    for _ in range(steps):
        state = trainer.train()
        publisher.publish(trainer.step, whole(state))
        publisher.wait()
    return state


def kill(publisher):
    """Ends a publisher as SIGKILL would: the lease stays, without a sign of life."""
    publisher._lease._released.set()
    publisher._lease._thread.join()
    publisher._thread.shutdown()


cuts = st.lists(st.floats(0, 1), max_size=2).map(sorted)


@given(written=cuts, read=cuts, seed=st.integers(0, 1000), chunk=st.integers(1, 30))
@settings(max_examples=12, deadline=None)
def test_any_sharding_on_either_side(toy, new_store, written, read, seed, chunk):
    store, trainer = new_store(), toy.Trainer(seed)
    config = PublisherConfig(anchor_every=3, chunk=chunk, keep_anchors=1, workers=2)
    ranks = len(written) + 1
    publishers = [Publisher(store, config, owner="0", ranks=ranks)]
    publishers += [
        Publisher(store, config, owner="", rank=rank, ranks=ranks, epoch=publishers[0].epoch)
        for rank in range(1, ranks)
    ]
    early = [Subscriber(store, toy.wanted(read, rank)) for rank in range(len(read) + 1)]
    for _ in range(5):
        state = trainer.train()
        for rank, publisher in enumerate(publishers):
            publisher.publish(trainer.step, toy.parts(state, written, rank))
        published = [publisher.wait() for publisher in publishers]
        assert {(p.version, p.step) for p in published} == {(trainer.step, trainer.step)}
        assert sum(p.numbers for p in published) == sum(x.size for x in state.values())
        late = [Subscriber(store, toy.wanted(read, rank), workers=2) for rank in range(len(early))]
        for subscribers in (early, late):
            for rank, subscriber in enumerate(subscribers):
                assert subscriber.poll()
                assert subscriber.current.step == trainer.step
                assert toy.same(subscriber.current.tensors, state, read, rank)
        assert early[0].current.chain == late[0].current.chain
    for publisher in reversed(publishers):
        publisher.close()


def test_a_reader_takes_only_the_chunks_it_needs(store, toy, publisher):
    flaky, read = toy.Flaky(store), []

    def noted(name, start=None, stop=None):
        read.append((name, start, stop))
        return store.read(name, start, stop)

    flaky.read = noted
    weights = np.random.default_rng(0).integers(0, 256, (10, 10), np.uint8)
    publisher.publish(0, whole({"w": weights}))
    publisher.wait()
    subscriber = Subscriber(flaky, {"w": Want("uint8", (10, 10), 3, 5)})
    subscriber.poll()
    np.testing.assert_array_equal(subscriber.current.tensors["w"], weights[3:5])
    blobs = [stop - start for name, start, stop in read if name.startswith("blobs")]
    chunks = manifest.load_manifest(store.read("versions/00000001")).tensors["w"].chunks
    assert blobs == [chunks[3].length + chunks[4].length]


def test_a_reader_of_no_rows_reads_no_blob(store, toy, publisher):
    publish(publisher, toy.Trainer())
    flaky = toy.Flaky(store)
    want = {name: want._replace(start=0, stop=0) for name, want in toy.wanted([], 0).items()}
    want["scalar"] = Want("float32", ())  # has no rows to leave out
    want["a"] = want["a"]._replace(start=2, stop=2)  # in the middle of a chunk
    subscriber = Subscriber(flaky, want)
    subscriber.poll()
    assert {name: x.size for name, x in subscriber.current.tensors.items() if x.size} == {
        "scalar": 1
    }
    assert flaky.count == 5  # versions, anchors, two manifests and the scalar


def test_an_idle_reader_stays_as_it_is(store, toy, publisher):
    subscriber = Subscriber(store, toy.wanted([], 0))
    assert not subscriber.poll()
    assert subscriber.current is None
    publish(publisher, toy.Trainer())
    assert subscriber.poll()
    first = subscriber.current
    assert not subscriber.poll()
    assert subscriber.current is first
    with pytest.raises(ValueError, match="read-only"):
        first.tensors["a"][0] = 0


def test_versions_before_the_oldest_anchor_go(store, toy, publisher):
    publish(publisher, toy.Trainer(), 11)
    assert store.names("anchors") == ["00000006", "00000009"]
    assert store.names("versions") == [f"{version:08d}" for version in range(6, 12)]
    assert {name[:8] for name in store.names("blobs")} == set(store.names("versions"))
    assert store.names("parts") == []


@pytest.mark.parametrize("polled_between", [False, True])
def test_after_versions_have_vanished_readers_get_the_next_ones(
    store, toy, publisher, polled_between
):
    """Someone else has removed the two newest, and with them all but full copies of theirs."""
    trainer, reader = toy.Trainer(), Subscriber(store, toy.wanted([], 0))
    publish(publisher, trainer, 6)
    publisher.close()
    with Publisher(store, CONFIG, owner="second") as second:
        publish(second, trainer)
    assert store.names("versions") == ["00000006", "00000007"]
    store.remove("versions/00000007")
    if polled_between:
        reader.poll()
    store.remove("versions/00000006")
    for owner in ("third", "fourth"):
        with Publisher(store, CONFIG, owner=owner) as publisher:
            state = publish(publisher, trainer)
        assert reader.poll()
        assert reader.current.step == trainer.step
        assert toy.same(reader.current.tensors, state, [], 0)


@pytest.mark.parametrize("killed", [False, True])
def test_the_number_of_a_version_that_has_vanished_is_not_given_again(
    store, toy, publisher, killed
):
    """Else a reader that has the first version of this number would take the second for it."""
    trainer, reader = toy.Trainer(), Subscriber(store, toy.wanted([], 0))
    publish(publisher, trainer, 2)
    reader.poll()
    if killed:
        kill(publisher)
    else:
        publisher.close()
    store.remove("versions/00000002")
    with Publisher(store, CONFIG, owner="second") as second:
        state = publish(second, trainer)
    assert reader.poll()
    assert toy.same(reader.current.tensors, state, [], 0)


@pytest.mark.parametrize("folder", ["anchors", "versions"])
def test_what_is_not_of_the_chain_takes_no_part_in_it(store, toy, publisher, folder):
    """Copies under numbers that have not been reached."""
    trainer, reader = toy.Trainer(), Subscriber(store, toy.wanted([], 0))
    publish(publisher, trainer)
    for number in (20, 21):
        store.write(f"{folder}/{number:08d}", store.read(f"{folder}/00000001"))
    publisher.close()
    with Publisher(store, CONFIG, owner="second") as second:
        state = publish(second, trainer)
    assert reader.poll()
    assert toy.same(reader.current.tensors, state, [], 0)


def test_full_and_delta_of_one_version_hold_the_same_state(store, toy, publisher):
    publish(publisher, toy.Trainer(), 3)
    delta, full = (
        manifest.load_manifest(store.read(f"{folder}/00000003"))
        for folder in ("versions", "anchors")
    )
    assert (delta.base, full.base) == (2, None)
    assert manifest.state_hash(delta.tensors) == manifest.state_hash(full.tensors)
    assert {c.codec for t in full.tensors.values() for c in t.chunks} == {"full"}


DAMAGE = {
    "manifest damaged": lambda store: flip(store, "versions/00000005"),
    "blob lost": lambda store: store.remove(f"blobs/{blob_of(store, 5)}"),
    "blob damaged": lambda store: flip(store, f"blobs/{blob_of(store, 5)}"),
    "blob cut": lambda store: store.write(
        f"blobs/{blob_of(store, 5)}", store.read(f"blobs/{blob_of(store, 5)}")[:-1]
    ),
    "another version in its place": lambda store: store.write(
        "versions/00000005", store.read("versions/00000004")
    ),
}


def blob_of(store, version):
    return next(name for name in store.names("blobs") if name.startswith(f"{version:08d}"))


def flip(store, name, at=None):
    data = bytearray(store.read(name))
    data[len(data) // 2 if at is None else at] ^= 1
    store.write(name, bytes(data))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_link_leads_to_an_anchor_and_is_logged(store, toy, publisher, damage, caplog):
    trainer, subscriber = toy.Trainer(), Subscriber(store, toy.wanted([], 0))
    state = publish(publisher, trainer, 4)
    subscriber.poll()
    served = subscriber.current
    publish(publisher, trainer)
    DAMAGE[damage](store)
    with pytest.raises(BrokenLinkError, match="no anchor leads to version 5"):
        subscriber.poll()
    assert subscriber.current is served
    assert toy.same(served.tensors, state, [], 0)
    assert "taking an anchor" in caplog.text
    state = publish(publisher, trainer)  # the sixth, with an anchor
    assert subscriber.poll()
    assert toy.same(subscriber.current.tensors, state, [], 0)
    assert subscriber.current.version == 6


def test_a_missing_link_leads_to_an_anchor_and_is_logged(store, toy, publisher, caplog):
    trainer, subscriber = toy.Trainer(), Subscriber(store, toy.wanted([], 0))
    publish(publisher, trainer, 4)
    subscriber.poll()
    state = publish(publisher, trainer, 2)
    store.remove("versions/00000005")
    assert subscriber.poll()
    assert "versions/00000005 is missing; taking an anchor" in caplog.text
    assert toy.same(subscriber.current.tensors, state, [], 0)


def test_a_flipped_bit_that_still_decodes_is_found(store, publisher):
    """Random bytes are stored as they are, so that only the checksum can tell."""
    weights = np.random.default_rng(0).integers(0, 256, (10, 100), np.uint8)
    publisher.publish(0, whole({"w": weights}))
    publisher.wait()
    flip(store, f"blobs/{blob_of(store, 1)}", -1)
    with pytest.raises(BrokenLinkError, match=r"w \[\d+:\d+\] in .*: checksum differs"):
        Subscriber(store, wants({"w": weights})).poll()


def test_a_link_to_another_chain_is_noticed(store, new_store, toy, publisher, caplog):
    """Version 2 of another chain, sound in itself, between 1 and 3 of this one."""
    other = new_store()
    with Publisher(other, CONFIG, owner="other") as second:
        publish(second, toy.Trainer(1), 2)
    trainer, subscriber = toy.Trainer(), Subscriber(store, toy.wanted([], 0))
    publish(publisher, trainer)
    subscriber.poll()
    store.write("versions/00000002", other.read("versions/00000002"))
    for name in other.names("blobs"):
        store.write(f"blobs/{name}", other.read(f"blobs/{name}"))
    with pytest.raises(BrokenLinkError):
        subscriber.poll()
    assert "version 2 follows another version 1" in caplog.text
    assert subscriber.current.version == 1


def test_a_copy_of_a_full_version_is_not_the_next_one(store, toy, publisher, caplog):
    subscriber = Subscriber(store, toy.wanted([], 0))
    publish(publisher, toy.Trainer())
    subscriber.poll()
    store.write("versions/00000002", store.read("versions/00000001"))
    with pytest.raises(BrokenLinkError):
        subscriber.poll()
    assert "versions/00000002 is a copy of version 1" in caplog.text


def test_a_store_that_went_back_is_an_error(store, toy, publisher):
    subscriber = Subscriber(store, toy.wanted([], 0))
    publish(publisher, toy.Trainer(), 3)
    subscriber.poll()
    store.remove("versions/00000003")
    with pytest.raises(BrokenLinkError, match="had later ones"):
        subscriber.poll()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda want: want.pop("a"), "unknown to this reader: a "),
        (lambda want: want.update(x=Want("uint8", (1,))), "missing in this version: x "),
        (lambda want: want.update(b=Want("bfloat16", (9,))), "b: .*float32.* is published"),
        (lambda want: want.update(b=Want("float32", (3, 3))), "b: .*is published"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(store, toy, publisher, change, message):
    publish(publisher, toy.Trainer())
    want = toy.wanted([], 0)
    change(want)
    with pytest.raises(MismatchError, match=message):
        Subscriber(store, want).poll()


@pytest.mark.parametrize("start", [4, 6])
def test_shards_with_a_gap_or_an_overlap_are_refused(store, publisher, start):
    x = np.zeros((5, 2), np.float32)
    rank = Publisher(store, CONFIG, owner="", rank=1, ranks=2, epoch=publisher.epoch)
    publisher._ranks = 2
    rank.publish(0, {"x": Part(x, start, 10)})
    publisher.publish(0, {"x": Part(x, 0, 10)})
    with pytest.raises(MismatchError, match=r"x .* do not cover it once and completely"):
        publisher.wait()
    with pytest.raises(TimeoutError):
        rank.close()
    assert store.names("versions") == []


def test_tensors_cannot_change_within_a_chain(toy, publisher):
    publish(publisher, toy.Trainer())
    publisher.publish(2, whole({"a": np.zeros(3, np.float32)}))
    with pytest.raises(MismatchError, match="not those of the version before"):
        publisher.wait()


def test_a_rank_that_fails_costs_its_version_only(store, toy, publisher):
    trainer, flaky = toy.Trainer(), toy.Flaky(store)
    publisher._ranks = 2
    rank = Publisher(flaky, CONFIG, owner="", rank=1, ranks=2, epoch=publisher.epoch)
    subscriber = Subscriber(store, toy.wanted([], 0))
    for fails in (False, True, False, False):
        state = trainer.train()
        flaky.countdown = 0 if fails else None
        publisher.publish(trainer.step, toy.parts(state, [0.5], 0))
        rank.publish(trainer.step, toy.parts(state, [0.5], 1))
        if fails:
            for each in (publisher, rank):
                with pytest.raises(OSError, match=r"network|has not come"):
                    each.wait()
        else:
            publisher.wait(), rank.wait()
            subscriber.poll()
            assert subscriber.current.step == trainer.step
            assert toy.same(subscriber.current.tensors, state, [], 0)
    assert subscriber.current.version == 3
    rank.close()


def test_two_publishers_on_one_chain_are_refused(store, toy, publisher):
    with pytest.raises(HeldError, match="test writes this chain"):
        Publisher(store, CONFIG, owner="second")
    publish(publisher, toy.Trainer())  # the first goes on


def test_a_publisher_that_was_taken_for_dead_cannot_commit(store, toy, publisher):
    trainer = toy.Trainer()
    publish(publisher, trainer, 2)
    publisher._lease._released.set()  # no sign of life any more
    publisher._lease._thread.join()
    publisher._lease._released.clear()
    with Publisher(store, CONFIG, owner="second") as second:
        with pytest.raises(HeldError, match="no longer holds"):
            publish(publisher, trainer)
        state = publish(second, trainer)
    subscriber = Subscriber(store, toy.wanted([], 0))
    subscriber.poll()
    assert subscriber.current.version == 3
    assert toy.same(subscriber.current.tensors, state, [], 0)
    publisher._lease._released.set()


def test_a_commit_whose_answer_was_lost_and_asked_for_again_stands(store, toy):
    """As S3 clients do: the second request finds what the first one has created."""

    class Repeating(toy.Flaky):
        def create(self, name, data):
            if name.startswith("versions"):
                store.create(name, data)
            store.create(name, data)

    trainer = toy.Trainer()
    with Publisher(Repeating(store), CONFIG, owner="test") as publisher:
        publish(publisher, trainer, 2)
    assert manifest.load_manifest(store.read("versions/00000002")).base == 1


def test_after_a_lost_commit_the_next_version_is_full(store, toy):
    """The base is unknown then: a delta could be against a version that does not exist."""
    flaky, trainer = toy.Flaky(store), toy.Trainer()
    subscriber = Subscriber(store, toy.wanted([], 0))
    with Publisher(flaky, CONFIG, owner="test") as publisher:
        publish(publisher, trainer)

        def lose(name, data):
            store.create(name, data)
            raise OSError("no answer")

        flaky.create = lose
        with pytest.raises(OSError, match="no answer"):
            publish(publisher, trainer)
        del flaky.create
        state = publish(publisher, trainer)
    assert manifest.load_manifest(store.read("versions/00000003")).base is None
    subscriber.poll()
    assert toy.same(subscriber.current.tensors, state, [], 0)


def test_the_caller_may_overwrite_its_arrays(store, publisher):
    weights = np.arange(5, dtype=np.float32)
    publisher.publish(0, whole({"w": weights}))
    weights[:] = -1
    publisher.wait()
    subscriber = Subscriber(store, wants({"w": weights}))
    subscriber.poll()
    np.testing.assert_array_equal(subscriber.current.tensors["w"], np.arange(5))


def test_publishing_does_not_wait_for_the_store(store, toy):
    """While an upload hangs, the trainer goes on and sees that the publisher is busy."""
    uploading, go = threading.Event(), threading.Event()
    slow = toy.Flaky(store)

    def write(name, data):
        if name.startswith("blobs"):
            uploading.set()
            go.wait(10)
        store.write(name, data)

    slow.write = write
    trainer, told = toy.Trainer(), []
    with Publisher(slow, CONFIG, owner="test", notify=told.append) as publisher:
        assert publisher.ready
        publisher.publish(1, whole(trainer.train()))
        assert uploading.wait(10)
        assert not publisher.ready
        assert told == []
        go.set()
        assert publisher.wait().version == 1
        assert publisher.ready
        assert told == [1]


def test_a_trainer_that_asks_first_never_waits(store, toy):
    """Twenty steps fit into one upload; what they leave out is in the next version."""
    stepped, slow, trainer = threading.Event(), toy.Flaky(store), toy.Trainer()

    def write(name, data):
        if name.startswith("blobs/00000001"):
            assert stepped.wait(10)
        store.write(name, data)

    slow.write = write
    with Publisher(slow, CONFIG, owner="test") as publisher:
        for _ in range(20):
            state = trainer.train()
            if publisher.ready:
                publisher.publish(trainer.step, whole(state))
        stepped.set()
        assert publisher.wait().step == 1
        publisher.publish(trainer.step, whole(state))
    subscriber = Subscriber(store, toy.wanted([], 0))
    subscriber.poll()
    assert (subscriber.current.version, subscriber.current.step) == (2, 20)
    assert toy.same(subscriber.current.tensors, state, [], 0)


def test_what_a_trainer_lost_is_measured(store, toy, monkeypatch):
    """By a clock that only the first upload moves, while the second `publish` waits for it."""
    now, reads, slow = [0.0], threading.Semaphore(0), toy.Flaky(store)
    main = threading.current_thread()

    def clock():
        if threading.current_thread() is main:
            reads.release()
        return now[0]

    def write(name, data):
        if name.startswith("blobs/00000001"):
            for _ in range(3):  # the third is at the beginning of the second `publish`
                assert reads.acquire(timeout=10)
            now[0] += 5
        store.write(name, data)

    slow.write = write
    monkeypatch.setattr(publisher_module.time, "perf_counter", clock)
    with Publisher(slow, CONFIG, owner="test") as publisher:
        trainer, published = toy.Trainer(), []
        wait = publisher.wait
        publisher.wait = lambda: published.append(wait())
        for step in (1, 2):
            publisher.publish(step, whole(trainer.train()))
        publisher.wait()
    assert [p.held_up for p in published if p] == [0, 5]


def test_a_failing_announcement_is_a_warning(store, toy, caplog):
    with Publisher(store, CONFIG, owner="test", notify=lambda version: 1 / 0) as publisher:
        publish(publisher, toy.Trainer())
    assert "published, but not announced" in caplog.text
    assert store.names("versions") == ["00000001"]


def test_follow_delivers_what_is_announced_and_survives_errors(store, toy, caplog):
    trainer, flaky = toy.Trainer(), toy.Flaky(store)
    stop, wake, delivered = threading.Event(), threading.Event(), []
    arrived = threading.Semaphore(0)

    def deliver(snapshot):
        delivered.append((snapshot.version, snapshot.step))
        arrived.release()

    subscriber = Subscriber(flaky, toy.wanted([], 0))
    options = {"stop": stop, "wake": wake, "seconds": 0.05}
    thread = threading.Thread(target=subscriber.follow, args=[deliver], kwargs=options)
    with Publisher(store, CONFIG, owner="test", notify=lambda _: wake.set()) as publisher:
        thread.start()
        for _ in range(3):
            flaky.countdown = 1
            publish(publisher, trainer)
            assert arrived.acquire(timeout=10)
        stop.set(), wake.set()
        thread.join(10)
    assert delivered == [(1, 1), (2, 2), (3, 3)]
    assert "the network is down" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"anchor_every": 0}, {"keep_anchors": 0}, {"chunk": 0}, {"workers": 0}, {"patience": 0}],
)
def test_bad_config_names_the_key(change):
    (key,) = change
    with pytest.raises(ConfigError, match=rf"^{key}: 0; legal: "):
        PublisherConfig(**change)


def test_bad_ranks_are_refused(store):
    with pytest.raises(ConfigError, match="rank: 2; legal: 0 to 1"):
        Publisher(store, CONFIG, owner="", rank=2, ranks=2, epoch=1)
    with pytest.raises(ConfigError, match="epoch: None on rank 1"):
        Publisher(store, CONFIG, owner="", rank=1, ranks=2)
    with pytest.raises(ConfigError, match="workers: 0"):
        Subscriber(store, {}, workers=0)
