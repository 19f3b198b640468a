"""Tools on files, and the two places where files can be: a sandbox, or a dict in memory."""

import bisect
import fnmatch
import importlib.resources
import itertools
import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

from c2.sandbox.protocol import WORKDIR, Backend, Handle, ToolError
from c2.sandbox.tasks.task import is_plain_path
from c2.sandbox.tools import calls, search_files
from c2.sandbox.tools.toolset import Tool

MAX_FILE = 1 << 22  # bytes of a file that tools read
GREP_S = 20.0
MAX_REPEATS = 3  # in a pattern that is searched for in memory
MAX_PLACES = 10  # that a refused edit names
_ROOM = 100  # bytes of an answer kept free for the line that says how to read on


class Files(Protocol):
    """Where files are. Calls raise `ToolError` if they cannot be done."""

    def read(self, path: str) -> bytes:
        """All of a regular file."""

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, making its folders."""

    def names(self, path: str) -> list[str]:
        """What is in a folder; names of folders end in "/"."""

    def grep(self, pattern: str, path: str, glob: str) -> str:
        """Matching lines as `search_files.Hits.text` shows them."""


def file_tools(files: Files, max_result: int) -> list[Tool]:
    """All tools on files; answers of read_file have at most `max_result` bytes."""
    return [
        Tool(calls.ReadFile, partial(read_file, files, max_result), reads_only=True),
        Tool(calls.ListDir, partial(list_dir, files), reads_only=True),
        Tool(calls.Grep, lambda c: files.grep(c.pattern, c.path, c.glob), reads_only=True),
        Tool(calls.WriteFile, partial(write_file, files)),
        Tool(calls.EditFile, partial(edit_file, files)),
        Tool(calls.EditLines, partial(edit_lines, files)),
    ]


def read_file(files: Files, max_result: int, call: calls.ReadFile) -> str:
    """As `calls.ReadFile`; as many lines as fit, then how to go on."""
    data = files.read(call.path)
    if b"\0" in data:
        raise ToolError(f"{call.path} is no text: it has zero bytes")
    lines = [line.rstrip("\r\n") for line in _lines(data.decode(errors="replace"))]
    first, last = call.first, min(call.last or len(lines), len(lines))
    if not (1 <= first <= max(last, 1)) or call.last < 0:
        wanted = f"lines {first} to {call.last or len(lines)}"
        raise ToolError(f"{wanted}; {call.path} has 1 to {len(lines)}")
    shown, room = [], max_result - _ROOM
    for number, line in enumerate(lines[first - 1 : last], first):
        text = f"{number}|{line}"
        room -= len(text.encode()) + 1
        if room < 0 and shown:
            shown.append(f"[lines {first} to {number - 1} of {len(lines)}; go on at {number}]")
            break
        shown.append(text)
    return "\n".join(shown)


def list_dir(files: Files, call: calls.ListDir) -> str:
    """As `calls.ListDir`."""
    return "\n".join(sorted(files.names(call.path))) or "nothing is in it"


def write_file(files: Files, call: calls.WriteFile) -> str:
    """As `calls.WriteFile`."""
    files.write(call.path, call.text.encode())
    return "ok"


def edit_file(files: Files, call: calls.EditFile) -> str:
    """As `calls.EditFile`; line ends are matched as one, and stay those of the file."""
    text = _text(files, call.path)
    found = _places(text, _unix(call.old))
    if len(found) != 1:
        numbers = [str(text.count("\n", 0, start) + 1) for start, _ in found[:MAX_PLACES]]
        where = f", at lines {', '.join(numbers)}" if found else ""
        count = f"more than {MAX_PLACES}" if len(found) > MAX_PLACES else len(found)
        raise ToolError(f"old text is in {call.path} {count} times{where}; it has to be there once")
    start, end = found[0]
    new = _unix(call.new).replace("\n", _line_end(text[start:end]) or _line_end(text) or "\n")
    _put(files, call.path, text[:start] + new + text[end:])
    return "ok"


def edit_lines(files: Files, call: calls.EditLines) -> str:
    """As `calls.EditLines`."""
    text = _text(files, call.path)
    lines, first, last = _lines(text), call.first, call.last
    if not (1 <= first <= len(lines) + 1 and first - 1 <= last <= len(lines)):
        raise ToolError(f"lines {first} to {last}; {call.path} has 1 to {len(lines)}")
    end = _line_end(text) or "\n"
    new = [line.rstrip("\n") + end for line in _lines(_unix(call.text))]
    if new and first > 1 and not lines[first - 2].endswith("\n"):
        lines[first - 2] += end
    lines[first - 1 : last] = new
    _put(files, call.path, "".join(lines))
    return "ok"


class SandboxFiles:
    """Files of a sandbox; relative paths start at the repository, and its walls are the limits."""

    def __init__(self, backend: Backend, handle: Handle) -> None:
        self._backend, self._handle = backend, handle

    def read(self, path: str) -> bytes:
        """As `Files.read`."""
        data = self._backend.read(self._handle, _inside(path), limit=MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ToolError(f"{path} has more than {MAX_FILE} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        """As `Files.write`."""
        self._backend.write(self._handle, _inside(path), data)

    def names(self, path: str) -> list[str]:
        """As `Files.names`."""
        listed = self._backend.list_dir(self._handle, _inside(path))
        return [name + "/" * (stat.kind == "folder") for name, stat in listed.items()]

    def grep(self, pattern: str, path: str, glob: str) -> str:
        """As `Files.grep`; ripgrep searches if the sandbox has it, else Python."""
        source = importlib.resources.files("c2.sandbox.tools").joinpath("search_files.py")
        program = ["python3", "-I", "-S", "-B", "-c", source.read_text()]
        result = self._backend.exec(
            self._handle, [*program, pattern, path, glob], timeout_s=GREP_S, max_output=1 << 16
        )
        if result.timed_out:
            raise ToolError(f"the search took more than {GREP_S:.0f} s")
        if not result.ok:
            raise ToolError(result.error or result.stderr.decode(errors="replace").strip()[-500:])
        return result.stdout.decode(errors="replace")


class MemoryFiles:
    """Files in a dict, path -> text, for tasks that trusted code runs by the million.

    Attributes:
      texts: path -> text; paths are relative. Bytes that are not UTF-8 are surrogates.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = dict(texts)

    def read(self, path: str) -> bytes:
        """As `Files.read`."""
        if path not in self.texts:
            raise ToolError(f"no file {path}")
        return self.texts[path].encode(errors="surrogateescape")

    def write(self, path: str, data: bytes) -> None:
        """As `Files.write`."""
        if not is_plain_path(path):
            raise ToolError(f"path {path!r}; legal are relative paths without '..'")
        self.texts[path] = data.decode(errors="surrogateescape")

    def names(self, path: str) -> list[str]:
        """As `Files.names`."""
        below = "" if path in ("", ".") else path.rstrip("/") + "/"
        inside = [name[len(below) :] for name in self.texts if name.startswith(below)]
        if not inside:
            raise ToolError(f"no folder {path}")
        return list({name.partition("/")[0] + "/" * ("/" in name) for name in inside})

    def grep(self, pattern: str, path: str, glob: str) -> str:
        """As `Files.grep`; this runs in our own process, so patterns have to be simple."""
        if re.search(r"\)[*+?{]", pattern) or len(re.findall(r"[*+{]", pattern)) > MAX_REPEATS:
            raise ToolError(
                f"pattern {pattern!r}; legal are {MAX_REPEATS} repetitions, none of them of a group"
            )
        try:
            search = re.compile(pattern).search
        except (re.error, OverflowError, RecursionError) as error:
            raise ToolError(f"pattern {pattern!r}: {error}") from error
        below = "" if path in ("", ".") else path.rstrip("/") + "/"
        names = [name for name in sorted(self.texts) if name == path or name.startswith(below)]
        if not names:
            raise ToolError(f"no file or folder {path}")
        hits = search_files.Hits()
        for name in names:
            if fnmatch.fnmatchcase(name, glob) and not search_files.search_text(
                hits, name, self.texts[name], search
            ):
                break
        return hits.text()


