"""The arguments of all tools: what a model is told, and what its calls have to fit."""

from dataclasses import dataclass
from typing import Literal

from c2.sandbox.tools.schema import argument

_PATHS = ("file_path", "filename", "file")


@dataclass(frozen=True, kw_only=True)
class ReadFile:
    """Shows lines of a text file, each with its number and "|" in front."""

    path: str = argument("path of the file", aliases=_PATHS)
    first: int = argument("first line to show, counted from 1", 1, aliases=("offset", "start"))
    last: int = argument("last line to show; 0 means the end of the file", 0, aliases=("end",))


@dataclass(frozen=True, kw_only=True)
class ListDir:
    """Lists a folder; the names of folders in it end in "/"."""

    path: str = argument("path of the folder", ".", aliases=("dir", "folder"))


@dataclass(frozen=True, kw_only=True)
class Grep:
    """Finds the lines that match a regular expression, in all text files below a folder."""

    pattern: str = argument("regular expression", aliases=("regex", "query"))
    path: str = argument("folder or file to search", ".", aliases=("dir", "folder"))
    glob: str = argument('only files whose path fits, such as "*.py"', "*", aliases=("include",))


@dataclass(frozen=True, kw_only=True)
class WriteFile:
    """Writes a file, new or over an old one, and makes its folders."""

    path: str = argument("path of the file", aliases=_PATHS)
    text: str = argument("all of its text", aliases=("content", "contents"), body=True)


@dataclass(frozen=True, kw_only=True)
class EditFile:
    """Replaces a piece of text that is in a file exactly once."""

    path: str = argument("path of the file", aliases=_PATHS)
    old: str = argument("the text to replace, as it stands", aliases=("old_string",), body=True)
    new: str = argument("what comes in its place", aliases=("new_string",), body=True)


@dataclass(frozen=True, kw_only=True)
class EditLines:
    """Replaces lines of a file; `last` one less than `first` puts the text in front of `first`."""

    path: str = argument("path of the file", aliases=_PATHS)
    first: int = argument("first line to replace, counted from 1", aliases=("start",))
    last: int = argument("last line to replace", aliases=("end",))
    text: str = argument("what comes in their place; its last newline is optional", body=True)


@dataclass(frozen=True, kw_only=True)
class RunTests:
    """Runs the tests of the repository."""


@dataclass(frozen=True, kw_only=True)
class Shell:
    """Runs a shell command in the repository's folder and shows what it prints.

    Each command has a shell of its own. In the background it goes on after the answer; `job` shows
    its output and ends it.
    """

    command: str = argument("the command", aliases=("cmd", "script"), body=True)
    timeout_s: float = argument("seconds after which it is killed", 60.0, aliases=("timeout",))
    background: bool = argument("whether not to wait for its end", False)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Shows the state and output of a command in the background, or kills it."""

    number: int = argument("number that `shell` gave", aliases=("job", "id"))
    kill: bool = argument("whether to kill it", False)


@dataclass(frozen=True, kw_only=True)
class TodoItem:
    """One thing to do."""

    text: str = argument("what is to be done", aliases=("content", "task"))
    state: Literal["open", "doing", "done"] = argument("how far it is", "open", aliases=("status",))


@dataclass(frozen=True, kw_only=True)
class Todo:
    """Replaces your list of things to do; it is kept when the conversation is summarised."""

    items: tuple[TodoItem, ...] = argument("the whole list, in order", aliases=("todos",))


@dataclass(frozen=True, kw_only=True)
class SemanticSearch:
    """Finds the pieces of the repository, as it was at the beginning, that fit a description."""

    query: str = argument("what to look for, in words", aliases=("q",))
    count: int = argument("how many pieces, 1 to 20", 5, aliases=("limit", "k"))


@dataclass(frozen=True, kw_only=True)
class WebSearch:
    """Searches the web and shows titles, addresses and excerpts."""

    query: str = argument("what to search for", aliases=("q",))
    count: int = argument("how many results, 1 to 20", 5, aliases=("limit", "k"))
