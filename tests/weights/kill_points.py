"""Kills processes that publish and read, and looks what they served and what is left.

One that does both is killed before every operation; two that read a share each, before random ones,
again and again while a third one publishes. Run by `test_weights_kills`, in a process of its own:
this one forks before it has any thread. Prints the number of kill points, and of killed readers.
"""

import contextlib
import hashlib
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

from c2.weights.manifest import BrokenLinkError
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.shards import Want, wants, whole
from c2.weights.store import Folder, open_store
from c2.weights.subscriber import Subscriber

CONFIG = {"anchor_every": 2, "keep_anchors": 1, "chunk": 50}
STEPS = (1, 2, 3)
LAST = 100
RANKS = ({"a": (0, 4), "b": (0, 2)}, {"a": (4, 10), "b": (2, 3)})  # rows of each
OPERATIONS = [(os, "fsync"), (os, "link"), (os, "replace"), (os, "unlink")]
OPERATIONS += [(Folder, "read"), (Folder, "names")]


def state(step):
    """Weights of a step: few of them differ between neighbours."""
    weights = np.random.default_rng(0).integers(0, 2**16, 120, np.uint16)
    weights[:: 7 + step] += np.uint16(step)
    return {"a": weights.reshape(10, 12), "b": weights[:3].astype(np.float32)}


def digest(tensors):
    """Hash of all bytes."""
    return hashlib.sha256(b"".join(x.tobytes() for _, x in sorted(tensors.items()))).hexdigest()


def victim(folder, kill_at):
    """Publishes and reads, notes what it serves, and dies before operation number ``kill_at``."""
    count = 0

    def deadly(operation):
        def counted(*args, **options):
            nonlocal count
            count += 1
            if count == kill_at:
                if operation is fsync:  # of a file: only half of it has reached the disk
                    size = os.fstat(args[0]).st_size
                    if Path(f"/proc/self/fd/{args[0]}").is_file():
                        os.ftruncate(args[0], size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **options)

        return counted

    fsync = os.fsync
    for owner, name in OPERATIONS:
        setattr(owner, name, deadly(getattr(owner, name)))
    store = open_store(f"{folder}/chain")
    subscriber = Subscriber(store, wants(state(0)))
    with Publisher(store, PublisherConfig(lease_seconds=60.0, **CONFIG), owner="victim") as writer:
        for step in STEPS:
            writer.publish(step, whole(state(step)))
            writer.wait()
            subscriber.poll()
            with open(f"{folder}/served", "a") as file:
                file.write(f"{subscriber.current.step} {digest(subscriber.current.tensors)}\n")


def check(folder):
    """What the victim served and a newcomer serves was published; after a retry, the newest."""
    store = open_store(f"{folder}/chain")
    served = Path(f"{folder}/served")
    for line in served.read_text().splitlines() if served.exists() else []:
        step, hashed = line.split()
        assert digest(state(int(step))) == hashed, line
    early = Subscriber(store, wants(state(0)))
    if early.poll():
        assert early.current.step in STEPS
        assert digest(early.current.tensors) == digest(state(early.current.step))
    with Publisher(store, PublisherConfig(lease_seconds=0.02, **CONFIG), owner="next") as writer:
        writer.publish(LAST, whole(state(LAST)))
    for subscriber in (early, Subscriber(store, wants(state(0)))):
        subscriber.poll()
        assert subscriber.current.step == LAST
        assert digest(subscriber.current.tensors) == digest(state(LAST))
    assert list(Path(folder, "chain", ".unfinished").iterdir()) == []


def started(function, *args):
    """The id of a child that runs a function."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*args)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return pid


def in_child(function, *args):
    """The wait status of such a child."""
    return os.waitpid(started(function, *args), 0)[1]


def publish_steadily(folder):
    """Twenty versions."""
    with Publisher(open_store(folder), PublisherConfig(**CONFIG), owner="test") as writer:
        for step in [*range(1, 20), LAST]:
            writer.publish(step, whole(state(step)))


def rows_of(rank, step):
    """What a reader should have of a step."""
    return {name: state(step)[name][slice(*rows)] for name, rows in RANKS[rank].items()}


def follow(folder, rank, kill_at):
    """Reads its rows of every version, notes what it serves, and dies before read ``kill_at``."""
    read, count = Folder.read, 0

    def deadly(*args):
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(*args)

    Folder.read = deadly
    forms = {name: (str(x.dtype), x.shape) for name, x in state(0).items()}
    want = {name: Want(*forms[name], *rows) for name, rows in RANKS[rank].items()}
    subscriber = Subscriber(open_store(folder), want)
    while subscriber.current is None or subscriber.current.step != LAST:
        with contextlib.suppress(BrokenLinkError, OSError):  # pruned while it was read
            if subscriber.poll():
                with open(f"{folder}/served-{rank}", "a") as file:
                    now = subscriber.current
                    file.write(f"{now.step} {digest(now.tensors)}\n")


def kill_readers(folder):
    """How many readers died while versions were published; then both read the last one."""
    rng, killed = random.Random(0), 0
    publisher = started(publish_steadily, folder)
    running = {publisher: None}
    running |= {started(follow, folder, rank, rng.randrange(1, 15)): rank for rank in (0, 1)}
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if status == signal.SIGKILL:
            killed += 1
            kill_at = rng.randrange(1, 15) if publisher in running else 0
            running[started(follow, folder, rank, kill_at)] = rank
        else:
            assert status == 0
    for rank in (0, 1):
        served = [line.split() for line in Path(folder, f"served-{rank}").read_text().splitlines()]
        assert all(digest(rows_of(rank, int(step))) == hashed for step, hashed in served)
        assert int(served[-1][0]) == LAST
    return killed


def main():
    """Goes on until the victim survives."""
    with tempfile.TemporaryDirectory() as folder:
        killed = kill_readers(folder)
    for kill_at in range(1, 1000):
        with tempfile.TemporaryDirectory() as folder:
            status = in_child(victim, folder, kill_at)
            assert status in (0, signal.SIGKILL), f"operation {kill_at}: the victim failed"
            assert in_child(check, folder) == 0, f"killed before operation {kill_at}"
        if status == 0:
            print(kill_at - 1, killed)
            return


if __name__ == "__main__":
    main()
