"""Files for clusters: templates, what goes into them, and what is refused before."""

import math
import re
import string
from importlib import resources
from typing import Any

import yaml

from c2.config import ConfigError


class _Template(string.Template):
    delimiter = "@"  # "$" means something in shell scripts and in Kubernetes


def fill(template: str, **values: Any) -> str:
    """A file of `launch/templates` with a value for each @name."""
    text = resources.files("launch").joinpath("templates", template).read_text(encoding="utf-8")
    return _Template(text).substitute(values)


def as_yaml(value: Any) -> str:
    """One line, with quotes and escapes where they are needed."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")


def require(flag: str, value: str, pattern: str, legal: str) -> None:
    """Raises ConfigError unless the whole value of a flag matches."""
    if not re.fullmatch(pattern, value, re.ASCII):
        raise ConfigError(f"--{flag}: {value!r} is not legal; legal: {legal}")


def pair(flag: str, word: str) -> tuple[str, str]:
    """The two sides of KEY=VALUE, such as a label of nodes."""
    require(flag, word, r"[\w./-]+=[\w.-]*", "KEY=VALUE")
    key, _, value = word.partition("=")
    return key, value
