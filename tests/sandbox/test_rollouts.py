"""Rollouts that are cut off in every way, and owners that are killed, leave nothing behind."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from c2.sandbox import cgroups
from c2.sandbox.node import PREFIX, sweep
from c2.sandbox.pool.log import Log, read

# Scripted agents that solve generated tasks, four at a time, on a pool of two nodes. What else
# happens to a rollout is drawn for each. Each line that this prints is a rollout done.
OWNER = """
import asyncio, itertools, json, os, random, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from c2.agent.agents import ScriptedPolicy, TokenAgent
from c2.agent.chat import ByteTokenizer, ChatFormat, Message
from c2.agent.harness import HarnessConfig, run
from c2.sandbox import bwrap
from c2.sandbox.pool import Limits, Pool, PoolConfig
from c2.sandbox.protocol import Resources, SandboxError, Spec
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.grade import grade, in_sandbox, tests_command
from c2.sandbox.tasks.minirepo import policies
from c2.sandbox.tools.environment import sandbox_tools, task_tests
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import ToolsConfig

def say(told):
    os.write(1, json.dumps(told).encode() + b"\\n")  # at once, as threads write too

class Popen(bwrap.subprocess.Popen):  # of nodes: tells of each
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        say({"node": self.pid})

bwrap.subprocess.Popen = Popen
log, seed, first, last = sys.argv[1], *map(int, sys.argv[2:])
busy = "sleep 99 & setsid sleep 99 & trap '' TERM; head -c 100k /dev/urandom > f; sleep 99"
resources = Resources(memory_mb=64, disk_mb=16, pids=48)
spec = Spec(resources=resources, ttl_s=4.0, deadline_s=30.0)
clean = Spec(resources=Resources(memory_mb=96, disk_mb=16, pids=48), deadline_s=60.0)
limits = Limits(reserve_mb=64, cpu_pressure=100, memory_pressure=100)
events = {"nothing": 4, "time out": 2, "deadline": 1, "fork": 2, "forget": 2, "race": 1, "kill": 3,
          "kill node": 0.3}

def below(pid):
    try:
        inner = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(pid) for pid in inner] + [other for pid in inner for other in below(pid)]

def script(task, at, event):
    expert, answer = policies.expert(task, test_before=True), None
    for step in itertools.count():
        if step == at and (call := event()) is not None:
            yield call
        try:
            answer = yield expert.send(answer)
        except StopIteration:
            return

def rollout(number):
    rng = random.Random(seed + number)
    what = rng.choices(list(events), events.values())[0]
    task = minirepo.generate(number, minirepo.FAMILIES[number % len(minirepo.FAMILIES)], 1)
    result = {"event": what}
    try:
        handle = pool.create(spec, owner=f"worker-{number % 4}", key=str(number))
        node = pool._engine.at(handle).member.backend.pid
        for path, text in task.files.items():
            pool.write(handle, f"/repo/{path}", text.encode())
        if number % 2:
            pool.start(handle, ["sh", "-c", busy])

        def event():
            if what == "time out":
                return Call("shell", {"command": busy, "timeout_s": 0.05})
            if what == "fork":
                pool.exec(pool.fork(handle)[0], ["ls"])  # nobody closes the fork
            elif what == "race":
                threading.Timer(0.02, pool.close, [handle]).start()
            elif what == "kill":  # any process of the node, what makes sandboxes among them
                os.kill(rng.choice(below(node)), signal.SIGKILL)
            elif what == "kill node":
                os.kill(node, signal.SIGKILL)

        tools = sandbox_tools(pool, handle, ToolsConfig(), run_tests=task_tests(pool, handle, task))
        chat = ChatFormat(ByteTokenizer(), tools)
        agent = TokenAgent(ScriptedPolicy(script(task, rng.randrange(4), event), chat), chat)
        config = HarnessConfig(context=1 << 18, deadline_s=0.05 if what == "deadline" else 60.0)
        prompt = [Message(role="user", text=task.prompt)]
        session = asyncio.run(run(agent, tools, prompt, config, seed=number))
        result |= {"stop": session.stop, "failed": session.failed}
        if what == "forget":
            return
        if session.stop == "done":
            read = {path: pool.read(handle, f"/repo/{path}").decode() for path in task.files}
            pool.close(handle)
            outcome = grade(task, read, in_sandbox(pool, clean))
            result |= {"kind": outcome.kind, "reward": outcome.reward}
        pool.close(handle)
    except (SandboxError, ProcessLookupError, IndexError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        say(result)

with Pool(PoolConfig(nodes=2, backend="zygote", limits=limits, log=log)) as pool:
    pool.keep_ready(clean, 2, command=tests_command({}, {}, ()).argv)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(rollout, range(first, last)))
