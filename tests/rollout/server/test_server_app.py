"""What the server answers, by the official client, to an engine that says what a test wants."""

import asyncio
import base64
import json
import re
import threading

import numpy as np
import pytest

from c2.agent.chat import ByteTokenizer, Message
from c2.agent.endpoint import EndpointAgent
from c2.rollout.config import Request
from c2.sandbox.tools.calls import ReadFile
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Tool, ToolsConfig, Toolset

TOKENIZER = ByteTokenizer()
END = TOKENIZER.special("end")
ASK = [{"role": "user", "content": "x"}]
LOOK = Tool(ReadFile, lambda call: "nothing")
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


def tokens(*pieces):
    """Bytes of texts, and marks such as "@call"."""
    return [
        token
        for piece in pieces
        for token in (
            [TOKENIZER.special(piece[1:])] if piece[0] == "@" else TOKENIZER.encode(piece)
        )
    ]


@pytest.fixture
def say(engine):
    """Sets what the engine says."""

    def script(*pieces):
        engine.script = tokens(*pieces)

    yield script
    engine.script = ()


def unpacked(packed):
    data = base64.b64decode(packed["base64"])
    return np.frombuffer(data, packed["dtype"]).reshape(packed["shape"])


def test_a_completion_ends_at_a_stop_token_that_is_no_text(client, say):
    say("Hello", "@end")
    answer = client.completions.create(model="tiny", prompt="Say it", max_tokens=50)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == ("Hello", "stop", 0)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 6, 12)
    assert answer.object == "text_completion" and answer.model == "tiny"


