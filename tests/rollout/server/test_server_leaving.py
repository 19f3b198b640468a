"""Clients that leave, engines that fail, servers that are full or stop."""

import asyncio
import json
import re
import threading

import openai
import pytest

ASK = {"model": "tiny", "prompt": "x", "max_tokens": 500}
ENDLESS = {"ignore_eos": True}


@pytest.fixture
def server(gated_engine, serve):
    with serve(gated_engine, timeout_graceful_shutdown=1) as server:
        yield server


class Asking(threading.Thread):
    """A request whose answer is waited for elsewhere."""

    def __init__(self, server, ask):
        super().__init__()
        self._request = server, ask
        self.start()

    def run(self):
        server, ask = self._request
        self.answer = server.ask("POST", "/v1/completions", ask)


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_frees_its_slots(gated_engine, server, gate, eventually, stream):
    """Four sequences run, two wait."""
    data = json.dumps(ASK | {"n": 6, "stream": stream}).encode()

    async def ask_and_leave():
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await asyncio.to_thread(eventually, lambda: gated_engine.metrics()["running"] == 4)
        assert await asyncio.to_thread(lambda: server.open) == 6
        writer.close()
        await writer.wait_closed()

    asyncio.run(ask_and_leave())
    eventually(lambda: server.open == 0)
    gate.set()
    gated_engine.await_idle()
    assert gated_engine.metrics()["tokens"] <= 4 * 3  # the dispatch during which the client left


def test_whoever_leaves_within_a_body(gated_engine, server):
    async def half():
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    asyncio.run(half())
    assert server.ask("GET", "/health")[0] == 200 and server.open == 0


def test_too_many_requests_are_told_to_come_again(server, gate, eventually):
    waiting = Asking(server, ASK | {"n": 5, "max_tokens": 9})
    eventually(lambda: server.open == 5)
    two = ASK | {"n": 2, "max_tokens": 9}
    status, headers, body = server.ask("POST", "/v1/completions", two)
    assert status == 429 and headers["retry-after"] == "1"
    error = json.loads(body)["error"]
    assert error["message"].startswith("5 sequences run or wait, of 6")
    assert error["type"] == "rate_limit_error"
    gate.set()
    waiting.join()
    assert waiting.answer[0] == 200 and len(json.loads(waiting.answer[2])["choices"]) == 5
    eventually(lambda: server.open == 0)
    assert server.ask("POST", "/v1/completions", two)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails(build_engine, fake_device, serve, stream):
    class Broken(fake_device):
        def decode(self, slots, *, speculate=False):
            if slots.count.max() >= 6:
                raise RuntimeError("the chip is on fire")
            return super().decode(slots)

    with build_engine(Broken) as engine, serve(engine) as server:
        assert server.ask("GET", "/health")[0] == 200
        status, _, body = server.ask("POST", "/v1/completions", ASK | ENDLESS | {"stream": stream})
        assert b"the engine has stopped: the chip is on fire" in body
        if stream:
            events = [json.loads(event) for event in re.findall(b"data: (.*)\n\n", body)]
            assert status == 200 and events[0]["object"] == "text_completion"
            assert events[-1]["error"]["type"] == "server_error"
        else:
            assert status == 503
        for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
            status, _, body = server.ask(method, path, ASK)
            assert status == 503 and json.loads(body)["error"]["type"] == "server_error"
        assert server.open == 0


def test_the_client_sees_a_failure_in_a_stream(build_engine, fake_device, serve):
    class Broken(fake_device):
        def decode(self, slots, *, speculate=False):
            raise RuntimeError("the chip is on fire")

    with (
        build_engine(Broken) as engine,
        serve(engine) as server,
        openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="on fire"),
    ):
        list(client.completions.create(**ASK, stream=True))


def test_a_server_that_stops_lets_requests_end(gated_engine, serve, gate, eventually):
    with serve(gated_engine) as server:
        waiting = Asking(server, ASK | ENDLESS)
        eventually(lambda: server.open == 1)
        server.uvicorn.should_exit = True
        gate.set()
        waiting.join()
    assert waiting.answer[0] == 200 and b'"completion_tokens":500' in waiting.answer[2]


def test_a_server_whose_time_is_up_cancels_requests(gated_engine, server, gate):
    with openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
        stream = client.completions.create(**ASK, stream=True)
        server.uvicorn.should_exit = True
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    gate.set()
    gated_engine.await_idle()
    assert gated_engine.metrics()["tokens"] <= 3
