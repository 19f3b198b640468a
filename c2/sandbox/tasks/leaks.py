"""Finds copies of a solution that an agent could reach outside of its repository."""

import hashlib
import json
import posixpath

from c2.sandbox.protocol import SandboxError
from c2.sandbox.tasks.grade import Run
from c2.sandbox.tasks.task import Solved

_SEARCH = """
import hashlib, json, os, sys
want = json.load(sys.stdin)
here = os.getcwd()
for place, folders, files in os.walk("/"):
    folders[:] = [
        name for name in folders
        if os.path.join(place, name) not in ("/proc", "/sys", "/dev", here)
    ]
    for name in set(folders) & want["packages"].keys():
        if any(os.path.exists(os.path.join(place, path)) for path in want["packages"][name]):
            print(json.dumps(os.path.join(place, name)))
    for name in files:
        path = os.path.join(place, name)
        try:
            if name in want["files"]:
                with open(path, "rb") as file:
                    digest = hashlib.sha256(file.read()).hexdigest()
                if digest in want["files"][name]:
                    print(json.dumps(path))
            packed = name.endswith((".whl", ".tar.gz", ".zip", ".tgz", ".egg"))
            if packed and any(name.lower().startswith(begin) for begin in want["archives"]):
                print(json.dumps(path))
        except OSError:
            pass
"""


def copies(solved: Solved, run: Run, project: str = "") -> list[str]:
    """Paths of whatever in a sandbox is, or may hold, a part of a solution.

    That are files with the content of a changed one, packages of the same name with a file where
    the solution changes one, and archives of the project. It takes some seconds.

    Args:
      solved: a task with its solution.
      run: gives sandboxes like those of agents, as to `grade`.
      project: its name on package indexes.

    Raises:
      SandboxError: if the search did not come to its end.
    """
    task = solved.task
    changed = [path for path, text in solved.solution.items() if task.files.get(path) != text]
    files: dict[str, list[str]] = {}
    for path in changed:
        digest = hashlib.sha256(solved.solution[path].encode(errors="surrogateescape"))
        files.setdefault(posixpath.basename(path), []).append(digest.hexdigest())
    packages: dict[str, list[str]] = {}
    for path in (path.removeprefix("src/") for path in changed):
        if "/" in path:
            packages.setdefault(path.partition("/")[0], []).append(path)
    request = {
        "files": files,
        "packages": packages,
        "archives": sorted({project.lower(), project.lower().replace("-", "_")} - {""}),
    }
    argv = ("python3", "-I", "-S", "-c", _SEARCH)
    result = run(argv, {}, json.dumps(request).encode())
    if not result.ok:
        raise SandboxError(f"the search for copies ended early: {result.stderr[-200:]!r}")
    return [json.loads(line) for line in result.stdout.splitlines()]