"""


def traces(nodes: set[int]) -> dict[str, set]:
    """What nodes can leave on this machine, or their owners in this process."""
    names = [f"-{node}" for node in nodes]  # of their groups and folders, at the end

    def ours(text: str) -> bool:
        words = text.replace("\0", " ").replace("/", " ").split()
        return any(word.startswith(PREFIX) and word.endswith(tuple(names)) for word in words)

    processes, namespaces = set(), set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            told = (path / "cmdline").read_text(errors="replace")
            if int(path.name) in nodes or ours(told + (path / "cgroup").read_text()):
                processes.add(f"{path.name}: {told[:200]!r}")
                namespaces.update(os.readlink(link) for link in (path / "ns").iterdir())
    places = [*cgroups.find().folders(), Path(tempfile.gettempdir())]
    return {
        "processes": processes,
        "namespaces": namespaces,
        "mounts": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "groups and folders": {p for top in places for p in top.glob(PREFIX + "*") if ours(p.name)},
        "open files": set(os.listdir("/proc/self/fd")),
    }


def left(before: dict[str, set], nodes: set[int], seconds: float = 20.0) -> dict[str, set]:
    """What is there that was not before, once nothing is or it is clear that it stays."""
    end = time.monotonic() + seconds
    while True:
        more = {kind: found - before[kind] for kind, found in traces(nodes).items()}
        if not any(more.values()) or time.monotonic() > end:
            return {kind: found for kind, found in more.items() if found}
        time.sleep(0.1)


def run_owner(
    log: Path, seed: int, first: int, last: int, kill_at: int | None
) -> tuple[list[dict], set[int]]:
    """Runs rollouts until all are done or the owner is killed: what came of them, and its nodes."""
    command = [sys.executable, "-c", OWNER, log, seed, first, last]
    results, nodes = [], set()
    with subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        for line in process.stdout:
            told = json.loads(line)
            if "node" in told:
                nodes.add(told["node"])
                continue
            results.append(told)
            if len(results) == kill_at:
                # What stands there by now is still to be read, nodes that it has started above all.
                process.kill()
                kill_at = 0
    assert process.returncode == (-signal.SIGKILL if kill_at == 0 else 0)
    return results, nodes


@pytest.mark.parametrize(
    "rollouts, kills", [(40, 1), pytest.param(2000, 20, marks=pytest.mark.slow)]
)
def test_rollouts_leave_nothing(walls, tmp_path, rollouts, kills):
    log = tmp_path / "log"
    before = traces(set())
    rng = random.Random(rollouts)
    stops = sorted(rng.sample(range(10, rollouts - 10), kills))
    results: list[dict] = []
    for number, stop in enumerate([*stops, None]):
        kill_at = None if stop is None else max(1, stop - len(results))
        more, nodes = run_owner(log, number * 10_000, len(results), rollouts, kill_at)
        results += more
        sweep()  # as every node does when it starts: a node may have been killed with its owner
        assert nodes and not left(before, nodes)
    assert len(results) >= rollouts
    # Every sandbox that was ever asked for has ended, exactly once; those of killed owners were
    # written off by the next.
    book = read(log)
    assert not book.open and book.asked == book.ended.total() >= rollouts
    assert book.ended["lost"] >= kills
    Log(log, time.time()).close()
    # What ends a rollout from outside is no wrong answer, but for a test's process that was killed.
    verdicts = Counter((result.get("kind"), result.get("reward")) for result in results)
    events = Counter(result["event"] for result in results)
    print(f"{len(results)} rollouts, {events}; {verdicts}; sandboxes by end: {dict(book.ended)}")
    assert verdicts["scored", 1.0] > rollouts / 3
    assert verdicts["scored", 0.0] + verdicts["policy_failure", 0.0] <= events["kill"]
    assert not any(result["failed"] for result in results if "kind" in result)
