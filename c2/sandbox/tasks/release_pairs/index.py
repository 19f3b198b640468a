"""Source distributions from the package index that pip is configured for.

pip itself would run a project's build to learn its metadata; here files are only fetched, checked
against their digest, and unpacked.
"""

import hashlib
import html.parser
import os
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from c2.config import ConfigError
from c2.sandbox.protocol import SandboxError
from c2.sandbox.tasks.task import is_plain_path

WAIT_S = 120.0
MAX_SDIST = 1 << 25
MAX_FILE, MAX_FILES = 1 << 19, 3000  # bytes of a file, files of an sdist; others are left out


@dataclass(frozen=True, kw_only=True)
class Sdist:
    """A source distribution.

    Attributes:
      version: of the project.
      file: its name.
      sha256: its digest, in hexadecimal.
    """

    version: str
    file: str
    sha256: str

    def __post_init__(self) -> None:
        if not self.file.endswith(".tar.gz") or not is_plain_path(self.file) or "/" in self.file:
            raise ConfigError(f"file: {self.file!r}; legal are names that end in .tar.gz")
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(f"sha256: {self.sha256!r}; legal are 64 hexadecimal digits")


def index_url() -> str:
    """The address of pip's index: of its environment, its configuration, or its default."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    if configured := _pip("config", "get", "global.index-url").strip():
        return configured
    default = re.search(r"--index-url\s.*?\(default\s+(\S+?)\)", _pip("download", "--help"), re.S)
    if not default:
        raise ConfigError("pip does not say which index it uses; set PIP_INDEX_URL")
    return default[1]


def find(project: str) -> dict[str, Sdist]:
    """The source distributions of a project: version -> file."""
    found = {}
    for file, address in _links(project).items():
        name, dash, version = file.removesuffix(".tar.gz").rpartition("-")
        digest = urllib.parse.urlsplit(address).fragment.removeprefix("sha256=")
        if dash and file.endswith(".tar.gz") and _normal(name) == _normal(project):
            found[version] = Sdist(version=version, file=file, sha256=digest)
    return found


def fetch(project: str, sdist: Sdist, cache: Path) -> Path:
    """The file, from the cache if it is there.

    Raises:
      SandboxError: if the index does not have it or its digest is another.
    """
    path = cache / "sdists" / sdist.sha256 / sdist.file
    if path.exists():
        return path
    address = _links(project).get(sdist.file)
    if address is None:
        raise SandboxError(f"the package index has no {sdist.file}")
    data = _get(address, MAX_SDIST)
    if (digest := hashlib.sha256(data).hexdigest()) != sdist.sha256:
        raise SandboxError(f"{sdist.file} has the digest {digest}, not {sdist.sha256}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)
    return path


def unpack(path: Path) -> dict[str, str]:
    """The files of a source distribution without its top folder, path -> text.

    Links, large files and odd names are left out, and so is what packaging tools have added.
    """
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            _, _, name = member.name.removeprefix("./").partition("/")
            if not member.isfile() or member.size > MAX_FILE or not is_plain_path(name):
                continue
            if name == "PKG-INFO" or ".egg-info/" in name:
                continue
            files[name] = archive.extractfile(member).read().decode(errors="surrogateescape")
            if len(files) > MAX_FILES:
                raise SandboxError(f"{path.name} has more than {MAX_FILES} files")
    return files


class _Anchors(html.parser.HTMLParser):
    """The text and address of all links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._address: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes the address of a link."""
        self._address = dict(attrs).get("href") if tag == "a" else self._address

    def handle_data(self, data: str) -> None:
        """Notes the text of a link."""
        if self._address and data.strip():
            self.found[data.strip()] = self._address
            self._address = None


def _links(project: str) -> dict[str, str]:
    """The files of a project: name -> address."""
    page = f"{index_url().rstrip('/')}/{_normal(project)}/"
    anchors = _Anchors()
    anchors.feed(_get(page, MAX_SDIST).decode(errors="replace"))
    return {file: urllib.parse.urljoin(page, link) for file, link in anchors.found.items()}


def _get(address: str, limit: int) -> bytes:
    request = urllib.request.Request(address, headers={"Accept": "text/html, */*;q=0.1"})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            data = answer.read(limit + 1)
    except (urllib.error.URLError, OSError) as error:
        raise SandboxError(f"the package index does not answer: {error}") from error
    if len(data) > limit:
        raise SandboxError(f"a file of more than {limit} bytes: {address}")
    return data


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words]
    return subprocess.run(command, capture_output=True, text=True).stdout
