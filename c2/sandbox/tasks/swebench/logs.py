"""What test programs print, as test -> "PASSED", "FAILED" or "SKIPPED".

Tests have the names that SWE-bench and its Multilingual set give them. Code under test can print
such lines too, so a log decides only where nothing is trained on it. A test that is there twice
has failed if it has failed once.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from typing import Literal

from c2.config import ConfigError

Status = Literal["PASSED", "FAILED", "SKIPPED"]
_STATUS: dict[str, Status] = {
    **dict.fromkeys(("ok", "OK", "pass", "PASS", "PASSED", "✓", "✔", ".", "passed"), "PASSED"),
    **dict.fromkeys(("XPASS", "XFAIL"), "PASSED"),  # so these sets count them
    **dict.fromkeys(("not ok", "err", "ERR", "FAIL", "FAILED", "ERROR"), "FAILED"),
    **dict.fromkeys(("✕", "×", "✘", "F", "E", "failed"), "FAILED"),
    **dict.fromkeys(("skip", "SKIP", "SKIPPED", "ignored", "ignore", "○", "↓", "↩"), "SKIPPED"),
    **dict.fromkeys(("S", "O", "P", "pending"), "SKIPPED"),
}  # fmt: skip

# The lines of programs that need no more than one; {end} stands for words of `_STATUS`.
_LINES = {
    "cargo": r"test (?P<name>\S+) \.\.\. (?P<end>ok|FAILED|ignored)(?:, .*)?",
    "go": r"--- (?P<end>PASS|FAIL|SKIP): (?P<name>.+) \(.+\)",
    "googletest": r".*\[ *(?P<end>OK|FAILED|SKIPPED) *\] (?P<name>.+?)(?:, where .*)? \(\d+ ms\)",
    "gradle": r"(?P<name>[^>].*\S) +(?P<end>PASSED|FAILED|SKIPPED)",
    "ant": r"\[junit\] +\[(?P<end>PASS|FAIL|ERR)\] +(?P<name>.*)",
    "jest": r"(?P<end>[✓✕○]) (?P<name>.+?)(?: \(\d+(?:\.\d+)? m?s\))?",
    "vitest": r"(?P<end>[✓×↓]) (?P<name>.+?)(?: \d+ *m?s| \[skipped\])?",
    "jq": r"(?P<end>PASS|FAIL|SKIP): (?P<name>.+)",
    "micropython": r"(?P<end>pass|FAIL|skip) +(?P<name>\S.*)",
    "minitest": r"(?P<name>\S+#.+?)\.? = \d+\.\d+ s = (?P<end>[.FES])",
    "redis": r"\[(?P<end>ok|err|skip|ignore)\]: (?P<name>.+?)(?: \(\d+ m?s\))?",
    "rspec": r"(?P<name>.+) - (?P<end>passed|failed|pending)",
    "tap": r"(?P<end>ok|not ok) \d+ (?P<name>.+)",
    "test-unit": r"(?:test: )?(?P<name>.+?):\s+(?P<end>[.EFOP])(?:: \(\d+\.\d+\))?",
}
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def parse(log: str, program: str) -> dict[str, Status]:
    """The tests in a log.

    Args:
      log: what the program printed, possibly with colours.
      program: one of `FORMATS`.

    Raises:
      ConfigError: for another program.
    """
    if program not in FORMATS:
        raise ConfigError(f"program: {program!r}; legal are {', '.join(FORMATS)}")
    lines = _COLOUR.sub("", log).splitlines()
    pairs = _WHOLE[program](lines) if program in _WHOLE else _matches(_LINES[program], lines)
    found: dict[str, Status] = {}
    for name, end in pairs:
        status = _STATUS[end]
        if found.get(name) != "FAILED":
            found[name] = status
    return found


def _matches(pattern: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if match := re.fullmatch(pattern, line.strip()):
            yield match["name"].strip(), match["end"]


def _pytest(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The short summary of `pytest -rA`, and the lines of `pytest -v`."""
    ends = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
    for line in lines:
        if match := re.fullmatch(rf"({ends}) (\S+?::.+|\S+\.py)", line.split(" - ", 1)[0].rstrip()):
            yield match[2], match[1]
        elif match := re.fullmatch(rf"(\S+?::.+?) ({ends})(?: +\[ *\d+%\])?", line.rstrip()):
            yield match[1], match[2]


def _phpunit(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The output of `phpunit --testdox`: a line for each class, then one for each test."""
    suite = ""
    for line in lines:
        if match := re.fullmatch(r"(\w.+) \(.+\)", line):
            suite = match[1]
        elif match := re.fullmatch(r"\s*([✔✘↩])\s*(.*?)(?:\s+\[\d+\.\d+ ms\])?", line):
            yield f"{suite} > {match[2]}", match[1]


def _maven(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Logs of `mvn test -Dtest=NAME`, one after the other: maven does not name what passes."""
    names: list[str] = []
    for line in lines:
        if match := re.search(r"-Dtest=(\S+)", line):
            names.append(match[1])
        elif (match := re.search(r"BUILD (SUCCESS|FAILURE)$", line.strip())) and names:
            yield names.pop(0), "PASSED" if match[1] == "SUCCESS" else "FAILED"


def _doctest(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The report of doctest for C++ with `-s -r=xml`."""
    text = "\n".join(lines)
    start, end = text.find("<doctest"), text.rfind("</doctest>")
    if start < 0 or end < 0:
        return
    try:
        root = ElementTree.fromstring(text[start : end + len("</doctest>")])
    except ElementTree.ParseError:
        return
    for case in root.iter("TestCase"):
        for part in case.iter("SubCase"):
            good = all(item.get("success") == "true" for item in part.iter("Expression"))
            yield f"{case.get('name')} > {part.get('name')}", "PASSED" if good else "FAILED"


_WHOLE = {"pytest": _pytest, "phpunit": _phpunit, "maven": _maven, "doctest": _doctest}
FORMATS = tuple(sorted({*_LINES, *_WHOLE}))
LANGUAGES = {
    "c": ("doctest", "googletest", "jq", "micropython", "redis"),
    "go": ("go",),
    "java": ("ant", "gradle", "maven"),
    "javascript": ("jest", "tap", "vitest"),
    "php": ("phpunit",),
    "python": ("pytest",),
    "ruby": ("minitest", "rspec", "test-unit"),
    "rust": ("cargo",),
}
