"""Runs tasks in Harbor's format.

The tests run in a new sandbox with the files, but not the processes, of the agent's. Unlike with
`grade`, all that the agent has changed is there, programs of the system too: that is what such
tasks are about, and why what they say is worth less.
"""

import json
import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from c2.sandbox.protocol import (
    Backend,
    ExecResult,
    Handle,
    SandboxError,
    SandboxLost,
    Spec,
    ToolError,
    Unsupported,
    require,
)
from c2.sandbox.tasks.grade import Outcome
from c2.sandbox.tasks.harbor import dockerfile
from c2.sandbox.tasks.harbor.format import HarborTask

MAX_REWARD = 1 << 16
VERDICTS = "/logs/verifier"


@dataclass(frozen=True)
class Place:
    """A built environment: a layer, and how commands run in it."""

    layer: str
    folder: str
    env: dict[str, str]


def build(backend: Backend, task: HarborTask) -> Place:
    """Makes the environment of a task: runs its Dockerfile in a sandbox and keeps the files.

    Raises:
      Unsupported: if the task wants what is not to be had here.
      ToolError: if an instruction fails, for example because it wants the network.
    """
    if task.unsupported:
        raise Unsupported(f"{task.id}: {task.unsupported[0]} is not to be had here")
    require(backend, "layers")
    folder, env = "/", dict(task.env)
    handle = backend.create(_spec(task, (), task.build_s))
    try:
        for step in dockerfile.steps(task.files.get("Dockerfile", b"").decode()):
            if step.name == "WORKDIR":
                folder = posixpath.join(folder, step.text)
                _ask(backend, handle, task, step, ["mkdir", "-p", folder], "/", env)
            elif step.name == "ENV":
                env |= dockerfile.assignments(step.text)
            elif step.name == "RUN":
                _ask(backend, handle, task, step, ["sh", "-c", step.text], folder, env)
            elif step.name == "COPY":
                for path, data in dockerfile.copied(task.files, step, folder).items():
                    backend.write(handle, path, data)
        return Place(backend.snapshot(handle), folder, env)
    finally:
        backend.close(handle)


def start(backend: Backend, task: HarborTask, place: Place) -> Handle:
    """A sandbox for an agent."""
    return backend.create(_spec(task, (place.layer,), task.agent_s))


def solve(backend: Backend, task: HarborTask, place: Place, handle: Handle) -> ExecResult:
    """Does what the task's own solution does."""
    if "solve.sh" not in task.solution:
        raise Unsupported(f"{task.id}: it has no solution/solve.sh")
    _put(backend, handle, "/solution", task.solution)
    return backend.exec(
        handle, ["bash", "/solution/solve.sh"], cwd=place.folder, env=place.env,
        timeout_s=task.agent_s,
    )  # fmt: skip


def verify(backend: Backend, task: HarborTask, place: Place, handle: Handle) -> Outcome:
    """Scores what an agent has left in its sandbox, in another one; `reward` is that of the tests.

    Call it after all of the agent's processes have been killed.
    """
    try:
        return _judge(task, _with_copy(backend, task, place, handle))
    except SandboxLost as error:
        blame = error.reason in ("exited", "deadline")
        return _outcome("policy_failure" if blame else "infrastructure_failure", str(error))
    except SandboxError as error:
        return _outcome("infrastructure_failure", str(error))


def _with_copy(
    backend: Backend, task: HarborTask, place: Place, handle: Handle
) -> tuple[ExecResult, dict[str, bytes]]:
    """How the tests ended, and the files with rewards that they left."""
    layer = backend.snapshot(handle)
    copy = backend.create(_spec(task, (place.layer, layer), task.verifier_s))
    try:
        backend.exec(copy, ["rm", "-rf", "/tests", "/logs"], cwd="/")
        backend.exec(copy, ["mkdir", "-p", VERDICTS], cwd="/")
        _put(backend, copy, "/tests", task.tests)
        result = backend.exec(
            copy, ["bash", "/tests/test.sh"], cwd=place.folder,
            env=place.env | task.verifier_env, timeout_s=task.verifier_s,
        )  # fmt: skip
        found = {}
        for name in ("reward.txt", "reward.json"):
            if backend.stat(copy, f"{VERDICTS}/{name}").kind == "file":
                found[name] = backend.read(copy, f"{VERDICTS}/{name}", limit=MAX_REWARD)
        return result, found
    finally:
        backend.close(copy)
        backend.drop_layer(layer)


def _judge(task: HarborTask, ending: tuple[ExecResult, Mapping[str, bytes]]) -> Outcome:
    result, found = ending
    if result.killed:
        return _outcome("policy_failure", f"the tests were killed: {result.killed}")
    try:
        given = rewards(found)
    except ValueError as error:
        return _outcome("policy_failure", f"no reward: {error}")
    if "reward" not in given and len(given) != 1:
        return _outcome("infrastructure_failure", f"{task.id} has rewards {', '.join(given)}")
    value = given.get("reward", next(iter(given.values())))
    return replace(_outcome("scored", ""), reward=value)


def rewards(found: Mapping[str, bytes]) -> dict[str, float]:
    """The numbers that tests wrote, by name; one without a name is "reward".

    Raises:
      ValueError: if there is none, or one that is no finite number.
    """
    if "reward.txt" in found:
        given: Any = {"reward": float(found["reward.txt"])}
    elif "reward.json" in found:
        data = json.loads(found["reward.json"])
        given = data if isinstance(data, dict) else {"reward": data}
    else:
        raise ValueError("the tests wrote none")
    for value in given.values():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{value!r} is no number")
        if not math.isfinite(value):
            raise ValueError(f"{value} is not finite")
    return {str(name): float(value) for name, value in given.items()}


def _outcome(kind: Any, reason: str) -> Outcome:
    reward = 0.0 if kind == "policy_failure" else None
    return Outcome(kind=kind, reward=reward, failed={}, changed=(), ignored=(), reason=reason)


def _spec(task: HarborTask, layers: Sequence[str], seconds: float) -> Spec:
    seconds += 600  # for what is done around it
    return Spec(layers=tuple(layers), resources=task.resources, deadline_s=seconds, ttl_s=seconds)


def _ask(
    backend: Backend,
    handle: Handle,
    task: HarborTask,
    step: dockerfile.Step,
    argv: Sequence[str],
    folder: str,
    env: Mapping[str, str],
) -> None:
    result = backend.exec(handle, argv, cwd=folder, env=env, timeout_s=task.build_s)
    if not result.ok:
        said = (result.error or result.stderr.decode(errors="replace")).strip()[-200:]
        raise ToolError(f"{task.id}: Dockerfile:{step.line}: {step.name} fails: {said}")


def _put(backend: Backend, handle: Handle, folder: str, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        backend.write(handle, f"{folder}/{path}", data, mode=0o755)
