"""Builds the training corpus and the held-out code base from a `DataConfig`."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from c2.config import ConfigError, suggestion
from c2.data.config import DataConfig, Source
from c2.data.dedup import deduplicate
from c2.data.readers import STDLIB, Document, Limits, package, packages, read


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and the held-out code base, each sorted by path within a source.

    Attributes:
      documents: training documents, in the order of the configured sources.
      held_out: the files of the held-out package, in alphabetical order.
      dropped: number of files left out, by reason.
    """

    documents: tuple[Document, ...]
    held_out: tuple[Document, ...]
    dropped: dict[str, int]

    def table(self) -> list[dict[str, str | int]]:
        """Documents and bytes for every source and licence, the held-out package last."""
        counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        named = [(document.source, document) for document in self.documents]
        named += [(f"held out: {document.source}", document) for document in self.held_out]
        for source, document in named:
            entry = counts[source, document.license]
            entry[0] += 1
            entry[1] += len(document.text.encode("utf-8"))
        return [
            {"source": source, "license": license_name, "documents": count, "bytes": size}
            for (source, license_name), (count, size) in counts.items()
        ]


def build(config: DataConfig) -> Corpus:
    """Reads, filters and deduplicates everything; takes seconds for 10 MB.

    Raises:
      ConfigError: for an unreadable or empty source, or an unknown held-out package.
    """
    limits = Limits(config.suffixes, config.max_file_bytes)
    held_out, held_out_folder = _held_out(config.held_out, limits)
    dropped: Counter[str] = Counter()
    documents: list[Document] = []
    for source in config.sources:
        found, lost = read(source, limits, without=held_out_folder)
        dropped += lost
        if not found:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(lost.items()))
            raise ConfigError(
                f"sources: {source.path!r} is empty: no usable file ending in "
                f"{' or '.join(config.suffixes)}" + (f" ({reasons})" if reasons else "")
            )
        documents += found
    indices, lost = deduplicate(
        [document.text for document in documents],
        [document.text for document in held_out],
        config.max_similarity,
    )
    documents = [documents[index] for index in indices]
    present = {document.source for document in documents}
    for source in config.sources:
        if source.path not in present:
            raise ConfigError(
                f"sources: every file of {source.path!r} duplicates an earlier source or the "
                "held-out package; remove this source"
            )
    return Corpus(tuple(documents), tuple(held_out), dict(sorted((dropped + lost).items())))


def _held_out(name: str, limits: Limits) -> tuple[list[Document], Path]:
    """The files of the held-out package, and its folder."""
    folder = package(name)
    path = f"{STDLIB}:{name}" if folder else name
    folder = folder or Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"held_out: {name!r} is neither a package of the {STDLIB} nor a directory;"
            f"{suggestion(name, packages())} legal packages: {', '.join(packages())}"
        )
    documents, _ = read(Source(path=path), limits)
    if not documents:
        raise ConfigError(
            f"held_out: {name!r} is empty: no usable file ending in {' or '.join(limits.suffixes)}"
        )
    return documents, folder.resolve()
