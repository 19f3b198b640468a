"""Tools that are served on this side of the walls: a list of things to do, and searches."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from c2.config import ConfigError
from c2.sandbox.protocol import ToolError
from c2.sandbox.tools import calls
from c2.sandbox.tools.index import Index
from c2.sandbox.tools.toolset import Tool

MAX_ITEMS = 50
MAX_COUNT = 20
_MARKS = {"open": "[ ]", "doing": "[~]", "done": "[x]"}


class TodoList:
    """The tool `todo`.

    Attributes:
      items: the list as it is now; a reward may look for what was left undone.
    """

    def __init__(self) -> None:
        self.items: tuple[calls.TodoItem, ...] = ()

    def tool(self) -> Tool:
        """The tool."""
        return Tool(calls.Todo, self.replace)

    def replace(self, call: calls.Todo) -> str:
        """As `calls.Todo`."""
        if len(call.items) > MAX_ITEMS:
            raise ToolError(f"items: {len(call.items)}; at most {MAX_ITEMS} are legal")
        self.items = call.items
        return self.text() or "the list is empty"

    def text(self) -> str:
        """The list, one line each."""
        return "\n".join(f"{_MARKS[item.state]} {item.text}" for item in self.items)


def semantic_search_tool(index: Index) -> Tool:
    """The tool `semantic_search` on an index that many rollouts may share."""

    def run(call: calls.SemanticSearch) -> str:
        found = index.search(call.query, _count(call.count))
        pieces = [f"{hit.path}:{hit.first}-{hit.last}\n{hit.text}" for hit in found]
        return "\n\n".join(pieces) or "nothing found"

    return Tool(calls.SemanticSearch, run, reads_only=True)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A result of a web search."""

    title: str
    url: str
    excerpt: str


class WebSearch(Protocol):
    """An adapter to a search service. It needs no key of the agent's and sees only the query."""

    def search(self, query: str, count: int) -> Sequence[Page]:
        """The best pages first; raises `ToolError` if the service does not answer."""


class RecordedSearch:
    """Answers from a file, so that training and tests see the same web every time.

    The file has one JSON object in each line: {"query": ..., "pages": [{"title", "url", "excerpt"},
    ...]}. A query that is not there, in whatever case and spacing, finds nothing.
    """

    def __init__(self, path: Path) -> None:
        self._pages: dict[str, list[Page]] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                pages = [Page(**page) for page in record["pages"]]
                self._pages[_normal(record["query"])] = pages
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(f"{path}: line {number} is no recorded search") from error

    def search(self, query: str, count: int) -> Sequence[Page]:
        """As `WebSearch.search`."""
        return self._pages.get(_normal(query), [])[:count]


def web_search_tool(web: WebSearch) -> Tool:
    """The tool `web_search`."""

    def run(call: calls.WebSearch) -> str:
        pages = web.search(call.query, _count(call.count))
        return "\n\n".join(f"{p.title}\n{p.url}\n{p.excerpt}" for p in pages) or "nothing found"

    return Tool(calls.WebSearch, run, reads_only=True)


def _count(count: int) -> int:
    if not 1 <= count <= MAX_COUNT:
        raise ToolError(f"count: {count}; legal are 1 to {MAX_COUNT}")
    return count


def _normal(query: str) -> str:
    return " ".join(query.lower().split())
