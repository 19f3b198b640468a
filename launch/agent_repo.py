"""A person's repository for an agent: a copy that goes into a sandbox, and a patch that comes out.

What comes out was written by whatever ran inside, so it is only ever handled as bytes: no git and
no other program looks at it here.
"""

import difflib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from c2.sandbox.protocol import WORKDIR, Backend, Handle

# History and what tools make of the source; much to copy, and of no use inside.
LEFT_OUT = (
    ".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".tox", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".hypothesis",
)  # fmt: skip
MAX_TEXT = 1 << 18  # bytes of a file that is searched or shown as text
MAX_FILE = 1 << 24


def copy(source: Path, target: Path) -> list[str]:
    """Copies a repository; returns what was left out at its top."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return sorted({*LEFT_OUT} & {path.name for path in source.iterdir()})


def texts(folder: Path) -> dict[str, str]:
    """The text files of a folder: path -> text."""
    found = {}
    for path, _ in _files(folder):
        data = (folder / path).read_bytes()
        if len(data) <= MAX_TEXT and b"\0" not in data:
            found[path] = data.decode(errors="replace")
    return found


@dataclass(frozen=True)
class Changes:
    """What a sandbox has changed in its repository.

    Attributes:
      files: path -> content, None for what was deleted.
      skipped: paths of links, of files larger than `MAX_FILE`, and with names that no patch should
        hold. The names are untrusted.
    """

    files: dict[str, bytes | None]
    skipped: list[str]


def changes(backend: Backend, handle: Handle, before: Path) -> Changes:
    """Compares the repository of a sandbox with the folder that it was made of.

    Files with the size and time of the original are taken for unchanged, and folders that are not
    copied are not looked at.
    """
    old = dict(_files(before))
    found: dict[str, bytes | None] = {}
    seen, skipped, folders = set(), [], [""]
    while folders:
        folder = folders.pop()
        for name, info in backend.list_dir(handle, f"{WORKDIR}/{folder}").items():
            path = folder + name
            seen.add(path)
            if name in LEFT_OUT or (info.kind == "link" and os.path.lexists(before / path)):
                continue
            if "/" in name or not _is_sound(path) or info.kind not in ("file", "folder"):
                skipped.append(path)
            elif info.kind == "folder":
                folders.append(f"{path}/")
            elif info.size > MAX_FILE:
                skipped.append(path)
            elif old.get(path) != (info.size, info.mtime_ns):
                found[path] = backend.read(handle, f"{WORKDIR}/{path}", limit=MAX_FILE)
    found |= {path: None for path in old.keys() - seen}
    files = {
        path: data
        for path, data in sorted(found.items())
        if path not in old or data != (before / path).read_bytes()
    }
    return Changes(files, sorted(skipped))


def patch(before: Path, changed: Mapping[str, bytes | None]) -> tuple[str, list[str]]:
    """A patch in git's format, and the paths that it cannot hold because they are no text."""
    parts, binary = [], []
    for path, data in changed.items():
        original = before / path
        old = original.read_bytes() if original.is_file() else None
        try:
            parts.append(_file_patch(path, _text(old), _text(data)))
        except UnicodeDecodeError:
            binary.append(path)
    return "".join(parts), binary


def _is_sound(path: str) -> bool:
    """Whether a path is printable and stays below; sandboxes can send any."""
    parts = path.split("/")
    return path.isprintable() and len(path) < 1000 and not {"", ".", ".."} & set(parts)


def _files(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            info = path.lstat()
            if stat.S_ISREG(info.st_mode):
                yield path.relative_to(folder).as_posix(), (info.st_size, info.st_mtime_ns)


def _text(data: bytes | None) -> str | None:
    if data is not None and b"\0" in data:
        raise UnicodeDecodeError("utf-8", data, 0, 1, "a zero byte")
    return None if data is None else data.decode()


def _file_patch(path: str, old: str | None, new: str | None) -> str:
    kind = "new file mode 100644\n" * (old is None) + "deleted file mode 100644\n" * (new is None)
    head = f"diff --git a/{path} b/{path}\n{kind}"
    names = (
        "/dev/null" if old is None else f"a/{path}",
        "/dev/null" if new is None else f"b/{path}",
    )
    lines = difflib.unified_diff(_lines(old), _lines(new), *names)
    return head + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str | None) -> list[str]:
    return [] if not text else text.replace("\n", "\n\0").removesuffix("\0").split("\0")
