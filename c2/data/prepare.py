"""From a `DataConfig` to tokenised documents, with everything slow cached in the workdir."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from c2.config import ConfigError
from c2.data import corpus, sft, store, tokenizer
from c2.data.config import DataConfig
from c2.data.corpus import Corpus
from c2.data.files import atomic
from c2.data.store import TokenStore
from c2.data.tokenizer import Tokenizer
from c2.parallel.processes import first_before_others


@dataclass(frozen=True)
class Prepared:
    """What training and evaluation read.

    Attributes:
      config: what it was made from.
      corpus: training documents and the held-out package, as text.
      tokenizer: the given tokenizer, or one trained on the training documents.
      documents: the training documents, tokenised.
      cache: folder of the cached files.
    """

    config: DataConfig
    corpus: Corpus
    tokenizer: Tokenizer
    documents: TokenStore
    cache: Path

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each source, in the order of the config."""
        return tuple(source.weight for source in self.config.sources)

    def of(self, kind: Literal["code", "fine_tuning"]) -> tuple[TokenStore, Sequence[float]]:
        """Documents to train on and the weights of their sources, see `c2.training.pretrain`."""
        return (self.documents if kind == "code" else self.fine_tuning()), self.weights

    def fine_tuning(self) -> TokenStore:
        """Fine-tuning examples from the training documents, tokenised and cached.

        Raises:
          ConfigError: if no document has a documented Python function.
        """
        settings = ("sft", sft.INSTRUCTION, self.tokenizer.to_json())
        mark = store.fingerprint(self.corpus.documents, *settings)

        def build() -> TokenStore:
            found = sft.examples(self.corpus.documents)
            if not found:
                raise ConfigError("sources: no Python function with a docstring to fine-tune on")
            return sft.tokenize(found, self.tokenizer, _paths(self.config), mark)

        with first_before_others("fine-tuning examples"):
            return store.cached(self.cache / "fine_tuning.npz", mark, build)


def prepare(config: DataConfig, cache: Path) -> Prepared:
    """Builds or reuses the corpus, `tokenizer.json` and the tokenised documents in `cache`.

    Cached files that were made from other documents or settings, or that are damaged, are rebuilt;
    where several processes share a run and `cache`, by process 0 for all.

    Raises:
      ConfigError: for whatever is wrong with the sources, the held-out package or the tokenizer.
    """
    built = corpus.build(config)
    with first_before_others("documents"):
        words = _tokenizer(config, built, cache)
        mark = store.fingerprint(built.documents, "documents", words.to_json())
        documents = store.cached(
            cache / "documents.npz",
            mark,
            lambda: store.tokenize(built.documents, words, _paths(config), mark),
        )
    return Prepared(config, built, words, documents, cache)


def _paths(config: DataConfig) -> list[str]:
    return [source.path for source in config.sources]


def _tokenizer(config: DataConfig, built: Corpus, cache: Path) -> Tokenizer:
    """The given tokenizer, or a trained one; either is found in the cache afterwards."""
    path = cache / "tokenizer.json"
    if config.tokenizer is not None:
        given = tokenizer.load(Path(config.tokenizer).expanduser())
        given.save(path)
        return given
    mark = store.fingerprint(built.documents, "tokenizer", config.vocab_size, tokenizer.RECIPE)
    stamp = cache / "tokenizer.stamp"  # tells what the file beside it was trained on
    try:
        reused = tokenizer.load(path)
        if stamp.read_text(encoding="utf-8") == _stamp(mark, reused):
            return reused
    except (OSError, UnicodeDecodeError, ConfigError):
        pass  # absent or damaged
    trained = tokenizer.train([document.text for document in built.documents], config.vocab_size)
    trained.save(path)
    with atomic(stamp) as temporary:
        temporary.write_text(_stamp(mark, trained), encoding="utf-8")
    return trained


def _stamp(mark: str, made: Tokenizer) -> str:
    return store.fingerprint((), mark, made.to_json())
