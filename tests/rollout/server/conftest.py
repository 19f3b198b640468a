"""Servers on real sockets, in front of engines that say what a test wants."""

import asyncio
import importlib.util
import json
import re
import threading
import time
from dataclasses import replace

import pytest

from c2.agent.chat import ByteTokenizer
from c2.rollout import engine as engines
from c2.rollout.config import EngineConfig
from c2.rollout.engine import Engine

_EXTRA = ("openai", "prometheus_client", "pydantic", "starlette", "uvicorn")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, _EXTRA)) else ["test_*.py"]

TOKENIZER = ByteTokenizer()
VOCAB = 264  # of the tokenizer
ENGINE = EngineConfig(
    slots=4, capacity=600, prefill_rows=2, prefill_chunk=16, steps=3, training=False
)


class ScriptedEngine(Engine):
    """Says what `script` says, as long as that goes, then what its device says."""

    script = ()

    def submit(self, request, emit):
        forced = dict(enumerate(self.script[: request.max_tokens]))
        return super().submit(replace(request, forced=forced), emit)

    def await_idle(self):
        """Waits until nothing runs, waits or has a ticket."""
        wait_for(lambda: not (self.metrics()["running"] + self.metrics()["waiting"]))
        wait_for(lambda: not self._open)


class Server:
    """An application that is served by a thread while the context lasts."""

    def __init__(self, app, **options):
        import uvicorn

        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", **options)
        self.uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="server")

    async def _run(self):
        self.loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        await self.uvicorn.serve()

    def __enter__(self):
        self._thread.start()
        wait_for(lambda: self.uvicorn.started)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    def __exit__(self, *_):
        self.uvicorn.should_exit = True
        self._thread.join()

    def ask(self, method, path, data=b""):
        """A request over a connection of its own: status, headers, body."""
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        return asyncio.run(asyncio.wait_for(exchange(self.port, method, path, data), 30))

    @property
    def tasks(self):
        """Tasks of the server's event loop, its own aside."""
        return len(asyncio.all_tasks(self.loop) - {self._task})

    @property
    def open(self):
        """Sequences of requests that are being answered, as `/metrics` says."""
        body = self.ask("GET", "/metrics")[2].decode()
        return int(float(re.search(r"^c2_rollout_open (\S+)$", body, re.MULTILINE)[1]))


async def exchange(port, method, path, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close"]
        writer.write("\r\n".join([*lines, f"Content-Length: {len(data)}\r\n\r\n"]).encode() + data)
        await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()
    status, *fields = head.decode().split("\r\n")
    pairs = (field.split(": ", 1) for field in fields)
    return int(status.split()[1]), {name.lower(): value for name, value in pairs}, body


def wait_for(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not happen")


@pytest.fixture(scope="session")
def eventually():
    return wait_for


@pytest.fixture(scope="session")
def chat():
    """The project's chat format with bytes as tokens, as `launch.serve` gives it to the server."""
    from launch.serve_chat import ServedChat

    return ServedChat(TOKENIZER)


@pytest.fixture(scope="session")
def serve(chat):
    """Serves an engine: (engine, ..., **what uvicorn takes) -> context of a `Server`."""
    from c2.rollout.server.app import create_app
    from c2.rollout.server.config import ServerConfig

    def build(engine, tokenizer=TOKENIZER, chat=chat, max_waiting=2, **options):
        end = (TOKENIZER.special("end"),)
        config = ServerConfig(model="tiny", max_waiting=max_waiting, max_body=20_000)
        return Server(create_app(engine, tokenizer, config, chat=chat, end=end), **options)

    return build


@pytest.fixture(scope="session")
def build_engine(fake_device, model):
    """Builds a `ScriptedEngine` on a device without a model."""

    def build(device_type=fake_device):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "Device", lambda *_: device_type(ENGINE, vocab=VOCAB))
            return ScriptedEngine(None, replace(model, vocab=VOCAB), ENGINE)

    return build


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def gated_engine(build_engine, fake_device, gate):
    """An engine that decodes once the gate is open."""

    class Gated(fake_device):
        def decode(self, slots, *, speculate=False):
            gate.wait(30)
            return super().decode(slots)

    with build_engine(Gated) as engine:
        yield engine
        gate.set()  # or it would not close


@pytest.fixture(scope="module")
def engine(build_engine):
    with build_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine, serve):
    with serve(engine) as server:
        yield server


@pytest.fixture
def client(server):
    import openai

    with openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client
