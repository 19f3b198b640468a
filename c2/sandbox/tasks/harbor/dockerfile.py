"""The part of the Dockerfile language that needs no images."""

import posixpath
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from c2.config import ConfigError

FOLLOWED = ("COPY", "ENV", "RUN", "WORKDIR")
WITHOUT_EFFECT = ("FROM", "LABEL", "CMD", "EXPOSE")  # here, where commands are given anyway


@dataclass(frozen=True)
class Step:
    """An instruction of a Dockerfile: its name, its arguments, and where it stands."""

    name: str
    text: str
    line: int


def steps(dockerfile: str) -> list[Step]:
    """The instructions of a Dockerfile, in order, with joined lines."""
    found, text, start = [], "", 0
    for number, line in enumerate(dockerfile.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or text):
            continue
        start = start if text else number
        text += line.rstrip().removesuffix("\\").strip() + " "
        if not line.rstrip().endswith("\\"):
            name, _, rest = text.strip().partition(" ")
            found.append(Step(name.upper(), rest.strip(), start))
            text = ""
    return found


def unknown(dockerfile: str) -> list[str]:
    """What of a Dockerfile cannot be followed: "Dockerfile:LINE: NAME"."""
    return [
        f"Dockerfile:{step.line}: {step.name}"
        for step in steps(dockerfile)
        if step.name not in FOLLOWED + WITHOUT_EFFECT or "--from=" in step.text or "<<" in step.text
    ]


def copied(files: Mapping[str, bytes], step: Step, folder: str) -> dict[str, bytes]:
    """Where a COPY puts which content: absolute path -> content.

    Args:
      files: what can be copied, path -> content.
      step: the instruction.
      folder: the working directory.

    Raises:
      ConfigError: if there is nothing to copy.
    """
    *sources, target = [word for word in shlex.split(step.text) if not word.startswith("--")]
    many = len(sources) > 1 or target.endswith("/")
    target = posixpath.normpath(posixpath.join(folder, target))
    many = many or target == posixpath.normpath(folder)
    found = {}
    for source in (posixpath.normpath(source) for source in sources):
        inside = "" if source == "." else f"{source}/"
        if source in files:
            name = posixpath.basename(source)
            found[posixpath.join(target, name) if many else target] = files[source]
        for path, data in files.items():
            if path.startswith(inside):
                found[posixpath.join(target, path[len(inside) :])] = data
    if not found:
        raise ConfigError(f"Dockerfile:{step.line}: COPY: there is no {sources[0]!r}")
    return found


def assignments(text: str) -> dict[str, str]:
    """Of ENV: NAME=VALUE pairs, or one name and its value."""
    words = shlex.split(text)
    if "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return dict(word.split("=", 1) for word in words)
