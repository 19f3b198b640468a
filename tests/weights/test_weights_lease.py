"""One writer at a time, dead ones are followed, and slow ones are kept out."""

import pytest

from c2.config import ConfigError
from c2.weights.lease import HeldError, Lease
from c2.weights.store import open_store

SECONDS = 0.4


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


def test_a_second_writer_is_refused_and_told_who_writes(store):
    lease = Lease.acquire(store, "trainer on host a", SECONDS)
    with pytest.raises(HeldError, match="trainer on host a writes this chain"):
        Lease.acquire(store, "b", SECONDS)
    lease.check()
    lease.release()
    assert Lease.acquire(store, "b", 1000.0).epoch == 2  # at once


def die(lease):
    """Stops the signs of life, as SIGKILL does."""
    lease._released.set()
    lease._thread.join()
    lease._released.clear()


def test_a_dead_writer_is_followed_and_cannot_come_back(store):
    dead = Lease.acquire(store, "a", SECONDS)
    die(dead)
    dead.check()  # it does not know yet
    lease = Lease.acquire(store, "b", SECONDS)
    assert lease.epoch == dead.epoch + 1
    with pytest.raises(HeldError, match="no longer holds"):
        dead.check()
    lease.check()
    lease.release()


def test_of_two_newcomers_one_wins(store):
    class Slow:
        """Another newcomer gets in between the look and the creation."""

        def __getattr__(self, name):
            return getattr(store, name)

        def create(self, name, data):
            store.create(name, b"the faster one")
            store.create(name, data)

    with pytest.raises(HeldError, match="has just become the writer"):
        Lease.acquire(Slow(), "a", SECONDS)


def test_a_released_lease_no_longer_holds(store):
    lease = Lease.acquire(store, "a", SECONDS)
    lease.release()
    lease.release()
    with pytest.raises(HeldError):
        lease.check()


def test_a_store_without_conditional_writes_is_refused(store):
    class Careless:
        def __getattr__(self, name):
            return getattr(store, name)

        def create(self, name, data):
            store.write(name, data)

    with pytest.raises(ConfigError, match="ignores If-None-Match"):
        Lease.acquire(Careless(), "a", SECONDS)


def test_a_sign_of_life_that_fails_is_no_end(store, caplog):
    class Down:
        def __init__(self):
            self.failed = False

        def __getattr__(self, name):
            return getattr(store, name)

        def write(self, name, data):
            if not self.failed:
                self.failed = True
                raise OSError("timeout")
            store.write(name, data)

    down = Down()
    lease = Lease.acquire(down, "a", SECONDS)
    with pytest.raises(HeldError):  # sees a later sign of life
        Lease.acquire(store, "b", 2 * SECONDS)
    lease.release()
    assert down.failed
    assert "no sign of life" in caplog.text


def test_bad_seconds_are_refused(store):
    with pytest.raises(ConfigError, match=r"lease_seconds: 0.*legal: above 0"):
        Lease.acquire(store, "a", 0)
