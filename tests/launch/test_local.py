"""Services in processes: calls, errors, cancellation, deaths, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from c2.rl.calls import LostError
from launch.local import LocalLauncher


class Unreadable(Exception):
    """Can be pickled, but not read back: it wants two arguments."""

    def __init__(self, one, two):
        super().__init__(one)


class Service:
    def __init__(self, name, other=None):
        self.name, self.other = name, other
        self.cancelled = 0

    async def echo(self, value):
        return self.name, os.getpid(), value

    async def ask(self, value):
        return await self.other.call("echo", value)

    async def fail(self, kind):
        raise {"value": ValueError("no"), "odd": Unreadable("a", "b")}[kind]

    async def sleep(self, seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return seconds

    async def count(self):
        return self.cancelled


def run(body):
    async def whole():
        launcher = LocalLauncher()
        try:
            async with asyncio.timeout(60):
                await body(launcher)
        finally:
            folder = launcher._folder
            await launcher.close()
            assert not folder.exists()

    asyncio.run(whole())


def test_services_answer_each_other_and_many_at_once():
    async def body(launcher):
        one = await launcher.start("one", partial(Service, "a"))
        two = await launcher.start("two", partial(Service, "b", one))
        name, pid, value = await two.call("ask", {"x": b"\0" * 1_000_000})
        assert name == "a" and pid == launcher.pid("one") and len(value["x"]) == 1_000_000
        answers = await asyncio.gather(*(one.call("sleep", 0.2 - 0.002 * i) for i in range(100)))
        assert answers == [0.2 - 0.002 * i for i in range(100)]

    run(body)


def test_errors_come_back_and_a_cancelled_call_is_cancelled_there():
    async def body(launcher):
        one = await launcher.start("one", partial(Service, "a"))
        with pytest.raises(ValueError, match="no"):
            await one.call("fail", "value")
        with pytest.raises(RuntimeError, match="Unreadable: a"):
            await one.call("fail", "odd")
        with pytest.raises(AttributeError):
            await one.call("nothing")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await one.call("sleep", 60)
        while await one.call("count") != 1:
            await asyncio.sleep(0.01)

    run(body)


def test_a_death_is_seen_by_callers_and_the_next_one_takes_its_place():
    async def body(launcher):
        one = await launcher.start("one", partial(Service, "a"))
        two = await launcher.start("two", partial(Service, "b", one))
        dying = asyncio.create_task(launcher.died("one"))
        call = asyncio.create_task(one.call("sleep", 60))
        await asyncio.sleep(0.1)
        os.kill(launcher.pid("one"), signal.SIGKILL)
        assert await dying == "one: killed by signal 9"
        with pytest.raises(LostError, match="one: it died"):
            await call
        with pytest.raises(LostError, match="one"):
            await two.call("ask", 1)
        await launcher.start("one", partial(Service, "c"))
        assert (await two.call("ask", 1))[0] == "c"
        assert (await one.call("echo", 1))[0] == "c"

    run(body)


def test_a_service_that_cannot_be_made_is_said():
    async def body(launcher):
        with pytest.raises(LostError, match="one: it ended with status 1"):
            await launcher.start("one", partial(Service))

    run(body)


def test_services_end_when_their_launcher_is_killed():
    code = """
import asyncio
from functools import partial
from launch.local import LocalLauncher
from test_local import Service

async def main():
    launcher = LocalLauncher()
    await launcher.start("one", partial(Service, "a"))
    print(launcher.pid("one"), launcher._folder, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", ""), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as parent:
        pid, folder = parent.stdout.readline().split()
        parent.kill()
    for _ in range(1000):
        if not Path(f"/proc/{pid}").exists():
            break
        subprocess.run(["sleep", "0.01"], check=True)
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(folder).exists()


def refuse():
    raise ValueError("the learning rate is a fish")


def test_a_service_that_cannot_start_says_why(tmp_path):
    async def play():
        launcher = LocalLauncher(logs=tmp_path)
        try:
            with pytest.raises(LostError, match=r"status 1; it printed: .*is a fish \(all of it: "):
                await launcher.start("training", refuse)
        finally:
            await launcher.close()

    asyncio.run(play())
