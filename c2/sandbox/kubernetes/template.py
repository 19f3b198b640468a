"""What a SandboxTemplate must say for its pods to be sandboxes, and what they may use."""

from collections.abc import Iterator, Sequence
from typing import Any

from kubernetes.utils import parse_quantity

from c2.sandbox.protocol import WORKDIR, Resources, SandboxError

PIDS = "c2/pids"  # annotation of the pods: processes and threads
CONTAINER = "sandbox"
KINDS_OF_VOLUMES = ("emptyDir", "configMap")
MIB = 1 << 20

Object = dict[str, Any]


def check(template: Object, runtime_classes: Sequence[str]) -> None:
    """Raises SandboxError if a wall is missing in a template, and says which ones."""
    if missing := list(_missing(template["spec"], runtime_classes)):
        name = template["metadata"]["name"]
        raise SandboxError(f"template {name!r} is refused: {'; '.join(missing)}")


def resources(template: Object) -> Resources:
    """The limits of its sandboxes; raises SandboxError if one is missing."""
    pod = template["spec"]["podTemplate"]
    try:
        container = _container(pod["spec"])
        limits = container["resources"]["limits"]
        mount = next(m for m in container["volumeMounts"] if m["mountPath"] == WORKDIR)
        volume = next(v for v in pod["spec"]["volumes"] if v["name"] == mount["name"])
        disk = int(parse_quantity(volume["emptyDir"]["sizeLimit"]) // MIB)
        return Resources(
            memory_mb=int(parse_quantity(limits["memory"]) // MIB) - disk,
            disk_mb=disk,
            cpus=float(parse_quantity(limits["cpu"])),
            pids=int(pod["metadata"]["annotations"][PIDS]),
        )
    except (KeyError, StopIteration, ValueError) as error:
        name = template["metadata"]["name"]
        raise SandboxError(f"template {name!r} has no limit: {error}") from error


def _missing(spec: Object, runtime_classes: Sequence[str]) -> Iterator[str]:
    pod = spec["podTemplate"]["spec"]
    if pod.get("runtimeClassName") not in runtime_classes:
        yield f"runtimeClassName is none of {', '.join(runtime_classes)}"
    for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        if pod.get(name):
            yield f"{name} is set"
    for name in ("automountServiceAccountToken", "enableServiceLinks"):
        if pod.get(name) is not False:
            yield f"{name} is not false"
    if pod.get("restartPolicy") != "Never":
        yield "restartPolicy is not Never, so a sandbox could lose its files and go on"
    for volume in pod.get("volumes", ()):
        if not any(kind in volume for kind in KINDS_OF_VOLUMES):
            yield f"volume {volume['name']!r} is none of {', '.join(KINDS_OF_VOLUMES)}"
    policy = spec.get("networkPolicy")
    if spec.get("networkPolicyManagement", "Managed") != "Managed" or policy is None:
        yield "there is no networkPolicy"
    elif policy.get("ingress") or policy.get("egress"):
        yield "networkPolicy lets something through"
    if spec.get("service"):
        yield "service is set"
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        yield from _missing_in(container, pod.get("securityContext", {}))
    if _container(pod) is None:
        yield f"there is no container {CONTAINER!r}"


def _missing_in(container: Object, of_pod: Object) -> Iterator[str]:
    found = of_pod | container.get("securityContext", {})
    wanted = {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True,
    }  # fmt: skip
    for name, value in wanted.items():
        if found.get(name) is not value:
            yield f"{name} of {container['name']!r} is not {str(value).lower()}"
    capabilities = found.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        yield f"{container['name']!r} keeps capabilities"
    if found.get("privileged"):
        yield f"{container['name']!r} is privileged"
    if found.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"{container['name']!r} has no seccompProfile"
    for name in ("memory", "cpu"):
        if name not in container.get("resources", {}).get("limits", {}):
            yield f"{container['name']!r} has no limit of {name}"


def _container(pod: Object) -> Object | None:
    return next((found for found in pod["containers"] if found["name"] == CONTAINER), None)
