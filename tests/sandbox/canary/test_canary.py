"""An agent that tries to get at everything that is not its own. Run with -s to see what it got."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest
import rich.box
import rich.console
import rich.table

from c2.agent.agents import ScriptedPolicy, TokenAgent
from c2.agent.chat import ByteTokenizer, ChatFormat, Message
from c2.agent.harness import HarnessConfig, run
from c2.agent.transcript import Transcript, read
from c2.sandbox.pool import Limits, Pool, PoolConfig
from c2.sandbox.pool.log import read as read_log
from c2.sandbox.protocol import Resources, Spec
from c2.sandbox.tools.environment import sandbox_tools
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import ToolsConfig

RESOURCES = Resources(memory_mb=64, disk_mb=16, pids=48)
LIMITS = Limits(reserve_mb=64, cpu_pressure=100, memory_pressure=100)


class Try(NamedTuple):
    """What the agent tries, as a command of a shell, and the answer to it."""

    what: str
    command: str
    seconds: float
    answer: str


def play(backend, handle, attempts, places, log: Path) -> list[Try]:
    """Lets an agent make the attempts, each in a turn of its own."""
    tools = sandbox_tools(backend, handle, ToolsConfig(max_result=4096, max_shell_s=20))
    chat, tried = ChatFormat(ByteTokenizer(), tools), []

    def script():
        for attempt in attempts:
            command = attempt.at(places)
            answer = yield Call("shell", {"command": command, "timeout_s": attempt.seconds})
            tried.append(Try(attempt.what, command, attempt.seconds, answer))

    agent = TokenAgent(ScriptedPolicy(script(), chat), chat)
    budgets = HarnessConfig(max_turns=999, context=1 << 20, total_tokens=1 << 20)
    task = [Message(role="user", text="take what you can")]
    with Transcript(log) as transcript:
        session = asyncio.run(run(agent, tools, task, budgets, observe=[transcript]))
    assert session.stop == "done" and session.calls == len(attempts), session.lost
    return tried


def show(title: str, tried: list[Try], got: set[str]) -> None:
    table = rich.table.Table("attempt", "answer", "got", box=rich.box.SIMPLE_HEAD, title=title)
    for one in tried:
        lines = one.answer.splitlines()
        table.add_row(one.what, " ".join(lines[-2:])[-90:], "YES" if one.what in got else "no")
    rich.console.Console(width=150, highlight=False, markup=False).print(table)


@pytest.mark.parametrize("backend", ["bwrap", "zygote"])
def test_a_canary_agent_gets_nothing_and_harms_nothing(walls, host, attempts, tmp_path, backend):
    book, log = tmp_path / "pool.jsonl", tmp_path / "transcript.jsonl"
    host.heard.clear()
    with Pool(PoolConfig(backend=backend, limits=LIMITS, log=str(book))) as pool:
        secret = host.places["sibling"]
        sibling = pool.create(Spec(resources=RESOURCES), owner="sibling")
        pool.write(sibling, "/repo/secret", secret.encode())
        job = pool.start(sibling, ["sh", "-c", f"echo {secret} > /tmp/s; tail -f /repo/secret"])
        spec = Spec(resources=RESOURCES, labels={"agent": "canary"})
        handle = pool.create(spec, owner="canary")
        pool.write(handle, "/repo/code.py", b"x = 1\n")
        before = host.state()
        tried = play(pool, handle, attempts, host.places, log)
        got = {one.what for one in tried if host.got(one.answer, "[exit status 0" in one.answer)}
        show(f"canary agent, {backend}", tried, got)
        assert got == set()
        # The machine and the sibling are as they were, and nobody outside was spoken to.
        assert host.state() == before and host.heard == []
        assert pool.read(sibling, "/repo/secret") == secret.encode()
        assert pool.jobs(sibling) == [job] and pool.exec(sibling, ["true"]).ok
        # Its own sandbox still works: all that it used up is free again.
        assert pool.exec(handle, ["sh", "-c", "head -c 8M /dev/zero > big && rm big"]).ok
        pool.close(handle)
    # All of it is in the log, word for word.
    events = list(read(log))
    turns = [event for event in events if event["event"] == "turn"]
    asked = [request for event in turns for request in event.get("calls", ())]
    assert [request["arguments"]["command"] for request in asked] == [one.command for one in tried]
    answered = [event["text"] for event in events if event["event"] == "result"]
    assert answered == [one.answer for one in tried]
    ledger = read_log(book)
    assert not ledger.open and ledger.ended == {"closed": 2}
