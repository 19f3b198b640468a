"""The tables of the README are about tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOMS = ("rl", "agent", "sandbox")


def tables() -> list[list[tuple[str, list[tuple[str, str]]]]]:
    """Per table the rows: what goes wrong, and (file, part of a name) of its tests."""
    found = []
    for part in (HERE / "README.md").read_text().split("\n## ")[1:]:
        rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
        named = []
        for what, _, tests in rows[2:]:
            files = re.findall(r"(\w+): ((?:`\w+`(?:, )?)+)", tests)
            pairs = [(file, name) for file, names in files for name in re.findall(r"\w+", names)]
            named.append((what.strip(), pairs))
        found.append(named)
    return found


def test_every_threat_has_a_test():
    failures, hacks = tables()
    assert [int(what.partition(".")[0]) for what, _ in failures] == list(range(1, 19))
    assert len(hacks) >= 13
    files = [path for room in ROOMS for path in (HERE.parent / room).rglob("test_*.py")]
    code = {path.stem: path.read_text() for path in files}
    for what, tests in failures + hacks:
        assert tests, what
        for file, name in tests:
            assert re.search(rf"^def test_\w*{name}\w*\(", code[f"test_{file}"], re.MULTILINE), name
