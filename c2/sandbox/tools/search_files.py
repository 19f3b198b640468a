"""Searches files for lines. Also runs as a program inside sandboxes: standard library, Python 3.8.

Ripgrep does the work where it is installed. Lines, files and the number of matches are bounded, and
what is left out is counted.
"""

import fnmatch
import os
import re
import sys

MAX_LINE = 200  # characters of a line
MAX_HITS = 50
MAX_COUNT = 10000  # matches after which counting ends
MAX_FILE = 1 << 22  # bytes of a file that is searched
SKIPPED = (".git",)


class Hits:
    """Takes matches and keeps the first ones."""

    def __init__(self):
        self.lines = []
        self.count = 0

    def add(self, path, number, line):
        """Takes a match; returns whether to go on."""
        self.count += 1
        if self.count <= MAX_HITS:
            more = f" [... {len(line) - MAX_LINE} more characters]"
            cut = line[:MAX_LINE] + more if len(line) > MAX_LINE else line
            self.lines.append(f"{path}:{number}:{cut}")
        return self.count < MAX_COUNT

    def text(self):
        """What an agent is shown."""
        left = self.count - len(self.lines)
        some = "at least " if self.count == MAX_COUNT else ""
        more = [f"[and {some}{left} more matches]"] if left else []
        return "\n".join(self.lines + more) or "nothing found"


def search_text(hits, path, text, search):
    """Adds the matching lines of one file; returns whether to go on."""
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return all(hits.add(path, number, line) for number, line in enumerate(lines, 1) if search(line))


def files_below(path):
    """Regular files, sorted; links are not followed, so that no search goes in circles."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in SKIPPED)
        for name in sorted(files):
            full = os.path.normpath(os.path.join(folder, name))
            if os.path.isfile(full) and not os.path.islink(full):
                yield full


def search_with_python(hits, pattern, path, glob):
    """Searches without ripgrep."""
    search = re.compile(pattern).search
    for name in files_below(path):
        if not fnmatch.fnmatchcase(name, glob):
            continue
        try:
            with open(name, "rb") as file:
                data = file.read(MAX_FILE)
        except OSError:
            continue
        if b"\0" not in data and not search_text(
            hits, name, data.decode("utf-8", "replace"), search
        ):
            return


def search_with_ripgrep(hits, program, pattern, path, glob):
    """Searches the same files."""
    import subprocess  # takes longer than a search without it

    options = ["--no-config", "--no-ignore", "--hidden", "--no-messages", "--color=never", "--crlf"]
    options += [
        "--no-heading",
        "--with-filename",
        "--line-number",
        "--null",
        "--sort=path",
        "--crlf",
    ]
    options += [f"--max-filesize={MAX_FILE}", "--glob=!.git", "--regexp=" + pattern, "--", path]
    with subprocess.Popen(
        [program, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        for raw in process.stdout:
            name, separator, rest = raw.decode("utf-8", "replace").partition("\0")
            number, _, line = rest.rstrip("\r\n").partition(":")
            name = os.path.normpath(name)
            if not separator or not fnmatch.fnmatchcase(name, glob):
                continue
            if not hits.add(name, number, line):
                process.kill()
                return
        refusal = process.stderr.read().decode("utf-8", "replace")
        if process.wait() == 2 and refusal:
            raise re.error(" ".join(refusal.split()))


def main():
    """Arguments: pattern, path, glob."""
    pattern, path, glob = sys.argv[1:]
    hits = Hits()
    if not os.path.lexists(path):
        sys.exit(f"no file or folder {path}")
    programs = (os.path.join(folder, "rg") for folder in os.environ["PATH"].split(":"))
    program = next((name for name in programs if os.access(name, os.X_OK)), None)
    try:
        if program:
            search_with_ripgrep(hits, program, pattern, path, glob)
        else:
            search_with_python(hits, pattern, path, glob)
    except (re.error, OverflowError, RecursionError) as error:
        sys.exit(f"pattern {pattern!r}: {error}")
    sys.stdout.buffer.write(hits.text().encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
