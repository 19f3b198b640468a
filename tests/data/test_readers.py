import io
import tarfile
import zipfile

import pytest

from c2.config import ConfigError
from c2.data.config import Source
from c2.data.readers import Limits, package, packages, read, stdlib_root

LIMITS = Limits((".py",), 1000)


@pytest.fixture
def tree(tmp_path):
    files = {
        "b.py": b"b = 1\n",
        "a/z.py": "z = 'é'\n".encode(),
        "a/notes.txt": b"not code",
        "a/latin.py": "x = 'é'\n".encode("latin-1"),
        "a/blank.py": b"\n  \n",
        "a/table.py": b"x" * 1001,
        ".venv/hidden.py": b"hidden = 1\n",
        "__pycache__/c.py": b"c = 1\n",
        "held/h.py": b"h = 1\n",
    }
    for name, data in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "tree"


def contents(documents):
    return {document.path: document.text for document in documents}


def make_tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def make_zip(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def test_directory(tree):
    documents, dropped = read(Source(path=str(tree)), LIMITS)
    assert contents(documents) == {
        "a/z.py": "z = 'é'\n", "b.py": "b = 1\n", "held/h.py": "h = 1\n"
    }  # fmt: skip
    assert [document.path for document in documents] == ["a/z.py", "b.py", "held/h.py"]
    assert dropped == {"not UTF-8": 1, "empty": 1, "too large": 1}
    assert {document.license for document in documents} == {"unknown"}


def test_folder_left_out(tree):
    documents, _ = read(Source(path=str(tree)), LIMITS, without=(tree / "held").resolve())
    assert "held/h.py" not in contents(documents)
    documents, _ = read(Source(path=f"{tree}/**/h.py"), LIMITS, without=(tree / "held").resolve())
    assert documents == []


@pytest.mark.parametrize("pattern", ["*", "**", "**/*.py", "[ab]*"])
def test_glob_reads_each_file_once(tree, pattern):
    documents, _ = read(Source(path=f"{tree}/{pattern}"), LIMITS)
    texts = [document.text for document in documents]
    assert len(texts) == len(set(texts))
    assert {"z = 'é'\n", "b = 1\n"} <= set(texts)


def test_glob_over_archives(tmp_path):
    make_tar(tmp_path / "one-1.0.tar.gz", {"one-1.0/m.py": b"m = 1\n"})
    make_zip(tmp_path / "two-1.0.zip", {"two-1.0/m.py": b"m = 2\n"})
    documents, _ = read(Source(path=f"{tmp_path}/*-1.0.*"), LIMITS)
    assert contents(documents) == {
        "one-1.0.tar.gz/one-1.0/m.py": "m = 1\n",
        "two-1.0.zip/two-1.0/m.py": "m = 2\n",
    }


@pytest.mark.parametrize(
    "metadata, expected",
    [
        ("License-Expression: MIT\nLicense: old\n", "MIT"),
        ("License: Apache-2.0\n", "Apache-2.0"),
        ("Classifier: License :: OSI Approved :: BSD License\nLicense: x\n", "BSD License"),
        ("License: First line\n        rest of the text\n", "First line"),
        ("License: UNKNOWN\n", "unknown"),
        ("Name: nothing\n", "unknown"),
    ],
)
def test_license_of_an_sdist(tmp_path, metadata, expected):
    path = tmp_path / "pkg-1.0.tar.gz"
    make_tar(
        path,
        {
            "pkg-1.0/pkg.egg-info/PKG-INFO": b"License: not the top one\n",
            "pkg-1.0/pkg/m.py": b"m = 1\n",
            "pkg-1.0/PKG-INFO": b"Metadata-Version: 2.1\n" + metadata.encode() + b"\nLicense: body",
        },
    )
    [document], _ = read(Source(path=str(path)), LIMITS)
    assert document.license == expected
    [document], _ = read(Source(path=str(path), license="stated"), LIMITS)
    assert document.license == "stated"


def test_license_of_a_wheel(tmp_path):
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    make_zip(path, {"pkg/m.py": b"m = 1\n", "pkg-1.0.dist-info/METADATA": b"License: ISC\n\n"})
    [document], _ = read(Source(path=str(path)), LIMITS)
    assert (document.text, document.license) == ("m = 1\n", "ISC")


def test_missing_path():
    with pytest.raises(ConfigError, match=r"cannot read '/no/such': no such file; legal: 'stdlib'"):
        read(Source(path="/no/such"), LIMITS)


@pytest.mark.parametrize("name", ["x.tar.gz", "x.zip", "x.whl"])
@pytest.mark.parametrize("damage", ["garbage", "truncated"])
def test_damaged_archive(tmp_path, name, damage):
    path = tmp_path / name
    make = make_tar if name == "x.tar.gz" else make_zip
    make(path, {f"m{i}.py": bytes(range(128)) * 5 for i in range(30)})
    path.write_bytes(b"garbage" if damage == "garbage" else path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"^sources: cannot read the archive '.*x\.[a-z.]*': "):
        read(Source(path=str(path)), LIMITS)


def test_stdlib_package():
    documents, dropped = read(Source(path="stdlib:json"), Limits((".py",), 10**6))
    expected = sorted((stdlib_root() / "json").glob("*.py"))
    assert contents(documents) == {
        f"json/{path.name}": path.read_text(encoding="utf-8") for path in expected
    }
    assert {document.license for document in documents} == {"PSF-2.0"}
    assert not dropped


def test_stdlib_leaves_tests_and_tables_out():
    documents, _ = read(Source(), Limits(("ABSENT",), 1))
    assert documents == []
    documents, _ = read(Source(), Limits(("__init__.py",), 10**6))
    folders = {document.path.rpartition("/")[0] for document in documents}
    assert {"json", "email", "xml/etree"} <= folders
    assert not {"test", "encodings", "pydoc_data"} & folders
    assert not any("site-packages" in folder or "tests" in folder for folder in folders)


def test_unknown_stdlib_package():
    with pytest.raises(ConfigError, match=r"did you mean 'json'\? legal after 'stdlib:': .*email"):
        read(Source(path="stdlib:jsn"), LIMITS)
    assert package("xml.etree") == stdlib_root() / "xml" / "etree"
    assert package("argparse") is None and package("..") is None and package("a b") is None
    assert "json" in packages()
