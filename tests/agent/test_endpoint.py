"""Conversations with an OpenAI-compatible endpoint: a server of the standard library."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from c2.agent.agents import AgentError
from c2.agent.chat import Message
from c2.agent.endpoint import RETRIES, EndpointAgent
from c2.agent.harness import HarnessConfig, run
from c2.config import ConfigError
from c2.sandbox.tasks.tools import MemoryRepo

TOOLS = MemoryRepo({"a.py": "x\n"}, lambda files: "pass").tools
TASK = (Message(role="system", text="S"), Message(role="user", text="U"))


@pytest.fixture
def endpoint():
    """A server that gives the answers that a test puts into `answers`, and keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append((self.path, self.headers.get("Authorization"), body))
            status, answer = server.answers.pop(0)
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answers, server.requests = [], []
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def said(content=None, *requests, finish="stop", usage=(7, 3), **more):
    listed = [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(requests)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": listed or None, **more}
    given, written = usage
    return 200, {
        "choices": [{"message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": given, "completion_tokens": written},
    }


def test_a_conversation(endpoint):
    endpoint.answers = [
        said("I look.", ("read_file", '{"path": "a.py"}'), ("read_file", "{"), ("nothing", "{}"),
             usage=(20, 9), reasoning_content="Hm."),
        said("Done.", usage=(50, 4)),
    ]  # fmt: skip
    agent = EndpointAgent(endpoint.url + "/", "m", TOOLS, key="secret")
    events = []
    session = asyncio.run(run(agent, TOOLS, TASK, HarnessConfig(), observe=[events.append]))
    assert (session.stop, session.turns, session.calls, session.bad_calls) == ("done", 2, 3, 2)
    assert session.tokens == 13 and agent.generations == ()
    (path, key, first), (_, _, second) = endpoint.requests
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert first["messages"] == [
        {"role": "system", "content": "S"}, {"role": "user", "content": "U"},
    ]  # fmt: skip
    assert first["model"] == "m" and first["max_tokens"] == 4096
    assert [tool["function"] for tool in first["tools"]] == TOOLS.prompts()
    assistant, *answers = second["messages"][2:]
    assert assistant["content"] == "I look." and "Hm." not in json.dumps(second)
    assert [json.loads(c["function"]["arguments"]) for c in assistant["tool_calls"]] == [
        {"path": "a.py"}, {}, {},
    ]  # fmt: skip
    assert [answer["tool_call_id"] for answer in answers] == ["id0", "id1", "id2"]
    assert answers[0]["content"] == "1|x"
    assert answers[1]["content"].startswith("error: read_file: arguments: not JSON")
    assert answers[2]["content"].startswith("error: no tool 'nothing'")
    assert "secret" not in json.dumps(events)


def test_sizes_are_those_that_the_endpoint_counts(endpoint):
    endpoint.answers = [said("x", usage=(100, 5))]
    agent = EndpointAgent(endpoint.url, "m", TOOLS)
    turn = asyncio.run(agent.turn(TASK, max_tokens=9, seed=1))
    assert (turn.prompt_tokens, turn.tokens, turn.cut) == (100, 5, False)
    assert agent.size([*TASK, turn.message]) == 105
    more = Message(role="user", text="y" * 300)
    assert 205 <= agent.size([*TASK, turn.message, more]) <= 230
    assert 100 <= agent.size([more]) <= 130  # a context of which it knows nothing


def test_a_bad_moment_of_the_server_is_waited_for(endpoint):
    endpoint.answers = [(500, "oops"), (429, "slow"), (200, "no json"), said("ok", finish="length")]
    agent = EndpointAgent(endpoint.url, "m", TOOLS, wait_s=0.001)
    turn = asyncio.run(agent.turn(TASK, max_tokens=9, seed=1))
    assert turn.message.text == "ok" and turn.cut and len(endpoint.requests) == 4 <= RETRIES


@pytest.mark.parametrize(
    ("answer", "asked", "words"),
    [
        ((401, "wrong key\nof yours"), 1, "401 wrong key of yours"),
        ((503, ""), RETRIES, "503"),
        ((200, {"choices": []}), 1, "no chat completion"),
        ((200, {"choices": [{"message": {"tool_calls": [{}]}}]}), 1, "no chat completion"),
        ((200, [1]), 1, "no chat completion"),
    ],
)
def test_what_is_no_answer_is_not_the_agents_fault(endpoint, answer, asked, words):
    endpoint.answers = [answer] * RETRIES
    agent = EndpointAgent(endpoint.url, "m", TOOLS, wait_s=0.001)
    session = asyncio.run(run(agent, TOOLS, TASK, HarnessConfig()))
    assert session.stop == "agent" and session.failed and len(endpoint.requests) == asked
    assert words in session.lost and "\n" not in session.lost


def test_nobody_there():
    agent = EndpointAgent("http://127.0.0.1:1/v1", "m", TOOLS, wait_s=0.001)
    with pytest.raises(AgentError, match="ConnectError"):
        asyncio.run(agent.turn(TASK, max_tokens=9, seed=1))
    with pytest.raises(ConfigError, match="endpoint: 'ftp://x'; legal are http"):
        EndpointAgent("ftp://x", "m", TOOLS)
