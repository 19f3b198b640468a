"""Finding studies without importing them, and loading them by name, path and variant."""

import subprocess
import sys

import pytest

from c2.config import ConfigError
from experiments import registry

STUDY = '''
"""Is it so?

More.
"""
import dataclasses
from experiments.study import Result

VARIANTS = ("mini", "full")

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 1

def get_config(variant=VARIANTS[0]):
    return Config(size={"mini": 1, "full": 100}[variant])

def run(config, run):
    return Result(summary=str(config.size))
'''


@pytest.fixture
def study_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(STUDY)
    return path


def test_our_studies_are_discovered_and_build():
    for name, info in registry.discover().items():
        assert info.question, name
        for variant in info.variants or ("",):
            study = registry.load(f"{name}:{variant}" if variant else f"experiments/{name}.py")
            assert study.get_config() is not None
            assert info.variants == getattr(study.module, "VARIANTS", ())


def test_discovery_runs_nothing(tmp_path):
    (tmp_path / "b_study.py").write_text(STUDY + "\nraise SystemExit('imported')\n")
    (tmp_path / "a_study.py").write_text("'''Q?'''\ndef get_config(): ...\ndef run(c, r): ...\n")
    (tmp_path / "helper.py").write_text("def run(): ...\n")
    (tmp_path / "broken.py").write_text("def run(:\n")
    found = registry.discover(tmp_path)
    assert list(found) == ["a_study", "b_study"]
    assert found["b_study"].question == "Is it so?"
    assert found["b_study"].variants == ("mini", "full")
    assert found["a_study"].variants == ()


def test_discovery_needs_no_jax():
    code = (
        "import sys; from experiments import registry; registry.discover();"
        "sys.exit('jax' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_load_a_file_of_ones_own(study_file):
    study = registry.load(str(study_file))
    assert (study.title, study.variant, study.get_config().size) == ("mine:mini", "mini", 1)
    assert study.info.reference == str(study_file)
    assert study.run(study.get_config(), None).summary == "1"
    assert registry.load(f"{study_file}:full").get_config().size == 100


def test_study_without_variants(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(
        STUDY.replace('VARIANTS = ("mini", "full")', "VARIANTS: tuple = ()").replace(
            "variant=VARIANTS[0]", 'variant="mini"'
        )
    )
    assert registry.load(str(path)).title == "plain"
    with pytest.raises(ConfigError, match=r"unknown variant 'x' of plain; legal: \(none\)"):
        registry.load(f"{path}:x")


def test_names(tmp_path, monkeypatch, study_file):
    monkeypatch.setattr(registry, "_ROOM", tmp_path)
    expected = registry.read(study_file)
    assert expected.reference == "mine"
    for spec in ("mine", "mine.py", f"{tmp_path.name}/mine.py", str(study_file)):
        assert registry.find(spec) == (expected, "mini"), spec
    assert registry.find("mine:full") == (expected, "full")
    for spec in ("mime", "mime.py", str(tmp_path / "mime.py")):
        with pytest.raises(ConfigError) as caught:
            registry.find(spec)
        assert "unknown study; did you mean 'mine'? legal: mine," in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no file"),
        ("def run(:", "not a Python file: invalid syntax"),
        ("x = '\x00'", "not a Python file"),
        ("x = 1", "not a study; it does not define get_config and run"),
        ("def run(): ...", "not a study; it does not define get_config"),
        (STUDY.replace('("mini", "full")', "tuple(range(3))"), "VARIANTS must be a literal tuple"),
        (STUDY.replace('("mini", "full")', '("mini")'), "VARIANTS must be a literal tuple of str"),
        (STUDY + "\nimport no_such_module", "cannot be imported: ModuleNotFoundError: No module"),
    ],
)
def test_bad_files(tmp_path, source, message):
    path = tmp_path / "bad.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError) as caught:
        registry.load(str(path))
    assert message in str(caught.value)
    assert "bad.py" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_variant(study_file):
    with pytest.raises(ConfigError, match="did you mean 'full'\\? legal: mini, full"):
        registry.find(f"{study_file}:ful")


def test_wrong_returns(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text("VARIANTS = ()\ndef get_config(): return {}\ndef run(config, run): return 3\n")
    study = registry.load(str(path))
    with pytest.raises(ConfigError, match="get_config returned a dict"):
        study.get_config()
    with pytest.raises(TypeError, match="run returned a int"):
        study.run(None, None)
