"""Tokenised documents as flat arrays, and their cache on disk."""

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from c2.data.files import atomic
from c2.data.readers import Document
from c2.data.tokenizer import Tokenizer

FORMAT = 1  # raise when the meaning of the arrays changes, so that old caches are rebuilt


@dataclass(frozen=True, eq=False)
class TokenStore:
    """All tokens of all documents.

    Attributes:
      tokens: uint16 or uint32 [token], document after document.
      offsets: int64 [document + 1], where each document starts.
      prompts: int32 [document], how many leading tokens are a prompt: given, not to be learned.
      sources: int32 [document], index of the document's source in the config.
      fingerprint: hash of everything that the arrays were made from.
      weights: float [token], what each token counts as a target, or None: 1 behind the prompt.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompts: np.ndarray
    sources: np.ndarray
    fingerprint: str
    weights: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """int64 [document]: number of tokens."""
        return np.diff(self.offsets)


def from_documents(
    documents: Iterable[tuple[np.ndarray, int, int]], dtype: type, fingerprint: str
) -> TokenStore:
    """Joins documents given as (tokens, length of the prompt, index of the source)."""
    tokens, prompts, sources = [], [], []
    for ids, prompt, source in documents:
        tokens.append(ids)
        prompts.append(prompt)
        sources.append(source)
    return TokenStore(
        np.concatenate([np.zeros(0, dtype), *tokens]),
        np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        np.array(prompts, np.int32),
        np.array(sources, np.int32),
        fingerprint,
    )


def fingerprint(documents: Sequence[Document], *settings: object) -> str:
    """Hash of documents and of whatever else decides about the result."""
    digest = hashlib.blake2b(repr((FORMAT, settings)).encode("utf-8"), digest_size=16)
    for document in documents:
        for part in (document.source, document.path, document.text):
            data = part.encode("utf-8")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def tokenize(
    documents: Sequence[Document], tokenizer: Tokenizer, sources: Sequence[str], mark: str
) -> TokenStore:
    """Tokenises plain documents: <|end|> text <|end|>.

    Args:
      documents: what to tokenise.
      tokenizer: how.
      sources: the paths of the configured sources.
      mark: the fingerprint to put on the result.
    """
    end = np.array([tokenizer.special("end")], tokenizer.dtype)
    encoded = tokenizer.encode_all([document.text for document in documents])
    index = {path: number for number, path in enumerate(sources)}
    rows = (
        (np.concatenate([end, ids, end]), 0, index[document.source])
        for document, ids in zip(documents, encoded, strict=True)
    )
    return from_documents(rows, tokenizer.dtype, mark)


def cached(path: Path, mark: str, build: Callable[[], TokenStore]) -> TokenStore:
    """The store at `path` if it is intact and bears the fingerprint `mark`; else builds it there.

    The file is an uncompressed `.npz`, whose arrays carry checksums: a torn or altered file is
    rebuilt, like one that was made from other documents.
    """
    store = _load(path)
    if store is None or store.fingerprint != mark:
        store = build()
        _save(store, path)
    return store


def _load(path: Path) -> TokenStore | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return TokenStore(
                *(arrays[name] for name in ("tokens", "offsets", "prompts", "sources")),
                str(arrays["fingerprint"]),
                arrays.get("weights"),
            )
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _save(store: TokenStore, path: Path) -> None:
    with atomic(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **{name: x for name, x in vars(store).items() if x is not None})
