"""What to train on: sources, held-out package, tokenizer."""

import math
from dataclasses import dataclass

from c2.config import ConfigError

MIN_VOCAB = 512  # 256 bytes and the special tokens must fit, with room for some merges


@dataclass(frozen=True, kw_only=True)
class Source:
    """One origin of documents.

    Attributes:
      path: "stdlib" (the standard library of the running interpreter), "stdlib:PACKAGE", a
        directory, a file, an archive (`.tar.gz`, `.tgz`, `.zip`, `.whl`; read in place), or a glob
        over any of these.
      weight: share of the training tokens that come from this source, relative to the weights of
        the other sources. A small source with a large weight is simply repeated more often.
      license: licence of the documents. Empty: taken from the metadata of an archive, else
        "unknown".
    """

    path: str = "stdlib"
    weight: float = 1.0
    license: str = ""

    def __post_init__(self) -> None:
        """Checks what can be checked without touching the disk."""
        if not self.path:
            raise ConfigError('path: is empty; legal: "stdlib", a directory, an archive or a glob')
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(f"weight: {self.weight} is not legal; legal: a finite number > 0")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A corpus and its tokenizer.

    Attributes:
      sources: where documents come from; earlier sources win when documents are equal.
      held_out: package of the standard library ("multiprocessing", "xml.etree"), or a directory.
        Its files are never trained on; the codebase NLL is measured on them.
      tokenizer: path of a `tokenizer.json` to use; none trains one on the corpus.
      vocab_size: entries of the tokenizer to train, special tokens included.
      suffixes: endings of the file names that are read.
      max_file_bytes: larger files are left out; in practice they are generated tables.
      max_similarity: a document is a near duplicate of an earlier one if the Jaccard similarity of
        their token shingles reaches this; 1.0 removes only documents with equal shingles.
    """

    sources: tuple[Source, ...] = (Source(),)
    held_out: str = "multiprocessing"
    tokenizer: str | None = None
    vocab_size: int = 4096
    suffixes: tuple[str, ...] = (".py",)
    max_file_bytes: int = 500_000
    max_similarity: float = 0.8

    def __post_init__(self) -> None:
        """Checks what can be checked without touching the disk."""
        if not self.sources:
            raise ConfigError("sources: is empty; legal: at least one source")
        paths = [source.path for source in self.sources]
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise ConfigError(f"sources: {twice[0]!r} is listed twice; raise its weight instead")
        if not self.held_out:
            raise ConfigError("held_out: is empty; legal: a stdlib package or a directory")
        if self.vocab_size < MIN_VOCAB:
            raise ConfigError(
                f"vocab_size: {self.vocab_size} is too small; legal: {MIN_VOCAB} or more"
            )
        if not self.suffixes or not all(suffix.startswith(".") for suffix in self.suffixes):
            raise ConfigError(f'suffixes: {self.suffixes} is not legal; legal: e.g. [".py"]')
        if self.max_file_bytes < 1:
            raise ConfigError(f"max_file_bytes: {self.max_file_bytes} is not legal; legal: >= 1")
        if not 0 < self.max_similarity <= 1:
            raise ConfigError(
                f"max_similarity: {self.max_similarity} is not legal; legal: above 0, up to 1"
            )
