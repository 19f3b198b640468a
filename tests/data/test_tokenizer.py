import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from c2.config import ConfigError
from c2.data.config import Source
from c2.data.readers import Limits, read
from c2.data.tokenizer import SPECIALS, Tokenizer, check_vocab, load, train

TEXTS = [file.text for file in read(Source(path="stdlib:json"), Limits((".py",), 10**6))[0]]
TRAINED = train(TEXTS, 600)

# Half arbitrary Unicode, half what code is made of, special tokens included.
PIECES = st.one_of(
    st.text(),
    st.sampled_from(["    ", "\n", "\t", "\r\n", " x", "self._name", "1024", "é", *SPECIALS]),
)
TEXT = st.lists(PIECES, max_size=20).map("".join)


@given(TEXT)
@settings(max_examples=300, deadline=None)
def test_round_trip_without_special_tokens(text):
    ids = TRAINED.encode(text)
    assert TRAINED.decode(ids) == text
    assert all(len(SPECIALS) <= i < TRAINED.vocab_size for i in ids)


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_line_break_is_a_token_boundary(before, after):
    before, after = before.rstrip(), f"\n{after}"
    assert TRAINED.encode(before + after) == TRAINED.encode(before) + TRAINED.encode(after)


def test_batches_equal_single_texts():
    texts = [f"{text}{number}" for number, text in enumerate(TEXTS * 20)]
    encoded = list(TRAINED.encode_all(texts))
    assert len(encoded) == len(texts) > 64
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.dtype == np.uint16
        assert ids.tolist() == TRAINED.encode(text)


def test_ids_of_special_tokens():
    assert [TRAINED.special(name.strip("<|>")) for name in SPECIALS] == list(range(len(SPECIALS)))
    assert TRAINED.decode([TRAINED.special("user"), *TRAINED.encode("hi")]) == "<|user|>hi"


def test_tokens_of_code():
    tokens = [TRAINED.decode([i]) for i in TRAINED.encode("\n    return 12\n")]
    assert tokens == ["\n    ", "return", " ", "1", "2", "\n"]


def test_training_is_deterministic_and_depends_on_the_texts():
    assert train(TEXTS, 600).to_json() == TRAINED.to_json()
    assert train(TEXTS[:2], 600).to_json() != TRAINED.to_json()
    assert TRAINED.vocab_size == 600
    assert train(["short"], 600).vocab_size < 600


def test_save_and_load(tmp_path):
    TRAINED.save(tmp_path / "new" / "tokenizer.json")
    loaded = load(tmp_path / "new" / "tokenizer.json")
    assert loaded.to_json() == TRAINED.to_json()
    assert loaded.encode("<|end|> x") == TRAINED.encode("<|end|> x")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tokenizer.json"]


def byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def test_given_tokenizer_gets_the_missing_special_tokens_at_the_end(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "given.json"))
    tokenizer = load(tmp_path / "given.json")
    assert tokenizer.special("end") == 0
    assert tokenizer.special("pad") == 300
    assert tokenizer.vocab_size == 300 + len(SPECIALS) - 1
    assert len(tokenizer.encode("not truncated any more")) > 3


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"garbage", b"\xff\xfe", TRAINED.to_json().encode()[:-100]]
)
def test_corrupt_file(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^tokenizer: .*tokenizer.json' is corrupt or not a"):
        load(path)


def test_missing_file():
    with pytest.raises(ConfigError, match=r"^tokenizer: cannot read '/no/such.json': No such file"):
        load(Path("/no/such.json"))


@pytest.mark.parametrize(
    "normalizer",
    [{"type": "Lowercase"}, {"type": "Replace", "pattern": {"String": "\t"}, "content": " "}],
)
def test_lossy_tokenizer_is_refused(tmp_path, normalizer):
    backend = json.loads(byte_level().to_str())
    (tmp_path / "lossy.json").write_text(json.dumps(backend | {"normalizer": normalizer}))
    with pytest.raises(ConfigError, match="does not reproduce code exactly; legal: a lossless"):
        load(tmp_path / "lossy.json")


def test_model_must_hold_the_tokenizer():
    check_vocab(TRAINED, 600)
    with pytest.raises(ConfigError, match=r"^vocab: 599 is smaller .* 600; legal: 600"):
        check_vocab(TRAINED, 599)


def test_large_vocabularies_need_wider_ids():
    backend = byte_level()
    backend.add_tokens([f"token{number}" for number in range(2**16)])
    assert Tokenizer(backend).dtype == np.uint32
