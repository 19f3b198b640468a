"""A small package as data, and its text."""

import dataclasses
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """A function of the package.

    Attributes:
      module: the module it is in, without the package.
      name: its name.
      params: kind of each parameter, name -> key of `templates.POOLS`.
      doc: its docstring.
      body: its lines, without the indentation of all.
      imports: import lines it needs at the top of its module.
      template: key of its template; "" for a caller.
    """

    module: str
    name: str
    params: dict[str, str]
    doc: str
    body: tuple[str, ...]
    imports: tuple[str, ...] = ()
    template: str = ""


@dataclass(frozen=True)
class Package:
    """Everything that is written to files.

    Attributes:
      name: of the package.
      functions: in the order of the text of their modules.
      settings: assignments of config.py, name -> literal; there is no such file without any.
      readme: lines that say what the settings have to be.
    """

    name: str
    functions: tuple[Function, ...]
    settings: dict[str, str]
    readme: tuple[str, ...]

    def function(self, name: str) -> Function:
        """The function of that name."""
        return next(function for function in self.functions if function.name == name)

    def with_function(self, old: Function, **changes) -> "Package":
        """A copy in which one function has other fields."""
        new = dataclasses.replace(old, **changes)
        functions = tuple(new if item is old else item for item in self.functions)
        return dataclasses.replace(self, functions=functions)

    def renamed(self, old: str, new: str) -> "Package":
        """A copy in which a function has another name in all places."""

        def change(text: str) -> str:
            return re.sub(rf"\b{old}\b", new, text)

        functions = tuple(
            dataclasses.replace(
                item,
                name=change(item.name),
                doc=change(item.doc),
                body=tuple(map(change, item.body)),
                imports=tuple(map(change, item.imports)),
            )
            for item in self.functions
        )
        return dataclasses.replace(self, functions=functions)

    def files(self) -> dict[str, str]:
        """Path -> text, without tests."""
        modules = dict.fromkeys(function.module for function in self.functions)
        files = {f"{self.name}/__init__.py": ""}
        files |= {f"{self.name}/{module}.py": self._module(module) for module in modules}
        if self.settings:
            lines = [f"{name} = {value}" for name, value in self.settings.items()]
            files[f"{self.name}/config.py"] = "\n".join(lines) + "\n"
            files["README.md"] = "\n".join((f"# {self.name}", "", *self.readme)) + "\n"
        return files

    def _module(self, module: str) -> str:
        functions = [item for item in self.functions if item.module == module]
        imports = sorted(
            {line for item in functions for line in item.imports},
            key=lambda line: (line.startswith("from ."), line),
        )
        parts = ["\n".join(imports)] if imports else []
        return "\n\n".join(parts + [_text(item) for item in functions]) + "\n"


def _text(function: Function) -> str:
    lines = [f"def {function.name}({', '.join(function.params)}):"]
    lines += [f'    """{function.doc}"""', *(f"    {line}" for line in function.body)]
    return "\n".join(lines)
