"""Job files that start `launch.main` with one config on every host of a cluster.

  python -m launch.cluster slurm --config=... --workdir=DIR --nodes=8 --gpus_per_node=8
  python -m launch.cluster jobset --config=... --workdir=DIR --image=... --claim=NAME:/FOLDER
      --topology=v5p:8x8x16 (or --nodes=8 --gpus_per_node=8)

Prints a Slurm batch script or a Kubernetes JobSet, or writes it to --out. --config and
--config.KEY=VALUE are those of `launch.main`, checked here. DIR must be a folder that all hosts
share. A job that loses a host starts again and resumes from its newest checkpoint.
"""

import dataclasses
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from absl import flags

from c2.config import ConfigError
from launch import jax_setup, main, processes, run_dir
from launch.fill import as_yaml, fill, pair, require

KINDS = ("slurm", "jobset")
GRACE_SECONDS = 120  # between being asked to stop and being stopped
PORT = 8476
# Label on Google Kubernetes Engine and dimensions of a slice; many hosts have 4 chips each.
TPUS = {
    "v4": ("tpu-v4-podslice", 3),
    "v5e": ("tpu-v5-lite-podslice", 2),
    "v5p": ("tpu-v5p-slice", 3),
    "v6e": ("tpu-v6e-slice", 2),
    "tpu7x": ("tpu7x", 3),
}
CHIPS_PER_HOST = 4
_PARTITION = r"[\w.,-]+"
_TIME = r"(\d+-)?\d+(:\d\d){0,2}"
_LABEL = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"  # names of pods add up to 20 characters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A parsed command line; none or "" is what was not given."""

    kind: str
    command: tuple[str, ...]
    workdir: str
    name: str
    nodes: int | None
    gpus_per_node: int
    topology: str
    image: str
    claim: str
    node_selector: tuple[str, ...]
    partition: str
    account: str
    time: str
    restarts: int
    out: str


def parse(argv: Sequence[str]) -> Request:
    """Parses a command line, program name first.

    Raises:
      ConfigError: for an unknown flag, a value that is not legal, or a config that is not.
    """
    rest, overrides = main.split_overrides(argv)
    values = flags.FlagValues()
    _define(values)
    try:
        kind, *stray = values(rest)[1:] or [""]
    except flags.Error as error:
        raise ConfigError(f"{error} (--help lists the flags)") from error
    if kind not in KINDS or stray:
        got = " ".join([kind, *stray])
        raise ConfigError(f"{got!r}: not one kind of cluster; legal: {', '.join(KINDS)}")
    given = {name: values[name].value for name in values}
    for name in ("config", "workdir"):
        if not given[name]:
            raise ConfigError(f"--{name} is missing")
    study, _, _ = main.resolve(given["config"], overrides)
    if not study.multi_process:
        raise ConfigError(f"--config: {study.title} runs on one process, so it needs no cluster")
    workdir = os.path.abspath(given["workdir"]) if kind == "slurm" else given["workdir"]
    command = (
        given["python"] or (sys.executable if kind == "slurm" else "python"),
        "-m",
        "launch.main",
        f"--config={given['config']}",
        f"--workdir={workdir}",
        *(f"--config.{assignment}" for assignment in overrides),
    )
    name = given["name"] or re.sub("[^a-z0-9]+", "-", study.title.lower()).strip("-")
    fields = {field.name: given.get(field.name) for field in dataclasses.fields(Request)}
    fields |= {"kind": kind, "command": command, "workdir": workdir, "name": name}
    return Request(**fields | {"node_selector": tuple(given["node_selector"])})


def render(request: Request) -> str:
    """The text of the job file.

    Raises:
      ConfigError: if a value is missing or not legal.
    """
    require("name", request.name, _LABEL, "lower-case letters, digits and -, at most 40")
    return _slurm(request) if request.kind == "slurm" else _jobset(request)


def run_main(argv: Sequence[str]) -> int:
    """One command line; returns the exit status."""
    if {"--help", "-help", "-h"} & set(argv):
        values = flags.FlagValues()
        _define(values)
        print(f"{__doc__}\n{values.get_help()}")
        return 0
    try:
        request = parse(argv)
        text = render(request)
        if request.out:
            run_dir.write_text(Path(request.out), text)
        else:
            print(text, end="")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _slurm(request: Request) -> str:
    for name in ("image", "claim", "topology", "node_selector"):
        if getattr(request, name):
            raise ConfigError(f"--{name}: means nothing to Slurm")
    options = {"gpus-per-node": request.gpus_per_node or ""}
    legal = {"partition": _PARTITION, "account": _PARTITION, "time": _TIME}
    for name, pattern in legal.items():
        if value := getattr(request, name):
            require(name, value, pattern, f"what matches {pattern}")
            options[name] = value
    return fill(
        "slurm.sh",
        name=request.name,
        nodes=_nodes(request),
        tasks_per_node=request.gpus_per_node or 1,
        options="\n".join(f"#SBATCH --{key}={value}" for key, value in options.items() if value),
        grace_seconds=GRACE_SECONDS,
        directory=shlex.quote(os.getcwd()),
        command=shlex.join([*request.command, f"--processes={processes.CLUSTER}"]),
        restarts=request.restarts,
    )


