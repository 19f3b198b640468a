"""The command line of `launch.agent`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from absl import flags

from c2.agent.harness import HarnessConfig
from c2.config import ConfigError, override
from c2.sandbox.protocol import Resources
from c2.sandbox.tasks import minirepo
from c2.sandbox.tools.toolset import ToolsConfig
from launch import command_line

_MODULE = "launch.agent"


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Budgets, tools, and the size of the sandbox."""

    harness: HarnessConfig = field(default_factory=lambda: HarnessConfig(summary_at=24000))
    tools: ToolsConfig = field(default_factory=lambda: ToolsConfig(reading="lenient"))
    resources: Resources = field(
        default_factory=lambda: Resources(memory_mb=2048, disk_mb=1024, pids=512, cpus=2.0)
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """A parsed command line."""

    config: AgentConfig
    repo: Path | None
    prompt: str | None
    endpoint: str | None
    model: str | None
    policy: str | None
    family: str
    level: int
    seed: int
    tests: str | None
    out: Path | None
    transcript: Path | None
    print_config: bool


def parse(argv: Sequence[str], doc: str) -> Options:
    """Parses a command line, program name first; `doc` is what --help says in front of the flags.

    Raises:
      ConfigError: for whatever is wrong with it.
    """
    values, assignments = command_line.parse(argv, _define, _MODULE, doc)
    named = {name: values[name] for name in Options.__dataclass_fields__ if name != "config"}
    for name in ("repo", "out", "transcript"):
        named[name] = Path(named[name]).expanduser() if named[name] else None
    options = Options(config=override(AgentConfig(), assignments), **named)
    if not options.print_config:
        _check(options)
    return options


def _define(values: flags.FlagValues) -> None:
    define = {"flag_values": values, "module_name": _MODULE}
    flags.DEFINE_string("repo", None, "The folder to work on a copy of.", **define)
    flags.DEFINE_string("prompt", None, "What is to be done.", **define)
    flags.DEFINE_string(
        "endpoint", None, "Its address, such as http://localhost:8000/v1.", **define
    )
    flags.DEFINE_string("model", None, "Name of the model there.", **define)
    flags.DEFINE_enum("policy", None, ["scripted"], "A script in the place of a model.", **define)
    flags.DEFINE_enum("family", "operator", minirepo.FAMILIES, "Of the scripted task.", **define)
    flags.DEFINE_integer("level", 2, "Of the scripted task, 1 to 4.", **define)
    flags.DEFINE_integer("seed", 0, "Of the scripted task, or of the model's sampling.", **define)
    flags.DEFINE_string("tests", None, "The command of the tool run_tests.", **define)
    flags.DEFINE_string("out", None, "Where the patch is written.", **define)
    flags.DEFINE_string("transcript", None, "Default: runs/agent/TIME.jsonl.", **define)
    flags.DEFINE_bool("print_config", False, "Print the config as JSON.", **define)


def _check(options: Options) -> None:
    alone = {"repo": options.repo, "prompt": options.prompt, "tests": options.tests}
    alone |= {"endpoint": options.endpoint, "model": options.model}
    if options.policy:
        if given := [name for name in alone if alone[name] is not None]:
            raise ConfigError(f"--{given[0]}: --policy=scripted brings its own; leave one out")
        if options.level not in minirepo.LEVELS:
            raise ConfigError(f"--level: {options.level}; legal are 1 to {max(minirepo.LEVELS)}")
    else:
        needed = ("repo", "prompt", "endpoint", "model")
        if missing := [name for name in needed if not alone[name]]:
            raise ConfigError(
                f"--{missing[0]} is missing; needed are --repo, --prompt, --endpoint and --model, "
                "or --policy=scripted for a demonstration without a model"
            )
        if not options.repo.is_dir():
            raise ConfigError(f"--repo: {str(options.repo)!r} is no folder")
    for name in ("out", "transcript"):
        path = getattr(options, name)
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"--{name}: {str(path)!r}; legal is a file in a folder that exists")
