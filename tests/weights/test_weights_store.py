"""The promises of a store, on a folder and on a file system of fsspec."""

import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from c2.weights.store import ObjectStore, open_store


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path, new_store):
    return open_store(str(tmp_path / "run")) if request.param == "folder" else new_store()


def test_objects_come_back_whole_and_in_ranges(store):
    store.write("blobs/a", b"0123456")
    assert store.read("blobs/a") == b"0123456"
    assert store.read("blobs/a", 2, 5) == b"234"
    assert store.read("blobs/a", 5, 99) == b"56"
    store.write("blobs/a", b"new")
    assert store.read("blobs/a") == b"new"


def test_names_are_sorted_and_those_of_one_folder(store):
    assert store.names("blobs") == []
    for name in ("blobs/2", "blobs/10", "parts/1"):
        store.write(name, b"x")
    assert store.names("blobs") == ["10", "2"]
    store.remove("blobs/2")
    store.remove("blobs/2")
    assert store.names("blobs") == ["10"]


def test_create_never_replaces(store):
    store.create("versions/1", b"first")
    with pytest.raises(FileExistsError):
        store.create("versions/1", b"second")
    assert store.read("versions/1") == b"first"


def test_what_is_not_there_is_said(store):
    with pytest.raises(FileNotFoundError):
        store.read("versions/1")


def test_half_an_object_never_appears(tmp_path):
    """A full disk, as far as a file can tell."""
    store = open_store(str(tmp_path))
    store.write("blobs/a", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for name in ("blobs/a", "blobs/b"):
            with pytest.raises(OSError, match="too large"):
                store.write(name, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert store.names("blobs") == ["a"]
    assert store.read("blobs/a") == b"old"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_one_of_many_creators_wins(tmp_path):
    store, won = open_store(str(tmp_path)), []
    start = threading.Barrier(8)

    def create(number):
        start.wait()
        try:
            store.create("writer/1", b"%d" % number)
            won.append(b"%d" % number)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [store.read("writer/1")]


def test_sweep_removes_what_a_killed_writer_left(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    with monkeypatch.context() as killed:
        killed.setattr(os, "fsync", lambda _: 1 / 0)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(ZeroDivisionError):
            store.write("blobs/a", b"half")
    (left,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert store.names("blobs") == []
    store.sweep()
    assert not left.exists()


def test_errors_of_a_file_system_are_oserrors():
    class Broken:
        def invalidate_cache(self):
            pass

        def cat_file(self, path, **_):
            raise RuntimeError("endpoint unreachable")

    with pytest.raises(OSError, match=r"bucket/run/blobs/a: RuntimeError: endpoint unreachable"):
        ObjectStore(Broken(), "bucket/run").read("blobs/a")