def _jobset(request: Request) -> str:
    for name in ("partition", "account", "time"):
        if getattr(request, name):
            raise ConfigError(f"--{name}: means nothing to Kubernetes")
    require("image", request.image, r"[\w.:/@-]+", "the name of a container image")
    require("claim", request.claim, r"[a-z0-9.-]+:/[^:]*", "NAME:/FOLDER")
    claim, mount = request.claim.split(":")
    inside = PurePosixPath(request.workdir)
    if ".." in inside.parts or not inside.is_relative_to(mount):
        raise ConfigError(f"--workdir: {request.workdir!r} is not legal; legal: a path in {mount}")
    selector = dict(pair("node_selector", word) for word in request.node_selector)
    # The cluster puts what it finds for $(NAME) into commands; $$ is a $.
    command = [word.replace("$", "$$") for word in request.command]
    annotations = {}
    if request.topology:
        label, chips = _slice(request)
        hosts, per_host = max(1, chips // CHIPS_PER_HOST), min(chips, CHIPS_PER_HOST)
        limits = {"google.com/tpu": per_host}
        shape = request.topology.partition(":")[2]
        selector = {
            "cloud.google.com/gke-tpu-accelerator": label,
            "cloud.google.com/gke-tpu-topology": shape,
        } | selector
        annotations["alpha.jobset.sigs.k8s.io/exclusive-topology"] = "cloud.google.com/gke-nodepool"
        command.append(f"--processes={processes.CLUSTER}")
    else:
        hosts, per_host = _nodes(request), request.gpus_per_node
        limits = {"nvidia.com/gpu": per_host} if per_host else {}
        command += [
            f"--processes={hosts}",
            f"--coordinator={request.name}-hosts-0-0.{request.name}:{PORT}",
            "--process_id=$(JOB_COMPLETION_INDEX)",
        ]
    values = {
        "name": request.name,
        "annotations": annotations,
        "restarts": request.restarts,
        "hosts": hosts,
        "grace_seconds": GRACE_SECONDS,
        "node_selector": selector,
        "image": request.image,
        "command": command,
        "limits": limits,
        "mount": mount,
        "claim": claim,
    }
    return fill("jobset.yaml", **{name: as_yaml(value) for name, value in values.items()})


def _nodes(request: Request) -> int:
    if request.nodes is None:
        choice = "--nodes" if request.kind == "slurm" else "--topology or --nodes"
        raise ConfigError(f"{choice} is missing")
    return request.nodes


def _slice(request: Request) -> tuple[str, int]:
    """Label and number of chips of a TPU slice."""
    if request.nodes is not None or request.gpus_per_node:
        raise ConfigError("--topology: it says the hosts; leave --nodes and --gpus_per_node out")
    chip, _, shape = request.topology.partition(":")
    label, dimensions = TPUS.get(chip, ("", 3))
    if not label or not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{dimensions - 1}}}", shape):
        example = "x".join(["4"] * dimensions)
        known = ", ".join(TPUS)
        raise ConfigError(
            f"--topology: {request.topology!r} is not legal; legal: CHIP:{example} and the like, "
            f"with CHIP one of {known}"
        )
    chips = math.prod(map(int, shape.split("x")))
    if chips > CHIPS_PER_HOST and chips % CHIPS_PER_HOST:
        raise ConfigError(f"--topology: {chips} chips do not fill hosts of {CHIPS_PER_HOST}")
    return label, chips


def _define(values: flags.FlagValues) -> None:
    define = {"flag_values": values}
    flags.DEFINE_string("config", "", "What `launch.main` runs.", **define)
    flags.DEFINE_string("workdir", "", "The run folder, on storage that all hosts share.", **define)
    flags.DEFINE_string("name", "", "Of the job. Default: that of the study.", **define)
    flags.DEFINE_integer("nodes", None, "Hosts.", lower_bound=1, **define)
    flags.DEFINE_integer("gpus_per_node", 0, "NVIDIA GPUs of each.", lower_bound=0, **define)
    flags.DEFINE_string("topology", "", "A TPU slice, for example v5p:8x8x16.", **define)
    flags.DEFINE_integer("restarts", 10, "How often a failed job starts again.", **define)
    flags.DEFINE_string("python", "", "The interpreter on the hosts. Default: this one, or that of"
                        " the image.", **define)  # fmt: skip
    flags.DEFINE_string("image", "", "jobset: container image with this project.", **define)
    flags.DEFINE_string("claim", "", "jobset: NAME:/FOLDER, the volume claim of the shared storage"
                        " and where it is mounted.", **define)  # fmt: skip
    flags.DEFINE_multi_string("node_selector", [], "jobset: KEY=VALUE, a label of nodes.", **define)
    flags.DEFINE_string("partition", "", "slurm: partition.", **define)
    flags.DEFINE_string("account", "", "slurm: account.", **define)
    flags.DEFINE_string("time", "", "slurm: limit, for example 1-00:00:00.", **define)
    flags.DEFINE_string("out", "", "File to write instead of standard output.", **define)


if __name__ == "__main__":
    jax_setup.quiet_logs()
    sys.exit(run_main(sys.argv))
