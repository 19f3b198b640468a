"""What the server refuses, and how; a refusal is never a fault of the server."""

import asyncio
import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.rollout.server.config import ServerConfig

ROOT = {"model": "tiny", "prompt": "x"}
ROOT_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
BAD = [
    (b"", "body: no JSON"),
    (b"{", "body: no JSON"),
    (b"[1]", "body: it is no JSON object"),
    (b'{"model": "tiny", "prompt": "\\ud800"}', "body: no JSON"),
    (b"[" * 5000, "body: no JSON"),
    (b'\xff\xfe{"model"', "body: no JSON"),
    ({"prompt": "x"}, "model: Field required; legal: the name of the model"),
    ({"model": "tiny"}, "prompt: Field required; legal: a text, a list of token ids"),
    (ROOT | {"tok_k": 1}, "tok_k: unknown; did you mean 'top_k'? legal: model, n, "),
    (ROOT | {"prompt": []}, "prompt: it is none of these; legal: a text"),
    (ROOT | {"prompt": [1, "a"]}, "prompt: it is none of these; legal: a text"),
    (ROOT | {"prompt": [True]}, "prompt: it is none of these; legal: a text"),
    (ROOT | {"prompt": ""}, "prompt: it is empty; legal: at least one token"),
    (ROOT | {"prompt": [264]}, "prompt: token 264; legal: 0 to 263"),
    (ROOT | {"prompt": "x" * 700}, "prompt and max_tokens: 700 + 1 tokens; legal: up to the eng"),
    (ROOT | {"max_tokens": 0}, "max_tokens: 0; legal: at least 1"),
    (ROOT | {"max_tokens": 10**30}, "prompt and max_tokens: 1 + 1000"),
    (ROOT | {"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
    (ROOT | {"temperature": -1}, "temperature: it is out of range; legal: 0, or a number from"),
    (ROOT | {"temperature": 1e-9}, "temperature: it is out of range; legal: 0, or a number from"),
    (ROOT | {"temperature": "hot"}, "temperature: Input should be a valid number"),
    (ROOT | {"top_p": 1e-300}, "top_p: Input should be greater than or equal to 0.000001; legal: "),
    (ROOT | {"top_k": -2}, "top_k: -2; legal: 1 to 2147483647, or none"),
    (ROOT | {"seed": -1}, "seed: -1; legal: 0 to 4294967295"),
    (ROOT | {"n": 0}, "n: Input should be greater than or equal to 1; legal: 1 to 128"),
    (ROOT | {"n": 7}, "n: 7 sequences in a request; legal: up to 6"),
    (ROOT | {"stop": [""]}, "stop: it is none of these; legal: a text, or a list of up to 16"),
    (ROOT | {"stop": [1]}, "stop: it is none of these; legal: a text, or a list of up to 16"),
    (ROOT | {"stop": ["a"] * 17}, "stop: there are 17; legal: a text, or a list of up to 16"),
    (ROOT | {"stop_token_ids": list(range(9))}, "stop: 10 tokens; legal: up to 8"),
    (ROOT | {"stop": "a", "return_routes": True}, "return_routes: legal only without stop"),
    (ROOT | {"logprobs": 5}, "logprobs: Input should be less than or equal to 0; legal: 0, for"),
    (ROOT | {"frequency_penalty": 0.5}, "frequency_penalty: Input should be less than"),
    (ROOT | {"echo": True}, "echo: Input should be False; legal: false"),
    (ROOT_CHAT | {"messages": []}, "messages: List should have at least 1 item"),
    (ROOT_CHAT | {"messages": [{"role": "user"}]}, "messages.0: a message of role user has a con"),
    (ROOT_CHAT | {"messages": [{"role": "x", "content": ""}]}, "messages.0.role: Input should be"),
    (ROOT_CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages.0.content: only parts of type text can be read"),
    (ROOT_CHAT | {"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
    (ROOT_CHAT | {"tool_choice": "required"}, "tool_choice: Input should be 'auto' or 'none'"),
    (ROOT_CHAT | {"top_logprobs": 2}, "top_logprobs: Input should be less than"),
    (ROOT_CHAT | {"response_format": {"type": "json_object"}}, "response_format.type: Input"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "reason"), BAD)
def test_bad_requests_are_400_with_the_reason(server, body, reason):
    chat = isinstance(body, dict) and "messages" in body
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, _, answer = server.ask("POST", path, body)
    error = json.loads(answer)["error"]
    assert status == 400 and error["message"].startswith(reason)
    assert error["type"] == "invalid_request_error"
    field = reason.partition(":")[0]
    assert error["param"] == (field if " " not in field else None)


def test_models_paths_and_sizes(server, client):
    with pytest.raises(openai.NotFoundError, match="model: 'gpt'; legal: 'tiny'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.NotFoundError, match="model: 'gpt/4'"):
        client.models.retrieve("gpt/4")
    with pytest.raises(openai.BadRequestError, match="max_tokens: 0"):
        client.completions.create(model="tiny", prompt="x", max_tokens=0, stream=True)
    for method, path, size, expected, reason in [
        ("POST", "/v1/completions", 20_001, 413, "the body has 20001 bytes; legal: up to 20000"),
        ("POST", "/v1/completions", 2_000_000, 413, "the body has 2000000 bytes"),
        ("POST", "/v1/nothing", 0, 404, "Not Found"),
        ("GET", "/v1/completions", 0, 405, "Method Not Allowed"),
    ]:
        status, _, body = server.ask(method, path, b" " * size)
        assert status == expected and json.loads(body)["error"]["message"].startswith(reason)


def test_a_body_that_does_not_come(server, monkeypatch):
    monkeypatch.setattr("c2.rollout.server.app._BODY_S", 0.01)

    async def half():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        line = await reader.readline()
        writer.close()
        await writer.wait_closed()
        return line

    assert b" 408 " in asyncio.run(asyncio.wait_for(half(), 30))


def test_without_a_chat_format(engine, serve):
    with serve(engine, chat=None) as server:
        status, _, body = server.ask("POST", "/v1/chat/completions", ROOT_CHAT)
        assert status == 404 and b"no chat format" in body
        assert server.ask("POST", "/v1/completions", ROOT)[0] == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
FIELDS = {
    "n": st.integers(1, 2), "max_tokens": st.integers(1, 9), "temperature": st.floats(0.001, 9),
    "top_p": st.floats(0.01, 1), "top_k": st.integers(1, 2**40), "seed": st.integers(0, 2**32 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2), "stream": st.booleans(),
    "logprobs": st.just(0), "return_token_ids": st.booleans(), "stop_token_ids": st.just([1]),
    "stream_options": st.just({"include_usage": True}),
}  # fmt: skip


@settings(max_examples=80)
@given(
    st.fixed_dictionaries({"model": st.just("tiny"), "prompt": st.just("x")}, optional=FIELDS),
    st.dictionaries(
        st.sampled_from([*FIELDS, "model", "prompt", "messages", "tools"]), JSON, max_size=2
    ),
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)
def test_whatever_comes_is_answered_or_refused_with_a_reason(server, good, bad, path):
    body = good | bad
    if path != "/v1/completions":
        del body["prompt"]
        body = ROOT_CHAT | body
    status, _, answer = server.ask("POST", path, body)
    assert status in (200, 400, 404)
    if status != 200:
        assert json.loads(answer)["error"]["message"]
    elif not bad and path == "/v1/completions":
        assert b"choices" in answer


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"model": ""}, "model"), ({"max_waiting": -1}, "max_waiting"), ({"max_body": 0}, "max_body")],
)
def test_configs(fields, message):
    with pytest.raises(ConfigError, match=f"^{message}: .*; legal: "):
        ServerConfig(**fields)