def _inside(path: str) -> str:
    return posixpath.normpath(posixpath.join(WORKDIR, path))


def _text(files: Files, path: str) -> str:
    return files.read(path).decode(errors="surrogateescape")


def _put(files: Files, path: str, text: str) -> None:
    files.write(path, text.encode(errors="surrogateescape"))


def _lines(text: str) -> list[str]:
    """Lines with their ends; only a newline ends one, as in every editor and in ripgrep."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _places(text: str, old: str) -> list[tuple[int, int]]:
    """The first places of a text, and one more than are named; overlapping ones count.

    Line ends of the text match as one sign, however they are written. No regular expression: what a
    model chose could keep one busy for hours.
    """
    ends = [at - number for number, at in enumerate(_finds(text, "\r\n", 2))]  # after `_unix`
    starts = itertools.islice(_finds(_unix(text), old, 1), MAX_PLACES + 1) if old else ()
    spans = ((at, at + len(old)) for at in starts)
    return [tuple(at + bisect.bisect_left(ends, at) for at in span) for span in spans]


def _finds(text: str, part: str, step: int) -> Iterator[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + step)


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def _line_end(text: str) -> str:
    """How the first line of a text ends; "" if it has one line only."""
    at = text.find("\n")
    return "" if at < 0 else "\r\n" if text[at - 1 : at] == "\r" else "\n"
