"""Reads source files from the standard library, directories, globs and archives.

Nothing is unpacked to disk and nothing is executed. Every reader yields `Document`s in the order of
their paths, so that the corpus does not depend on the file system.
"""

import email.parser
import glob
import os
import sysconfig
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from c2.config import ConfigError, suggestion
from c2.data.config import Source

STDLIB = "stdlib"
STDLIB_LICENSE = "PSF-2.0"
ARCHIVES = (".tar.gz", ".tgz", ".zip", ".whl")

# Left out of the standard library. The test suites are 60% of its bytes and would dominate it; the
# others are generated data, not code: pydoc_data is the manual as string literals, encodings is
# nine tenths character tables, html.entities is one table, _sysconfigdata and config-* tell how
# this interpreter was compiled (with the paths of that machine).
STDLIB_EXCLUDED = (
    "test", "tests", "idle_test", "pydoc_data", "encodings", "entities.py", "_sysconfigdata*",
    "config-*",
)  # fmt: skip
# Not the code base's own work in any directory; hidden folders (.git, .venv) are left out as well.
ALWAYS_EXCLUDED = (".*", "__pycache__", "site-packages", "dist-packages", "node_modules")


@dataclass(frozen=True)
class Document:
    """One file: `path` is relative to its source, `source` is the path of the `Source`."""

    source: str
    path: str
    text: str
    license: str


@dataclass(frozen=True)
class Limits:
    """Which files are read."""

    suffixes: Sequence[str]
    max_bytes: int


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read(
    source: Source, limits: Limits, *, without: Path | None = None
) -> tuple[list[Document], Counter[str]]:
    """All documents of a source, sorted by path.

    Args:
      source: what to read.
      limits: which files to read.
      without: files below this folder are skipped without being counted.

    Returns:
      The documents, and how many files were dropped for each reason.

    Raises:
      ConfigError: if the path does not exist or an archive cannot be read.
    """
    dropped: Counter[str] = Counter()
    documents = []
    try:
        files = list(_files(source, limits, without, dropped))
    except OSError as error:
        raise ConfigError(f"sources: cannot read {source.path!r}: {error}") from error
    for name, data, license_found in files:
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            dropped["not UTF-8"] += 1
            continue
        if not text.strip():
            dropped["empty"] += 1
            continue
        license_name = source.license or license_found or "unknown"
        documents.append(Document(source.path, name, text, license_name))
    return sorted(documents, key=lambda document: document.path), dropped


def package(name: str) -> Path | None:
    """Folder of a package of the standard library such as "xml.etree", if there is one."""
    parts = name.split(".")
    folder = stdlib_root().joinpath(*parts)
    found = all(map(str.isidentifier, parts)) and (folder / "__init__.py").is_file()
    return folder if found else None


def packages() -> list[str]:
    """Names of the top-level packages of the standard library."""
    return sorted(path.name for path in stdlib_root().iterdir() if package(path.name))


def _files(
    source: Source, limits: Limits, without: Path | None, dropped: Counter[str]
) -> Iterator[tuple[str, bytes, str]]:
    """Yields (name, content, licence) of the wanted files of a source."""

    def wanted(name: str, size: int) -> bool:
        if not name.endswith(tuple(limits.suffixes)):
            return False
        if size > limits.max_bytes:
            dropped["too large"] += 1
        return size <= limits.max_bytes

    if source.path == STDLIB or source.path.startswith(f"{STDLIB}:"):
        root = _stdlib_folder(source.path)
        for path in _walk(root, without, STDLIB_EXCLUDED):
            if wanted(path.name, path.stat().st_size):
                yield path.relative_to(stdlib_root()).as_posix(), path.read_bytes(), STDLIB_LICENSE
        return
    base, matches = _expand(source.path)
    for match in matches:
        if match.name.endswith(ARCHIVES):
            members, license_name = _archive(match, wanted)
            prefix = match.relative_to(base)
            for name, data in members:
                yield (prefix / name).as_posix(), data, license_name
            continue
        for path in _walk(match, without) if match.is_dir() else [match]:
            if wanted(path.name, path.stat().st_size) and not _below(path, without):
                yield path.relative_to(base).as_posix(), path.read_bytes(), ""


