"""What comes from a package index: files with digests, change logs, recipes."""

import dataclasses
import hashlib
import http.server
import io
import os
import re
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from c2.config import ConfigError
from c2.sandbox.protocol import SandboxError
from c2.sandbox.tasks import python_env, release_pairs
from c2.sandbox.tasks.gates import GateConfig
from c2.sandbox.tasks.release_pairs import changelog, index
from c2.sandbox.tasks.release_pairs.index import Sdist


def test_packages_are_installed_once_and_only_with_their_digest(tmp_path, monkeypatch):
    wheel = tmp_path / "numb-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("numb.py", "x = 1\n")
        archive.writestr(
            "numb-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: numb\nVersion: 1.0\n"
        )
        archive.writestr(
            "numb-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("numb-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    folder = python_env.install([f"numb==1.0 --hash=sha256:{digest}"], tmp_path / "cache")
    assert (folder / "numb.py").read_text() == "x = 1\n"
    wheel.unlink()
    assert python_env.install([f"numb==1.0 --hash=sha256:{digest}"], tmp_path / "cache") == folder
    with pytest.raises(SandboxError, match="pip cannot install"):
        python_env.install([f"numb==1.0 --hash=sha256:{'0' * 64}"], tmp_path / "cache")
    assert list((tmp_path / "cache/environments").iterdir()) == [folder]


@pytest.fixture
def server(monkeypatch):
    """A package index; path -> content."""
    pages: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{http_server.server_port}/simple")
        yield pages
        http_server.shutdown()
        thread.join()


def test_an_index(server, tmp_path):
    digest = hashlib.sha256(b"content").hexdigest()
    server["/simple/my-numb/"] = (
        "<html><body><h1>Links</h1>"
        f"<a href='../../files/My.Numb-1.0.tar.gz#sha256={digest}'>My.Numb-1.0.tar.gz</a><br/>"
        f"<a href='/files/x#sha256={digest}' data-yanked=''>my_numb-1.1-py3-none-any.whl</a>"
        f"<a href='/files/y#sha256={digest}'>other-1.1.tar.gz</a></body></html>"
    ).encode()
    server["/files/My.Numb-1.0.tar.gz"] = b"content"
    found = index.find("My_Numb")
    assert found == {"1.0": Sdist(version="1.0", file="My.Numb-1.0.tar.gz", sha256=digest)}
    path = index.fetch("my-numb", found["1.0"], tmp_path)
    assert path.read_bytes() == b"content"
    server.clear()  # from now on it comes from the cache
    assert index.fetch("my-numb", found["1.0"], tmp_path) == path


def test_a_file_with_another_content_is_refused_and_not_kept(server, tmp_path):
    wanted = Sdist(version="1", file="a-1.tar.gz", sha256="0" * 64)
    server["/simple/a/"] = b"<a href='a-1.tar.gz'>a-1.tar.gz</a>"
    server["/simple/a/a-1.tar.gz"] = b"another"
    with pytest.raises(SandboxError, match=r"a-1\.tar\.gz has the digest"):
        index.fetch("a", wanted, tmp_path)
    assert not list(tmp_path.rglob("*.tar.gz*"))
    with pytest.raises(SandboxError, match=r"has no a-2\.tar\.gz"):
        index.fetch("a", dataclasses.replace(wanted, file="a-2.tar.gz"), tmp_path)
    with pytest.raises(SandboxError, match="does not answer"):
        index.find("nowhere")


def test_unpacking_leaves_out_what_leads_away(tmp_path):
    path = tmp_path / "a-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("a-1/pkg/a.py", "a-1/../../out", "/a-1/abs", "a-1/PKG-INFO", "a-1/é"):
            info = tarfile.TarInfo(name)
            info.size = 2
            archive.addfile(info, io.BytesIO(b"\xff\n"))
        link = tarfile.TarInfo("a-1/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    files = index.unpack(path)
    assert {name for name in files if name != "a-1/abs"} == {"pkg/a.py"}
    assert files["pkg/a.py"].encode(errors="surrogateescape") == b"\xff\n"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("CHANGES.md", "# Changes\n\n## 1.1 (2026)\n\n- clamp `high`\n\n## 1.0\n\n- First\n"),
        ("CHANGELOG.rst", "1.1 (now)\n=========\n\n- clamp\n\n1.0\n===\n\n- First\n"),
        ("NEWS", "Version 1.1, May\n-----------\n\n* clamp\n\nVersion 1.0\n-------\n\n* First\n"),
        ("docs/changes.rst", "v1.1.1\n~~~~\n* no\n\nv1.1\n~~~~\n* clamp\n\nv1.0\n~~~~\n* First\n"),
        ("HISTORY", "* 1.1:\n  clamp\n* 1.0\n  First\n"),
    ],
)
def test_change_logs(path, text):
    entry = changelog.entry({path: text}, "1.1")
    assert "clamp" in entry and "First" not in entry and "no" not in entry.split()
    assert "==" not in entry and "--" not in entry and "~~" not in entry
    assert changelog.entry({path: text}, "2.0") == ""


def test_the_default_list():
    recipes = release_pairs.recipes()
    assert len(recipes) >= 12
    pins = release_pairs.requires()
    names = {re.match(r"([\w.-]+)==[\w.]+ --hash=sha256:[0-9a-f]{64}$", pin)[1] for pin in pins}
    assert "pytest" in names
    assert not names & set(recipes)
    for project, recipe in recipes.items():
        assert recipe.project == project and recipe.license and len(recipe.entry) >= 20
        assert recipe.found.fail_to_pass
        assert recipe.found.killed >= GateConfig().killed * recipe.found.mutants
        assert recipe.base.version != recipe.solution.version


def test_a_recipe_without_gates_makes_no_task():
    recipe = dataclasses.replace(release_pairs.recipes()["semver"], found=None)
    with pytest.raises(ConfigError, match="semver: `found` is missing"):
        release_pairs.build(recipe, Path("/nowhere"))
    for text, words in (("{", "x.json: not JSON"), ("{}", "x.json")):
        with pytest.raises(ConfigError, match=words):
            release_pairs.read(text, "x.json")
