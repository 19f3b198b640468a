"""What the change log of a project says of a release."""

import re
from collections.abc import Mapping

NAMES = r"(?i)^(docs/|docs/source/)?(change(s|log)?|history|news|versions)[^/]*$"
MAX_ENTRY = 3000


def entry(files: Mapping[str, str], version: str) -> str:
    """The lines below the heading with the version, up to the heading of another; "" if none.

    Args:
      files: of the release, path -> text.
      version: its number.
    """
    for path in sorted(path for path in files if re.match(NAMES, path)):
        lines = files[path].splitlines()
        heads = [number for number, line in enumerate(lines) if _is_heading(line)]
        own = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d]|\.\d)")
        for place, number in enumerate(heads):
            if own.search(lines[number]):
                end = heads[place + 1] if place + 1 < len(heads) else len(lines)
                return _tidy(lines[number + 1 : end])
    return ""


def _is_heading(line: str) -> bool:
    """A line that begins with a version, but for marks and a few words."""
    return bool(re.match(r"\W{0,4}(?:(?:version|release|\w+)\s+)?\W{0,3}v?\d+\.\d+", line, re.I))


def _tidy(lines: list[str]) -> str:
    kept = [line.rstrip() for line in lines if not re.fullmatch(r"\s*([-=~^*_#])\1{2,}\s*", line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    return text if len(text) <= MAX_ENTRY else text[:MAX_ENTRY].rpartition("\n")[0]