def test_prompts_in_every_form(client, say):
    say("ok")
    for prompt, count in [("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, n=2)
        assert [c.text for c in answer.choices] == ["ok"] * 2 * count
        assert [c.index for c in answer.choices] == list(range(2 * count))


def test_budgets_when_none_is_given(client, say):
    say("abc" * 200)
    assert len(client.completions.create(model="tiny", prompt="x").choices[0].text) == 16
    answer = client.chat.completions.create(model="tiny", messages=ASK)
    assert answer.usage.total_tokens == 600 and answer.choices[0].finish_reason == "length"
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, max_tokens=9, max_completion_tokens=4
    )
    assert answer.choices[0].message.content == "abca"


def test_what_a_trainer_asks_for(engine, client):
    """Ids, versions, log-probabilities and routes are those of the engine."""
    wanted = Request(prompt=[5, 6, 7], max_tokens=9, seed=3, id=1, stop=(END,))
    expected = asyncio.run(engine.complete(wanted))
    extra = {"return_token_ids": True, "return_routes": True}
    ask = {"prompt": [5, 6, 7], "max_tokens": 9, "seed": 3, "n": 2, "logprobs": 0}
    answer = client.completions.create(model="tiny", **ask, extra_body=extra)
    choice = answer.choices[1]
    assert choice.token_ids == expected.tokens.tolist()
    assert choice.policy_versions == expected.versions.tolist()
    assert choice.prompt_token_ids == [5, 6, 7]
    assert choice.logprobs.token_logprobs == expected.log_probs.tolist()
    routes = unpacked(choice.routes)
    assert routes.dtype == np.int16
    np.testing.assert_array_equal(routes, expected.routes)

    chunks = list(client.completions.create(model="tiny", **ask, extra_body=extra, stream=True))
    mine = [c for chunk in chunks for c in chunk.choices if c.index == 1]
    assert [i for c in mine for i in c.token_ids] == choice.token_ids
    assert [v for c in mine for v in c.policy_versions] == choice.policy_versions
    assert "".join(c.text for c in mine) == choice.text
    assert [hasattr(c, "prompt_token_ids") for c in mine] == [True] + [False] * (len(mine) - 1)
    assert [hasattr(c, "routes") for c in mine] == [False] * (len(mine) - 1) + [True]
    np.testing.assert_array_equal(unpacked(mine[-1].routes), expected.routes)
    offsets = [o for c in mine if c.logprobs for o in c.logprobs.text_offset]
    assert offsets == choice.logprobs.text_offset and len(offsets) == 9


def test_log_probs_of_a_completion(client, say):
    say("né", "@end")
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=9, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["n", "\ufffd", "\ufffd", "<|end|>"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-110.0, -195.0, -169.0, -256.0]  # of the fake device


def test_a_chat_with_thoughts_and_calls(client, say):
    say("Hm. ", "@think", "deep\n", "@call", 'look {"at": "é"}', "@call", "go {oops", "@turn_end")
    text, called = {"type": "text"}, {"name": "look", "arguments": '{"at":1}'}
    messages = [
        {"role": "developer", "content": [text | {"text": "Be "}, text | {"text": "brief."}]},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": called}]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
    ]  # fmt: skip
    answer = client.chat.completions.create(
        model="tiny", messages=messages, tools=[TOOL], logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = answer.choices[0]
    message = choice.message
    assert (message.content, message.reasoning_content) == ("Hm.", "deep")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [("look", '{"at": "é"}'), ("go", "{oops")]
    assert len({call.id for call in message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"
    schema = json.dumps(TOOL["function"])
    system = f"Be brief.\n\nTools, called as NAME {{ARGUMENTS}}:\n{schema}"
    assert answer.prompt_token_ids == tokens(
        "@end", "@system", system, "@turn_end", "@user", "x", "@turn_end",
        "@assistant", "@call", 'look {"at": 1}', "@turn_end",
        "@tool", "nothing", "@turn_end", "@assistant",
    )  # fmt: skip
    assert [token.logprob for token in choice.logprobs.content] == [-i for i in choice.token_ids]
    assert choice.logprobs.content[0].bytes == [72]


def test_a_streamed_chat_is_the_whole_one(client, say):
    say(" Hm.", "@think", "deep ", "@call", 'look {"at": "é"}', "@assistant", " so\n", "@turn_end")
    ask = {"model": "tiny", "messages": ASK, "n": 2, "seed": 1}
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    for mine, other in zip(final.choices, whole.choices, strict=True):
        assert mine.message.content == other.message.content == "Hm.\nso"
        assert mine.finish_reason == other.finish_reason == "tool_calls"
        (call,), (same,) = mine.message.tool_calls, other.message.tool_calls
        assert call.function.arguments == same.function.arguments == '{"at": "é"}'
    thoughts = [
        getattr(choice.delta, "reasoning_content", "")
        for event in events if event.type == "chunk"
        for choice in event.chunk.choices if choice.index == 1
    ]  # fmt: skip
    assert "".join(thoughts) == whole.choices[1].message.reasoning_content == "deep"
    assert final.usage == whole.usage


def test_the_harness_calls_tools_through_it(server, chat, say):
    """`c2.agent.endpoint` against the server: a call, its answer, and the end of the work."""
    agent = EndpointAgent(server.url, "tiny", Toolset.of([LOOK], ToolsConfig()))
    messages = [Message(role="system", text="Be brief."), Message(role="user", text="Look.")]
    say("@think", "well", "@call", 'read_file {"path": "é.py"}', "@turn_end")
    first = asyncio.run(agent.turn(messages, max_tokens=60, seed=1))
    (request,) = first.message.requests
    assert request.call == Call("read_file", {"path": "é.py"}) and not first.cut
    assert first.message.thinking == "well" and first.tokens == 34
    messages += [first.message, Message(role="tool", text="nothing", answers=request.id)]
    say("Done.", "@turn_end")
    last = asyncio.run(agent.turn(messages, max_tokens=20, seed=2))
    assert last.message.text == "Done." and not last.message.requests
    said = tokens("@assistant", "@call", 'read_file {"path": "é.py"}', "@turn_end", "@tool")
    assert last.prompt_tokens == first.prompt_tokens - 1 + len(said) + len("nothing") + 2


def test_stop_strings(engine, client, say):
    say("one <stop> two <st", "@end")
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 40}
    extra = {"return_token_ids": True}
    answer = client.completions.create(**ask, stop="<stop>", extra_body=extra)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("one ", "stop")
    assert choice.token_ids == tokens("one <stop>") and answer.usage.completion_tokens == 10
    chunks = client.completions.create(**ask, stop=["wo", "<stop>"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one "
    chunks = list(client.completions.create(**ask, stop=["<stops", "never"], stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "one <stop> two <st"
    answer = client.completions.create(**ask, extra_body={"stop_token_ids": [ord("t")]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one <s", "stop")
    answer = client.completions.create(**ask, extra_body={"ignore_eos": True})
    assert answer.choices[0].text.startswith("one <stop> two <st<|end|>")
    answer = client.chat.completions.create(model="tiny", messages=ASK, stop=" two")
    assert answer.choices[0].message.content == "one <stop>"
    engine.await_idle()


def test_models_health_and_metrics(client, server, engine):
    assert [m.id for m in client.models.list()] == ["tiny"]
    model = client.models.retrieve("tiny")
    assert model.max_model_len == 600 and model.policy_version == 0
    assert server.ask("GET", "/health")[0] == 200
    client.completions.create(model="tiny", prompt="x", max_tokens=3)
    status, headers, body = server.ask("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    found = dict(re.findall(r"^c2_rollout_(\w+) (\S+)$", body.decode(), re.MULTILINE))
    assert float(found["tokens_total"]) == engine.metrics()["tokens"] >= 3
    assert {"open", "waiting", "running", "version"} <= set(found)
    assert "# TYPE c2_rollout_ended_total counter" in body.decode()


def test_long_texts_are_tokenised_beside_the_event_loop(build_engine, serve):
    threads = {}

    class Watched(ByteTokenizer):
        def encode(self, text):
            threads[len(text)] = threading.current_thread().name
            return super().encode(text[:9])

    with build_engine() as engine, serve(engine, Watched()) as server:
        for size in (10, 19_000):
            body = {"model": "tiny", "prompt": "x" * size}
            assert server.ask("POST", "/v1/completions", body)[0] == 200
    assert threads[10] == "server" and threads[19_000] != "server"
