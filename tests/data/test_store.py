import errno
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from c2.data.files import atomic
from c2.data.readers import Document
from c2.data.store import TokenStore, cached, fingerprint, from_documents, tokenize
from c2.data.tokenizer import train


def make(mark="mark", values=(1, 2, 3)):
    documents = [(np.array(values, np.uint16), 1, 0), (np.array([7], np.uint16), 0, 2)]
    return from_documents(documents, np.uint16, mark)


def assert_equal(a: TokenStore, b: TokenStore):
    for name, value in vars(a).items():
        np.testing.assert_array_equal(value, getattr(b, name), strict=name != "fingerprint")


def test_layout():
    store = make()
    assert store.tokens.tolist() == [1, 2, 3, 7] and store.tokens.dtype == np.uint16
    assert store.offsets.tolist() == [0, 3, 4]
    assert store.lengths.tolist() == [3, 1]
    assert store.prompts.tolist() == [1, 0]
    assert store.sources.tolist() == [0, 2]
    assert from_documents([], np.uint32, "").lengths.tolist() == []


def test_documents_are_enclosed_in_end_tokens():
    tokenizer = train(["x = 1\n"], 512)
    documents = [Document("b", "1.py", "x = 1\n", ""), Document("a", "2.py", "<|end|>", "")]
    store = tokenize(documents, tokenizer, ["a", "b"], "mark")
    end = tokenizer.special("end")
    first, second = np.split(store.tokens, store.offsets[1:-1])
    for ids, document in zip((first, second), documents, strict=True):
        assert ids[0] == ids[-1] == end
        assert tokenizer.decode(ids[1:-1]) == document.text
        assert end not in ids[1:-1]
    assert store.sources.tolist() == [1, 0]
    assert store.prompts.tolist() == [0, 0]


def test_cache_is_reused(tmp_path):
    path = tmp_path / "new" / "store.npz"
    assert_equal(cached(path, "mark", make), make())
    assert_equal(cached(path, "mark", lambda: pytest.fail("built again")), make())
    assert [file.name for file in path.parent.iterdir()] == ["store.npz"]


def test_weights_of_tokens_are_cached_too(tmp_path):
    path, weights = tmp_path / "store.npz", np.array([1, 0.5, 0, 1], np.float16)
    weighted = replace(make(), weights=weights)
    cached(path, "mark", lambda: weighted)
    assert_equal(cached(path, "mark", lambda: pytest.fail("built again")), weighted)


def test_stale_cache_is_rebuilt(tmp_path):
    path = tmp_path / "store.npz"
    cached(path, "mark", make)
    other = make("other", (4, 5))
    assert_equal(cached(path, "other", lambda: other), other)
    assert_equal(cached(path, "other", lambda: pytest.fail("built again")), other)


def test_damaged_cache_is_rebuilt(tmp_path):
    path = tmp_path / "store.npz"
    good = make(values=range(1000))
    cached(path, "mark", lambda: good)
    content = path.read_bytes()
    where = content.index(good.tokens.tobytes()) + 500
    flipped = bytearray(content)
    flipped[where] ^= 1
    damaged = [b"", b"garbage", content[: len(content) // 2], content[:-1], bytes(flipped)]
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("unrelated", b"")
    damaged.append((tmp_path / "other.zip").read_bytes())
    for bad in damaged:
        path.write_bytes(bad)
        assert_equal(cached(path, "mark", lambda: good), good)
        assert path.read_bytes() == content


def test_failed_build_or_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "store.npz"
    cached(path, "mark", make)
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        cached(path, "other", lambda: 1 // 0)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(OSError, match=r"No space left on device: .*store\.npz"),
        atomic(path) as half,
    ):
        half.write_text("half")
        raise full
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["store.npz"]


def test_fingerprint_depends_on_every_part():
    document = Document("source", "path", "text", "license")
    base = fingerprint([document], "setting")
    others = [
        fingerprint([], "setting"),
        fingerprint([document], "other"),
        fingerprint([document, document], "setting"),
        fingerprint([Document("sourcep", "ath", "text", "license")], "setting"),
        fingerprint([Document("source", "path", "text2", "license")], "setting"),
    ]
    assert len({base, *others}) == 6
    assert fingerprint([document], "setting") == base
