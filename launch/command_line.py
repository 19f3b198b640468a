"""Command lines of flags and `--config.KEY=VALUE`, as several programs here have them."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from c2.config import ConfigError


def parse(
    argv: Sequence[str], define: Callable[[flags.FlagValues], None], module: str, doc: str
) -> tuple[dict[str, Any], list[str]]:
    """Parses a command line, program name first; ``--help`` is answered here.

    Args:
      argv: the words.
      define: defines the flags.
      module: under whose name.
      doc: what ``--help`` says in front of the flags.

    Returns:
      The flags' values by name, and the assignments "KEY=VALUE" to the config.

    Raises:
      ConfigError: for an unknown flag or a stray argument.
    """
    values = flags.FlagValues()
    define(values)
    if {"--help", "-help", "-h"} & set(argv):
        print(f"{doc}\nflags:\n{values.module_help(module)}")
        sys.exit(0)
    overrides = [word for word in argv if word.startswith(("--config.", "-config."))]
    try:
        stray = values([word for word in argv if word not in overrides])[1:]
    except flags.Error as error:
        raise ConfigError(f"{error} (--help lists the flags)") from error
    if stray:
        raise ConfigError(f"unexpected argument {stray[0]!r}; all arguments are --NAME=VALUE")
    named = {name: values[name].value for name in values}
    return named, [word.partition("config.")[2] for word in overrides]
