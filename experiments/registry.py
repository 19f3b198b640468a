"""Finding and loading studies.

A study is named by `NAME`, `experiments/NAME.py` or the path of any other file, each with an
optional `:variant`. Finding reads the source only, so it costs no import of the study or of jax.
"""

import ast
import dataclasses
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from c2.config import ConfigError, suggestion
from experiments.study import Result, Run

_ROOM = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyInfo:
    """What a study's source says about it.

    Attributes:
      name: the file name without ".py".
      path: its absolute path.
      question: the first line of the docstring.
      variants: legal variants, the default first; empty if there are none.
    """

    name: str
    path: Path
    question: str
    variants: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """What finds the study again: its name, or its path if it is not one of ours."""
        return self.name if self.path.parent == _ROOM else str(self.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A loaded study with its variant chosen; `variant` is "" if it has none."""

    info: StudyInfo
    variant: str
    module: ModuleType

    @property
    def title(self) -> str:
        """`NAME` or `NAME:variant`."""
        return f"{self.info.name}:{self.variant}" if self.variant else self.info.name

    @property
    def multi_process(self) -> bool:
        """Whether several processes can share a run of it, see `experiments.study`."""
        return getattr(self.module, "MULTI_PROCESS", False)

    def get_config(self) -> Any:
        """The variant's config before any override.

        Raises:
          ConfigError: if it is not a dataclass.
        """
        config = self.module.get_config(*([self.variant] if self.variant else []))
        if not dataclasses.is_dataclass(config) or isinstance(config, type):
            kind = type(config).__name__
            raise ConfigError(f"{self.info.path}: get_config returned a {kind}, not a dataclass")
        return config

    def run(self, config: Any, run: Run) -> Result:
        """Runs the study to its end.

        Raises:
          TypeError: if it returns anything but a `Result`.
        """
        result = self.module.run(config, run)
        if not isinstance(result, Result):
            raise TypeError(f"{self.info.path}: run returned a {type(result).__name__}")
        return result


def discover(folder: Path = _ROOM) -> dict[str, StudyInfo]:
    """All studies in a folder by name: the files that define both `get_config` and `run`.

    A file that does not parse is left out, so that one unfinished study hides no other.
    """
    found = {}
    for path in sorted(folder.glob("*.py")):
        try:
            info = read(path)
        except ConfigError:
            continue
        found[info.name] = info
    return found


def read(path: Path) -> StudyInfo:
    """Reads a study's description from its source.

    Raises:
      ConfigError: if the file cannot be read or parsed, or is no study.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: not a Python file: {error}") from error
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing := {"get_config", "run"} - functions:
        names = " and ".join(sorted(missing))
        raise ConfigError(f"{path}: not a study; it does not define {names}")
    docstring = (ast.get_docstring(tree) or "").strip()
    return StudyInfo(
        name=path.stem,
        path=path.resolve(),
        question=docstring.partition("\n")[0],
        variants=_variants(tree, path),
    )


def find(spec: str) -> tuple[StudyInfo, str]:
    """The study and variant that `spec` names, from the source alone.

    Raises:
      ConfigError: for an unknown study or variant, with the legal names.
    """
    target, _, variant = spec.partition(":")
    path = Path(target)
    if path.suffix == ".py" and path.is_file():
        info = read(path)
    elif path.suffix == ".py" and path.parent not in (Path("."), Path(_ROOM.name), _ROOM):
        raise ConfigError(f"--config={spec}: there is no file {path}")
    else:
        info = _find_name(path.stem if path.suffix == ".py" else target)
    legal = info.variants
    if variant and variant not in legal:
        names = ", ".join(legal) or "(none)"
        guess = suggestion(variant, legal)
        raise ConfigError(
            f"--config={spec}: unknown variant {variant!r} of {info.name};{guess} legal: {names}"
        )
    return info, variant or next(iter(legal), "")


def load(spec: str) -> Study:
    """Imports the study that `spec` names.

    Raises:
      ConfigError: as `find`, or if importing the file fails.
    """
    info, variant = find(spec)
    try:
        if info.path.parent == _ROOM:
            module = importlib.import_module(f"{__package__}.{info.name}")
        else:
            module = _import_file(info.path)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{info.path}: cannot be imported: {what}") from error
    return Study(info=info, variant=variant, module=module)


def _find_name(name: str) -> StudyInfo:
    known = discover(_ROOM)
    if name in known:
        return known[name]
    if (_ROOM / f"{name}.py").is_file():
        return read(_ROOM / f"{name}.py")  # raises: says why the file is no study
    names = ", ".join(known) or "(none)"
    raise ConfigError(
        f"--config={name}: unknown study;{suggestion(name, known)} legal: {names},"
        " or the path of your own study file"
    )


def _variants(tree: ast.Module, path: Path) -> tuple[str, ...]:
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == "VARIANTS" for target in targets):
            try:
                variants = ast.literal_eval(node.value)
            except ValueError:
                variants = None
            if isinstance(variants, tuple) and all(isinstance(name, str) for name in variants):
                return variants
            raise ConfigError(f"{path}: VARIANTS must be a literal tuple of str")
    return ()


def _import_file(path: Path) -> ModuleType:
    """Imports a file under a name of its own, so that it can shadow no installed module."""
    name = f"study_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look classes up by module name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
