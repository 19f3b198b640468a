"""A tool server in the hands of the enemy can do no more than end its own sandbox."""

import os
import socket
import struct
import threading

import pytest

from c2.sandbox import client
from c2.sandbox.client import Client
from c2.sandbox.protocol import Chunk, Handle, SandboxLost, ToolError
from c2.sandbox.served import Served
from c2.sandbox.toolserver.frames import MAX_FRAME, Decoder, encode, pack

GOOD = {
    "code": 0, "signal": None, "error": None, "stdout": pack(b"out"), "stderr": "", "job": 1,
    "truncated": False, "killed": None, "duration": 0.5, "left": False, "done": True,
}  # fmt: skip


class Backend(Served):
    """One sandbox whose server answers what the test wants."""

    def __init__(self, sock):
        self.client = Client(sock)

    def _client(self, handle):
        return self.client

    def _env(self, handle):
        return {}

    def _new_oom_kills(self, handle):
        return 0

    def _lost(self, handle, error):
        return error


HANDLE = Handle("enemy", "1")


@pytest.fixture
def enemy(monkeypatch):
    """Starts a server that answers each request with the bytes that `answer(request)` gives."""
    monkeypatch.setattr(client, "PATIENCE_S", 0.3)
    monkeypatch.setattr("c2.sandbox.served.GRACE_S", 0.0)
    ours, theirs = socket.socketpair()
    threads = []

    def start(answer) -> Backend:
        def serve():
            decoder = Decoder()
            with theirs:
                try:
                    while data := theirs.recv(1 << 16):
                        for request in decoder.feed(data):
                            for part in answer(request):
                                theirs.sendall(part)
                except OSError:
                    pass

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        return Backend(ours)

    yield start
    ours.close()
    theirs.close() if not threads else None
    for thread in threads:
        thread.join()


def answer(request, **changes):
    return encode({"jsonrpc": "2.0", "id": request["id"], "result": {**GOOD, **changes}})


def output(request, data, stream="stdout"):
    params = {"id": request["id"], "stream": stream, "data": pack(data)}
    return encode({"jsonrpc": "2.0", "method": "output", "params": params})


def run(backend, **options):
    return backend.exec(HANDLE, ["x"], timeout_s=0.1, max_output=1000, **options)


def test_good_answer(enemy):
    backend = enemy(lambda request: [answer(request)])
    result = run(backend)
    assert result.stdout == b"out" and result.ok and result.duration_s == 0.5


@pytest.mark.parametrize(
    "name, value",
    [
        ("code", "0"), ("code", 0.5), ("signal", True), ("stdout", None), ("stdout", "!"),
        ("stdout", pack(b"x" * 1001)), ("stderr", 3), ("truncated", 1), ("killed", 1),
        ("duration", "1"), ("job", None), ("left", None), ("error", {}),
    ],
)  # fmt: skip
def test_wrong_result(enemy, name, value):
    backend = enemy(lambda request: [answer(request, **{name: value})])
    with pytest.raises(SandboxLost, match="nonsense"):
        run(backend)
    with pytest.raises(SandboxLost, match=r"nonsense|closed"):
        run(backend)  # it is not asked again


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff", struct.pack(">I", MAX_FRAME + 1), b"\0\0\0\2{]", b"\0\0\0\4null",
        encode({"id": 1}), encode({"id": 1, "result": []}), encode({"id": 1, "error": "x"}),
        encode({"id": 1, "error": {"message": 3}}), encode({"method": "output"}),
        encode({"method": "output", "params": []}),
        encode({"method": "output", "params": {"id": 1, "stream": "stdin", "data": ""}}),
        encode({"method": "output", "params": {"id": 1, "stream": "stdout", "data": 1}}),
        encode({"method": "output", "params": {"id": 1, "stream": "stdout", "data": pack(b"x")}}),
    ],
)  # fmt: skip
def test_nonsense(enemy, sent):
    backend = enemy(lambda request: [sent])
    with pytest.raises(SandboxLost, match="nonsense"):
        run(backend)


@pytest.mark.parametrize(
    "sent",
    [
        [], [b"\0\0"], [b"\0\0\1\0{"], [encode({"id": 99, "result": GOOD})] * 100,
        [encode({"id": "1", "result": GOOD}), encode({"id": None, "result": GOOD})],
    ],
)  # fmt: skip
def test_silence(enemy, sent):
    backend = enemy(lambda request: sent)
    with pytest.raises(SandboxLost, match="does not answer"):
        run(backend)


def test_end(enemy):
    def leave(request):
        raise OSError

    with pytest.raises(SandboxLost, match="has ended"):
        run(enemy(leave))


def test_refusal_is_one_bounded_line(enemy):
    error = {"message": "no\nsuch\x0bfile " + "x" * 10_000}
    backend = enemy(lambda request: [encode({"id": request["id"], "error": error})])
    with pytest.raises(ToolError) as refused:
        run(backend)
    assert len(str(refused.value)) <= 500 and len(str(refused.value).splitlines()) == 1


def test_endless_output_is_cut(enemy):
    def flood(request):
        while True:
            yield output(request, b"x" * 100)

    received = 0
    with pytest.raises(SandboxLost, match="not asked for"):
        for chunk in enemy(flood).stream(HANDLE, ["x"], timeout_s=0.1, max_output=1000):
            received += len(chunk.data)
    assert received <= 2000


def test_empty_output_forever_ends_in_time(enemy):
    def flood(request):
        while True:
            yield output(request, b"")

    with pytest.raises(SandboxLost, match="does not answer"):
        list(enemy(flood).stream(HANDLE, ["x"], timeout_s=0.1, max_output=1000))


def test_stream_of_tiny_pieces(enemy):
    def pieces(request):
        for i in range(900):
            yield output(request, bytes([i % 256]), "stderr" if i % 300 == 0 else "stdout")
        yield answer(request)

    *chunks, result = enemy(pieces).stream(HANDLE, ["x"], timeout_s=9, max_output=1000)
    assert b"".join(chunk.data for chunk in chunks) == bytes(i % 256 for i in range(900))
    assert all(isinstance(chunk, Chunk) for chunk in chunks) and result.ok


def test_read_gets_no_more_than_asked_for(enemy):
    backend = enemy(lambda request: [answer(request, data=pack(b"x" * 11), size=11)])
    with pytest.raises(SandboxLost, match="11 bytes, 10 were asked for"):
        backend.read(HANDLE, "/x", limit=10)


def test_server_that_takes_nothing(monkeypatch):
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    ours, theirs = socket.socketpair()
    with theirs:
        backend = Backend(ours)
        with pytest.raises(ToolError, match="at most 1048576 are legal"):
            backend.stat(HANDLE, "/" + "x" * MAX_FRAME)  # not even sent
        with pytest.raises(SandboxLost, match="takes no request"):
            backend.write(HANDLE, "/x", os.urandom(1 << 20))


def test_requests_that_wait_all_learn_of_the_end(enemy):
    event = threading.Event()

    def answer_late(request):
        event.wait(5)
        yield b"\xff" * 8

    backend, errors = enemy(answer_late), []

    def ask():
        try:
            backend.exec(HANDLE, ["x"], timeout_s=9)
        except SandboxLost as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join()
    assert len(errors) == 4 and all("nonsense" in error for error in errors)