def _stdlib_folder(path: str) -> Path:
    _, _, name = path.partition(":")
    folder = package(name) if name else stdlib_root()
    if folder is None or not folder.is_dir():
        raise ConfigError(
            f"sources: cannot read {path!r}: no such package;{suggestion(name, packages())} "
            f"legal after '{STDLIB}:': {', '.join(packages())}"
        )
    return folder


def _expand(path: str) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the sorted matches of a path or glob."""
    here = Path(path).expanduser()
    if here.exists():
        return (here if here.is_dir() else here.parent), [here]
    matches = sorted(Path(match) for match in glob.glob(str(here), recursive=True))
    if not matches:
        raise ConfigError(
            f"sources: cannot read {path!r}: no such file; legal: {STDLIB!r}, a directory, a file, "
            f"an archive ({', '.join(ARCHIVES)}), or a glob that matches some"
        )
    base = Path(os.path.commonpath([match.parent for match in matches]))
    # A glob with ** matches folders and the files in them: keep each file once.
    folders = {match for match in matches if match.is_dir()}
    return base, [match for match in matches if not folders.intersection(match.parents)]


def _below(path: Path, folder: Path | None) -> bool:
    return folder is not None and path.resolve().is_relative_to(folder)


def _walk(root: Path, without: Path | None, excluded: Sequence[str] = ()) -> Iterator[Path]:
    """The files below a folder, in the order of their names."""
    patterns = (*ALWAYS_EXCLUDED, *excluded)

    def kept(name: str) -> bool:
        return not any(fnmatch(name, pattern) for pattern in patterns)

    def refuse(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        here = Path(folder)
        subfolders[:] = sorted(s for s in subfolders if kept(s) and not _below(here / s, without))
        yield from (here / name for name in sorted(names) if kept(name) and (here / name).is_file())


def _archive(path: Path, wanted: Callable[[str, int], bool]) -> tuple[list[tuple[str, bytes]], str]:
    """Wanted members of an archive, and the licence that its package metadata declare."""
    members, metadata = [], {}
    members_of = _tar_members if path.name.endswith((".tar.gz", ".tgz")) else _zip_members
    try:
        for name, size, load in members_of(path):
            if wanted(name, size):
                members.append((name, load()))
            elif _is_metadata(name) and size < 1_000_000:
                metadata[name] = load()
    except (EOFError, RuntimeError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"sources: cannot read the archive {str(path)!r}: {error}") from error
    nearest = min(metadata, key=lambda name: (name.count("/"), name), default=None)
    return members, _license(metadata[nearest]) if nearest else ""


def _tar_members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                yield member.name, member.size, archive.extractfile(member).read


def _zip_members(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                yield member.filename, member.file_size, lambda m=member: archive.read(m)


def _is_metadata(name: str) -> bool:
    return name.endswith(("/PKG-INFO", ".dist-info/METADATA"))


def _license(metadata: bytes) -> str:
    """The licence named by PKG-INFO or METADATA, in the order in which the fields were replaced."""
    fields = email.parser.Parser().parsestr(metadata.decode("utf-8", "replace"), headersonly=True)
    if expression := fields.get("License-Expression"):
        return expression.strip()
    classifiers = [value for value in fields.get_all("Classifier", []) if "License ::" in value]
    if classifiers:
        return "; ".join(value.rpartition("::")[2].strip() for value in classifiers)
    stated = (fields.get("License") or "").strip().splitlines()
    # Some packages paste the whole text of the licence here; its first line names it.
    return stated[0].strip() if stated and stated[0].strip() != "UNKNOWN" else ""
