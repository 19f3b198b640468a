import numpy as np
import pytest

from c2.config import ConfigError
from c2.data import prepare as module
from c2.data import sft, tokenizer
from c2.data.config import DataConfig, Source
from c2.data.prepare import prepare

CONFIG = DataConfig(
    sources=(Source(path="stdlib:json", weight=2.0), Source(path="stdlib:xml")),
    held_out="xml.etree",
    vocab_size=600,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare(CONFIG, folder).fine_tuning()
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def forbid_building(monkeypatch):
    for place, name in [(tokenizer, "train"), (module.store, "tokenize"), (sft, "tokenize")]:
        monkeypatch.setattr(place, name, lambda *_: pytest.fail("built again"))


def test_contents(cache):
    prepared = prepare(CONFIG, cache)
    assert prepared.tokenizer.vocab_size == 600
    assert prepared.weights == (2.0, 1.0)
    assert len(prepared.documents.lengths) == len(prepared.corpus.documents)
    store = prepared.documents
    for index, document in enumerate(prepared.corpus.documents):
        ids = store.tokens[store.offsets[index] + 1 : store.offsets[index + 1] - 1]
        assert prepared.tokenizer.decode(ids) == document.text
        assert CONFIG.sources[store.sources[index]].path == document.source
        assert not document.path.startswith("xml/etree")
    assert set(contents(cache)) == {
        "documents.npz", "fine_tuning.npz", "tokenizer.json", "tokenizer.stamp"
    }  # fmt: skip


def test_second_start_builds_nothing(cache, monkeypatch):
    before = contents(cache)
    forbid_building(monkeypatch)
    prepare(CONFIG, cache).fine_tuning()
    assert contents(cache) == before


@pytest.mark.parametrize(
    "name", ["documents.npz", "fine_tuning.npz", "tokenizer.json", "tokenizer.stamp"]
)
@pytest.mark.parametrize("damage", ["torn", "absent"])
def test_damaged_file_is_made_again(cache, name, damage):
    before = contents(cache)
    (cache / name).unlink()
    if damage == "torn":
        (cache / name).write_bytes(before[name][: len(before[name]) // 2])
    prepare(CONFIG, cache).fine_tuning()
    assert contents(cache) == before


def test_exchanged_tokenizer_is_not_trusted(cache):
    before = contents(cache)
    tokenizer.train(["something else"], 512).save(cache / "tokenizer.json")
    prepare(CONFIG, cache)
    assert contents(cache) == before


def test_changed_documents_change_everything(tmp_path):
    def config():
        return DataConfig(sources=(Source(path=str(tmp_path / "code")),), held_out="json")

    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "m.py"
    file.write_text('def f():\n    """One."""\n    return 1\n' * 2)
    one = prepare(config(), tmp_path / "cache")
    one_fine_tuning = one.fine_tuning()
    file.write_text('def f():\n    """Two."""\n    return 2\n' * 2)
    two = prepare(config(), tmp_path / "cache")
    assert one.documents.fingerprint != two.documents.fingerprint
    assert one_fine_tuning.fingerprint != two.fine_tuning().fingerprint
    ids = two.documents.tokens[1:-1]
    assert two.tokenizer.decode(ids) == file.read_text()


def test_given_tokenizer(cache, tmp_path):
    given = tokenizer.train(["given = 1\n"] * 3, 512)
    given.save(tmp_path / "given.json")
    config = DataConfig(
        sources=CONFIG.sources, held_out=CONFIG.held_out, tokenizer=str(tmp_path / "given.json")
    )
    prepared = prepare(config, tmp_path / "cache")
    assert prepared.tokenizer.to_json() == given.to_json()
    assert (tmp_path / "cache" / "tokenizer.json").read_text() == given.to_json()
    trained = prepare(CONFIG, cache)
    assert not np.array_equal(prepared.documents.tokens, trained.documents.tokens)


def test_nothing_to_fine_tune_on(tmp_path):
    (tmp_path / "m.py").write_text("x = 1\n")
    config = DataConfig(sources=(Source(path=str(tmp_path / "m.py")),), held_out="json")
    with pytest.raises(ConfigError, match=r"^sources: no Python function with a docstring"):
        prepare(config, tmp_path / "cache").fine_tuning()
