"""The objects that a cluster needs to keep sandboxes ready, for `c2.sandbox.kubernetes`.

  python -m launch.sandboxes --image=... --replicas=100 --runtime_class=gvisor | kubectl apply -f -

Prints a namespace in which nothing may connect to anything, a service account for who uses the
sandboxes, and a SandboxTemplate with its SandboxWarmPool (kubernetes-sigs/agent-sandbox, v1beta1).
The image needs Python 3.8 or newer as python3, and sleep; its own command is not started.
`launch/templates/runtime_classes.yaml` names the runtimes on clusters where nobody has.
"""

import hashlib
import sys
from collections.abc import Sequence
from importlib import resources

from absl import flags

from c2.config import ConfigError
from c2.sandbox.protocol import Resources
from launch import jax_setup
from launch.fill import as_yaml, fill, pair, require

NAME = r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"
LEGAL_NAME = "a-z, 0-9 and -, at most 40"


def render(argv: Sequence[str]) -> str:
    """The objects that a command line, program name first, asks for, as YAML.

    Raises:
      ConfigError: for an unknown flag or a value that is not legal.
    """
    values = flags.FlagValues()
    _define(values)
    try:
        _, *stray = values(argv)
    except flags.Error as error:
        raise ConfigError(f"{error} (--help lists the flags)") from error
    if stray:
        raise ConfigError(f"{stray[0]!r}: only flags are legal")
    for flag in ("name", "namespace", "runtime_class"):
        require(flag, values[flag].value, NAME, LEGAL_NAME)
    require("image", values.image, r"[\w.:/@-]+", "the name of a container image")
    limits = Resources(
        memory_mb=values.memory_mb, disk_mb=values.disk_mb, pids=values.pids, cpus=values.cpus
    )
    files = _server_files()
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    fields = {
        "name": values["name"].value,
        "namespace": values.namespace,
        "tool_server": f"{values['name'].value}-tool-server-{digest}",  # its content never changes
        "server_files": files,
        "pids": str(limits.pids),
        "runtime_class": values.runtime_class,
        "node_selector": dict(pair("node_selector", word) for word in values.node_selector),
        "image": values.image,
        "limits": {"memory": f"{limits.memory_mb + limits.disk_mb}Mi", "cpu": f"{limits.cpus:g}"},
        "disk": f"{limits.disk_mb}Mi",
        "replicas": values.replicas,
    }
    return fill("sandboxes.yaml", **{name: as_yaml(value) for name, value in fields.items()})


def run_main(argv: Sequence[str]) -> int:
    """One command line; returns the exit status."""
    values = flags.FlagValues()
    _define(values)
    if {"--help", "-help", "-h"} & set(argv):
        print(f"{__doc__}\n{values.get_help()}")
        return 0
    try:
        text = render(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def _server_files() -> dict[str, str]:
    folder = resources.files("c2.sandbox") / "toolserver"
    found = (file for file in folder.iterdir() if file.name.endswith(".py"))
    return {file.name: file.read_text(encoding="utf-8") for file in found}


def _define(values: flags.FlagValues) -> None:
    define = {"flag_values": values}
    usual = Resources()
    flags.DEFINE_string("image", "", "Container image of the sandboxes.", **define)
    flags.DEFINE_string("name", "c2", "Of the pool and its template.", **define)
    flags.DEFINE_string("namespace", "c2-sandboxes", "Where they are.", **define)
    flags.DEFINE_string("runtime_class", "gvisor", "RuntimeClass with a kernel of its own for every"
                        " sandbox: gvisor, or kata and the like.", **define)  # fmt: skip
    flags.DEFINE_integer("replicas", 10, "Sandboxes that are kept ready.", lower_bound=0, **define)
    flags.DEFINE_integer("memory_mb", usual.memory_mb, "Memory of each, MiB.", **define)
    flags.DEFINE_integer("disk_mb", usual.disk_mb, "Files of each, MiB.", **define)
    flags.DEFINE_integer("pids", usual.pids, "Processes and threads of each.", **define)
    flags.DEFINE_float("cpus", usual.cpus, "Cores of each.", **define)
    flags.DEFINE_multi_string("node_selector", [], "KEY=VALUE, a label of nodes.", **define)


if __name__ == "__main__":
    jax_setup.quiet_logs()
    sys.exit(run_main(sys.argv))
