"""Runs the pytest tests of a real project, which need fixtures, classes and files beside them.

Shipped as source text into a sandbox and run there with Python 3.9 or newer, without `site`. The
standard library and pytest come before the repository on the path, and neither plugins, ini files,
environment variables nor `sitecustomize` of anybody have an effect.

Unlike with `runner`, tests and code share a process: code that reaches into pytest can forge what
tests say. Two things bound that. Whoever ends the process early, or writes to descriptors, leaves
no verdict. And `grade` plants tests that must fail, so what makes all tests pass is found out.

Request, on standard input: {"nonce", "path": [folder, ..], "files": [test file, ..], "ids": [..] or
null for all, "seed": order of the tests or null}. Answer: the line {"nonce", "state": "ready"}
before any code of the repository runs, then {"nonce", "state": "done", "results": {id: "" or why it
did not pass}}; where all are asked for, a file that cannot be imported is among them.
"""

import json
import os
import random
import sys

MAX_WHY = 100
PHASES = ("setup", "call", "teardown")


def main():
    """Serves one request."""
    request = json.loads(sys.stdin.buffer.read())
    verdict = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # what tests print is no verdict
    os.environ.update(TZ="UTC", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.path += request["path"]
    import pytest

    def say(**answer):
        print(json.dumps({"nonce": request["nonce"], **answer}), file=verdict, flush=True)

    say(state="ready")
    sys.path += [os.getcwd(), os.path.join(os.getcwd(), "src")]
    recorder = Recorder(request["ids"], request["seed"])
    options = [
        "-q", "--tb=native", "-p", "no:cacheprovider", "-c", os.devnull,
        "--rootdir", os.getcwd(), "--confcutdir", os.getcwd(), "--continue-on-collection-errors",
    ]  # fmt: skip
    pytest.main([*options, *request["files"]], plugins=[recorder])
    say(state="done", results=recorder.results())
    os._exit(0)  # threads and exit handlers of the code have no say


class Recorder:
    """A plugin that chooses and orders tests and notes how each of them ended."""

    def __init__(self, ids, seed):
        self._ids, self._seed = ids and set(ids), seed
        self._reports, self._uncollected = {}, {}

    def pytest_collectreport(self, report):
        """Notes files that cannot be imported."""
        if report.failed:
            self._uncollected[report.nodeid] = _why(report)

    def pytest_collection_modifyitems(self, items):
        """Leaves the tests asked for, in the order asked for."""
        items.sort(key=lambda item: item.nodeid)
        if self._seed is not None:
            random.Random(self._seed).shuffle(items)
        if self._ids is not None:
            items[:] = [item for item in items if item.nodeid in self._ids]

    def pytest_runtest_logreport(self, report):
        """Notes how a phase of a test ended."""
        self._reports.setdefault(report.nodeid, []).append((report.when, _why(report)))

    def results(self):
        """Id -> "" if all phases passed, else why not."""
        results = {name: _whole(reports) for name, reports in self._reports.items()}
        if self._ids is None:
            return self._uncollected | results
        missing = self._ids - results.keys()
        return results | {
            name: f"not run: {self._uncollected.get(name.partition('::')[0], '')}"
            for name in missing
        }


def _whole(reports):
    """The first reason against a test; a phase that is missing is one, as is one too many."""
    if why := next((why for _, why in reports if why), ""):
        return why
    return "" if tuple(when for when, _ in reports) == PHASES else "it did not end"


def _why(report):
    if report.passed:
        return ""
    if report.skipped:
        return "skipped"
    lines = [line for line in str(report.longrepr).splitlines() if line and line[0] not in " \t"]
    words = " ".join((lines or ["failed"])[-1].split())
    return words[:MAX_WHY].encode("ascii", "replace").decode()


if __name__ == "__main__":
    main()
