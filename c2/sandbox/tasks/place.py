"""A task's repository in a sandbox: how it goes in, and how it comes out."""

from collections.abc import Mapping

from c2.sandbox.jobs import end_all
from c2.sandbox.protocol import WORKDIR, Backend, Handle, SupportsJobs
from c2.sandbox.tasks.task import is_plain_path

MAX_FILE = 1 << 20  # bytes; larger ones are no solution to anything
MAX_FILES = 1000


def put(backend: Backend, handle: Handle, files: Mapping[str, str]) -> None:
    """Writes files, path -> text, into the working directory."""
    for path, text in files.items():
        backend.write(handle, f"{WORKDIR}/{path}", text.encode(errors="surrogateescape"))


def take(backend: Backend, handle: Handle) -> dict[str, str]:
    """The files of the working directory, path -> text, once all of the agent's jobs are dead.

    Nothing can change them while they are read. What is no regular file, larger than `MAX_FILE`, or
    named as no file of a task can be is left out, and so is all that follows `MAX_FILES` others.
    """
    if isinstance(backend, SupportsJobs):
        end_all(backend, handle)
    found: dict[str, str] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        for name, info in sorted(backend.list_dir(handle, f"{WORKDIR}/{folder}").items()):
            path = folder + name
            if not is_plain_path(path) or "/" in name:
                continue
            if info.kind == "folder":
                folders.append(f"{path}/")
            elif info.kind == "file" and info.size <= MAX_FILE and len(found) < MAX_FILES:
                data = backend.read(handle, f"{WORKDIR}/{path}", limit=MAX_FILE)
                found[path] = data.decode(errors="surrogateescape")
    return found
