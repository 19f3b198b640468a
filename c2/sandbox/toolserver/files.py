"""File calls of the tool server. They run inside the sandbox, so its walls are their limits."""

import os
import stat

from .frames import MAX_DATA, pack, unpack

MAX_ENTRIES = 2000  # of one listing


class Refused(Exception):
    """A call that cannot be done; the message is one line for the caller."""


def read(path, offset=0, limit=MAX_DATA):
    """Up to `limit` bytes of a regular file from `offset` on, and the file's size."""
    # Without O_NONBLOCK a named pipe would hold up the server.
    fd = _open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        size = _size_of_regular(fd, path)
        data = os.pread(fd, min(limit, MAX_DATA), offset)
        return {"data": pack(data), "size": size}
    finally:
        os.close(fd)


def write(path, data, offset=None, mode=0o644):
    """Writes a file, making its folders: anew (`offset` None), or in place from `offset` on."""
    content = unpack(data)
    _os_call(path, os.makedirs, os.path.dirname(path) or ".", exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | (os.O_TRUNC if offset is None else 0)
    fd = _open(path, flags, mode)
    try:
        _size_of_regular(fd, path)
        position = offset or 0
        while content:
            done = _os_call(path, os.pwrite, fd, content, position)
            content, position = content[done:], position + done
        return {}
    finally:
        os.close(fd)


def stat_path(path):
    """What is at `path`, links not followed; kind None where nothing is."""
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"kind": None, "size": 0, "mode": 0, "mtime_ns": 0}
    except (OSError, ValueError) as error:
        raise Refused(_line(path, error)) from error
    return _describe(info)


def list_folder(path):
    """The entries of a folder, sorted by name; `truncated` when there are too many."""
    entries = []
    try:
        with os.scandir(path) as listing:
            for entry in listing:
                if len(entries) == MAX_ENTRIES:
                    return {"entries": sorted(entries, key=_name), "truncated": True}
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # gone in the meantime
                name = pack(os.fsencode(entry.name))
                entries.append(dict(_describe(info), name=name))
    except (OSError, ValueError) as error:
        raise Refused(_line(path, error)) from error
    return {"entries": sorted(entries, key=_name), "truncated": False}


def _name(entry):
    return unpack(entry["name"])


def _describe(info):
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    kind = next((name for test, name in kinds if test(info.st_mode)), "other")
    mode = stat.S_IMODE(info.st_mode)
    return {"kind": kind, "size": info.st_size, "mode": mode, "mtime_ns": info.st_mtime_ns}


def _size_of_regular(fd, path):
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        kind = "a folder" if stat.S_ISDIR(info.st_mode) else "not a regular file"
        raise Refused(f"{path:.200} is {kind}")
    return info.st_size


def _open(path, flags, mode=0o644):
    return _os_call(path, os.open, path, flags | os.O_CLOEXEC, mode)


def _os_call(path, call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise Refused(_line(path, error)) from error


def _line(path, error):
    reason = error.strerror if isinstance(error, OSError) else str(error)
    shown = ascii(path)[1:-1]  # on one line, whatever is in it
    return f"{shown:.200}: {reason}"
