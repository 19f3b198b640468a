import pytest

from c2.config import ConfigError, from_dict, override, to_dict
from c2.data.config import DataConfig, Source
from c2.data.corpus import build


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return str(folder)


def code(word):
    return f"def {word}(a, b):\n    {word}_sum = a + b\n    return {word}_sum * {word}(a, b)\n"


def test_sources_in_order_and_table(tmp_path):
    one = Source(path=write(tmp_path / "one", b=code("b"), a=code("a")), license="MIT")
    two = Source(path=write(tmp_path / "two", c=code("c"), a=code("a"), empty=""))
    corpus = build(DataConfig(sources=(one, two), held_out="json"))
    assert [(d.source, d.path) for d in corpus.documents] == [
        (one.path, "a.py"), (one.path, "b.py"), (two.path, "c.py")
    ]  # fmt: skip
    assert corpus.dropped == {"duplicate": 1, "empty": 1}
    size = len(code("a"))
    mit, unknown, held_out = corpus.table()
    assert mit == {"source": one.path, "license": "MIT", "documents": 2, "bytes": 2 * size}
    assert unknown == {"source": two.path, "license": "unknown", "documents": 1, "bytes": size}
    assert (held_out["source"], held_out["license"]) == ("held out: stdlib:json", "PSF-2.0")
    assert [d.path for d in corpus.held_out] == sorted(d.path for d in corpus.held_out)
    assert "json/decoder.py" in [d.path for d in corpus.held_out]


def test_held_out_package_is_not_trained_on():
    corpus = build(DataConfig(sources=(Source(path="stdlib:xml"),), held_out="xml.etree"))
    assert {d.path.split("/")[1] for d in corpus.documents} >= {"dom", "sax"}
    assert not any(d.path.startswith("xml/etree/") for d in corpus.documents)
    assert all(d.path.startswith("xml/etree/") for d in corpus.held_out)


def test_held_out_directory_inside_a_source(tmp_path):
    source = write(tmp_path / "all", a=code("a"), copy=code("h"))
    held_out = write(tmp_path / "all" / "sub", h=code("h"))
    corpus = build(DataConfig(sources=(Source(path=source),), held_out=held_out))
    assert [d.path for d in corpus.documents] == ["a.py"]
    assert [d.path for d in corpus.held_out] == ["h.py"]
    assert corpus.dropped == {"resembles held-out": 1}


def test_unknown_held_out_package():
    with pytest.raises(ConfigError, match=r"^held_out: 'emial' .* did you mean 'email'\? legal"):
        build(DataConfig(held_out="emial"))


def test_empty_source(tmp_path):
    path = write(tmp_path / "none", blank=" ")
    with pytest.raises(ConfigError, match=r"^sources: .* no usable file ending in .py \(1 empty\)"):
        build(DataConfig(sources=(Source(path=path),), held_out="json"))


def test_empty_held_out(tmp_path):
    path = write(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^held_out: .* is empty: no usable file"):
        build(DataConfig(held_out=path))


def test_source_that_is_a_copy_of_another(tmp_path):
    sources = tuple(Source(path=write(tmp_path / name, a=code("a"))) for name in ("one", "two"))
    with pytest.raises(ConfigError, match=r"every file of '.*two' duplicates"):
        build(DataConfig(sources=sources, held_out="json"))


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("sources=[]", "data.sources: is empty"),
        ('sources=[{"path": "a"}, {"path": "a"}]', "data.sources: 'a' is listed twice"),
        ("sources.0.weight=0", "data.sources.0.weight: 0.0 is not legal; legal: a finite number"),
        ("sources.0.weight=inf", "data.sources.0.weight: inf is not legal"),
        ("sources.0.path=", "data.sources.0.path: is empty"),
        ("held_out=", "data.held_out: is empty"),
        ("vocab_size=100", "data.vocab_size: 100 is too small; legal: 512 or more"),
        ('suffixes=["py"]', "data.suffixes: ('py',) is not legal"),
        ("max_file_bytes=0", "data.max_file_bytes: 0 is not legal"),
        ("max_similarity=1.5", "data.max_similarity: 1.5 is not legal"),
    ],
)
def test_illegal_config(assignment, message):
    with pytest.raises(ConfigError) as error:
        override(DataConfig(), [assignment], where="data")
    assert str(error.value).startswith(message)


def test_config_round_trip():
    config = DataConfig(sources=(Source(path="a", weight=2.0), Source()), tokenizer="t.json")
    assert from_dict(DataConfig, to_dict(config)) == config
