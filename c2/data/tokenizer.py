"""Byte-level BPE for code, trained with Hugging Face `tokenizers`, and its special tokens."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from c2.config import ConfigError
from c2.data.files import atomic

# In a tokenizer trained here, the id of a special token is its index in this list: append only.
SPECIALS = (
    "<|pad|>",  # fills rows; never seen by the model
    "<|end|>",  # opens and closes every document, so that a document's first token has a context
    "<|system|>",  # opens a turn of that role
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|think|>",  # inside an assistant turn: what follows is thinking
    "<|call|>",  # inside an assistant turn: what follows is a tool call
    "<|turn_end|>",  # closes a turn
)

# What a merge may not cross. A word may carry one sign or space in front (" name", ".name",
# "(name"); digits stay alone, so that numbers are spelled alike everywhere; a line break and the
# indentation behind it stay together, so that one token opens a line at its level.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|\s+"

# Everything besides the texts and the size that decides about a trained tokenizer.
RECIPE = (SPECIALS, _WORDS, tokenizers.__version__)

_BATCH = 64  # documents encoded at once: uses all cores and bounds the memory for the results
_PROBE = 'def F(x):\n\treturn {"é": x[0] != 10}\n\n\n    # two  spaces \n'


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A lossless tokenizer: `decode(encode(text)) == text`.

    Text never produces special tokens: "<|end|>" in a source file is encoded as ordinary signs.
    """

    backend: tokenizers.Tokenizer

    def __post_init__(self) -> None:
        """Adds the special tokens that a given tokenizer lacks, behind its own vocabulary."""
        missing = [name for name in SPECIALS if self.backend.token_to_id(name) is None]
        self.backend.add_special_tokens(missing)
        self.backend.encode_special_tokens = True
        self.backend.no_truncation()
        self.backend.no_padding()

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: what a model's embedding must at least have."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest type that holds all ids."""
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def special(self, name: str) -> int:
        """Id of a special token, named without its brackets: "end", "user", "turn_end"."""
        return self.backend.token_to_id(f"<|{name}|>")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Ids [tokens] of each text, of type `dtype`."""
        dtype = self.dtype
        for start in range(0, len(texts), _BATCH):
            batch = list(texts[start : start + _BATCH])
            for encoding in self.backend.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(encoding.ids, dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        return self.backend.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Writes a `tokenizer.json`, atomically."""
        with atomic(path) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")


def train(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE; the same texts in the same order give the same tokenizer.

    The result has fewer than `vocab_size` entries if the texts have too few repeated words.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)


def load(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json`.

    Raises:
      ConfigError: if the file is absent or corrupt, or if the tokenizer loses information.
    """
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"tokenizer: cannot read {str(path)!r}: {error.strerror}") from error
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise ConfigError(
            f"tokenizer: {str(path)!r} is corrupt or not a tokenizer.json: {error}"
        ) from error
    tokenizer = Tokenizer(backend)
    if tokenizer.decode(tokenizer.encode(_PROBE)) != _PROBE:
        raise ConfigError(
            f"tokenizer: {str(path)!r} does not reproduce code exactly; legal: a lossless "
            "tokenizer, e.g. byte-level BPE"
        )
    return tokenizer


def check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """Raises ConfigError if a model with `vocab` embeddings cannot hold the tokenizer."""
    if vocab < tokenizer.vocab_size:
        raise ConfigError(
            f"vocab: {vocab} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size}; legal: {tokenizer.vocab_size} or more"
        )
