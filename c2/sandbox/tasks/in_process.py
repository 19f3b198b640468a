"""Runs tests in this very process: for generated and scripted code, never for a policy's."""

import builtins
import functools
import types
from collections.abc import Callable, Iterable, Mapping

from c2.sandbox.tasks.runner import run_test


class Modules:
    """Modules made from the text of files; nothing of them is in `sys.modules` or on disk."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._tops = {path.partition("/")[0].removesuffix(".py") for path in files}
        self._loaded: dict[str, types.ModuleType] = {}

    def load(self, name: str) -> types.ModuleType:
        """Imports a module, as `importlib.import_module`."""
        if name in self._loaded:
            return self._loaded[name]
        parent, _, last = name.rpartition(".")
        above = self.load(parent) if parent else None
        base = name.replace(".", "/")
        path = next((p for p in (f"{base}/__init__.py", f"{base}.py") if p in self._files), None)
        if path is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = types.ModuleType(name)
        module.__package__ = name if path.endswith("/__init__.py") else parent
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self.import_hook}
        self._loaded[name] = module
        try:
            exec(_compiled(self._files[path], path), module.__dict__)
        except BaseException:
            del self._loaded[name]
            raise
        if above is not None:
            setattr(above, last, module)
        return module

    def import_hook(self, name, globals=None, locals=None, fromlist=(), level=0):
        """An `__import__` that finds these modules first."""
        if level:
            package = globals["__package__"].split(".")
            parts = package[: len(package) - level + 1] + [name] * bool(name)
            name = ".".join(parts)
        elif name.partition(".")[0] not in self._tops:
            return __import__(name, globals, locals, fromlist, level)
        module = self.load(name)
        for item in fromlist or ():
            if not hasattr(module, item) and self._is_module(f"{name}.{item}"):
                self.load(f"{name}.{item}")
        return module if fromlist else self.load(name.partition(".")[0])

    def _is_module(self, name: str) -> bool:
        base = name.replace(".", "/")
        return f"{base}.py" in self._files or f"{base}/__init__.py" in self._files


@functools.lru_cache(maxsize=256)  # the same files are imported anew for every test
def _compiled(text: str, path: str) -> types.CodeType:
    return compile(text, path, "exec")


def run_tests(
    files: Mapping[str, str], tests: Mapping[str, str], ids: Iterable[str]
) -> dict[str, str]:
    """Runs tests, each on freshly imported modules.

    Args:
      files: the repository.
      tests: test files, path -> text.
      ids: PATH::FUNCTION.

    Returns:
      id -> "" if it passed, else why not, as the runner of `grade` says it.
    """
    results = {}
    for name in ids:
        path, _, function = name.partition("::")
        results[name] = run_test(
            tests[path], _compiled(tests[path], path), function, Modules(files).import_hook
        )
    return results


def visible_tests(
    tests: Mapping[str, str], ids: Iterable[str]
) -> Callable[[Mapping[str, str]], str]:
    """The tool `run_tests` of `tools.MemoryRepo`: "pass", or why the first failing test fails."""
    chosen = tuple(ids)

    def run(files: Mapping[str, str]) -> str:
        results = run_tests(files, tests, chosen)
        return next((f"fail {why}" for why in results.values() if why), "pass")

    return run
