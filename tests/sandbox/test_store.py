"""Layers of a node: how long they stay, and when they are deleted."""

import time
from pathlib import Path

import pytest

from c2.sandbox.protocol import SandboxError
from c2.sandbox.store import MAX_UNUSED, Store


@pytest.fixture
def store(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("content")
    return Store(tmp_path / "layers", None, ())


@pytest.fixture
def add(store, tmp_path):
    """Makes a layer; its name and its folder."""

    def made() -> tuple[str, Path]:
        name = store.add(str(tmp_path / "source"), "/repo")["layer"]
        return name, Path(store.folder(name)["folder"])

    return made


def test_a_layer_stays_as_long_as_it_is_used(store, add):
    (used, folder), (other, gone) = add(), add()
    store.use("box", [used])
    store.drop(used)
    store.drop(other)
    assert list(store.unused) == [gone] and (gone / "repo/file").exists()  # nobody waits for it
    with pytest.raises(SandboxError, match=f"there is no '{other}'"):
        store.use("second", [other])
    store.clear()
    assert not gone.exists() and not store.unused
    store.release("box")
    assert list(store.unused) == [folder]
    store.clear()
    assert not folder.exists()


def test_only_so_many_wait_to_be_deleted(store, add):
    made = [add() for _ in range(MAX_UNUSED + 3)]
    for name, _ in made:
        store.drop(name)
    assert [folder.exists() for _, folder in made] == [False] * 3 + [True] * MAX_UNUSED


def test_a_node_deletes_them_when_it_is_at_rest(bwrap, tmp_path):
    (tmp_path / "file").touch()
    layer = bwrap.add_layer(str(tmp_path))
    folder = Path(bwrap.layer_folder(layer))
    assert folder.exists()
    bwrap.drop_layer(layer)
    end = time.monotonic() + 20
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not folder.exists()
