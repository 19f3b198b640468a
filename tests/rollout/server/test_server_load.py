"""Many clients of a real engine at the same time, some of which leave: nothing stays behind."""

import asyncio
import contextlib
import json
import os
import random
import threading
from dataclasses import dataclass, replace

import jax
import numpy as np
import openai
import pytest

from c2.agent.chat import ByteTokenizer
from c2.rollout.config import EngineConfig, Request
from c2.rollout.engine import Engine

TOKENIZER = ByteTokenizer()
END = (TOKENIZER.special("end"),)
CONFIG = EngineConfig(
    slots=6, capacity=96, prefill_rows=3, prefill_chunk=16, steps=4, training=False
)
WORDS = "A prompt is some of these words, and a number or none. "


@pytest.fixture(scope="module")
def engine(tiny_config, random_params):
    """Of bytes and marks; its programs run a few times only, so compiling them may be quick."""
    cfg = replace(tiny_config, vocab=264)
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        engine = Engine(random_params(cfg), cfg, CONFIG)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    with engine:
        yield engine


@dataclass
class Case:
    """A request, how it is sent, and after how many seconds its client leaves, if it does."""

    body: dict
    choices: int
    official: bool
    leaves: float | None

    @property
    def talks(self):
        return "messages" in self.body


def drawn(rng: random.Random) -> Case:
    body = {
        "model": "tiny",
        "max_tokens": rng.randint(1, 24),
        "seed": rng.randrange(2**32),
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.3]),
        "n": rng.choice([1, 1, 2, 3]),
        "stop": rng.choice([[], [], ["e"], ["a b", "\x01"]]),
        "stream": rng.random() < 0.5,
        "stop_token_ids": rng.choice([[], [7, 8]]),
        "return_token_ids": True,
    }
    if rng.random() < 0.3:
        body |= {"top_p": 0.9, "top_k": 40}
    text = WORDS[: rng.randrange(1, 50)] + str(rng.randrange(9))
    ids = [rng.randrange(264) for _ in range(rng.randint(1, 40))]
    prompts = rng.choice([[text], [ids], [text, ids]])
    if rng.random() < 0.4:
        prompts = [text]
        body |= {"messages": [{"role": "user", "content": text}], "logprobs": True}
    else:
        body |= {"prompt": prompts if len(prompts) > 1 else prompts[0], "logprobs": 0}
    choices, leaves = body["n"] * len(prompts), rng.choice([None, rng.random() * 0.2])
    return Case(body=body, choices=choices, official=rng.random() < 0.5, leaves=leaves)


async def by_client(client, case):
    """The answer, or the chunks, by the official client."""
    body = dict(case.body)
    extra = {k: body.pop(k) for k in ("top_k", "stop_token_ids", "return_token_ids") if k in body}
    completions = client.chat.completions if case.talks else client.completions
    answer = await completions.create(**body, extra_body=extra)
    if not body["stream"]:
        return [answer.model_dump()]
    async with answer:
        return [chunk.model_dump() async for chunk in answer]


async def by_socket(server, case):
    """The same without a library; whoever is cancelled closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with contextlib.closing(writer):
        data = json.dumps(case.body).encode()
        path = "/v1/chat/completions" if case.talks else "/v1/completions"
        head = f"POST {path} HTTP/1.0\r\nContent-Length: {len(data)}\r\n\r\n"
        half = len(data) // 2  # some leave within the body
        writer.write(head.encode() + data[:half])
        await writer.drain()
        writer.write(data[half:])
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], body
    if not case.body["stream"]:
        return [json.loads(body)]
    *events, done, rest = body.split(b"\n\n")
    assert done == b"data: [DONE]" and not rest
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


async def play(server, cases, at_once):
    """What each client gets; None if it has left."""
    places = asyncio.Semaphore(at_once)

    async def one(case):
        send = by_client(client, case) if case.official else by_socket(server, case)
        async with places:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(send, case.leaves)

    async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
        return await asyncio.gather(*map(one, cases))


def collected(answers):
    """Text, ids, log-probabilities, versions, finish and prompt of each choice."""
    choices = {}
    for answer in answers:
        for part in answer["choices"]:
            new = {"text": "", "ids": [], "log_probs": [], "versions": [], "finish": None}
            choice = choices.setdefault(part["index"], new)
            said = part.get("message") or part.get("delta") or {"content": part.get("text")}
            calls = [call["function"]["name"] for call in said.get("tool_calls") or ()]
            thoughts = said.get("reasoning_content") or ""
            choice["text"] += (said.get("content") or "") + thoughts + "".join(calls)
            choice["ids"] += part.get("token_ids") or []
            choice["versions"] += part.get("policy_versions") or []
            if log_probs := part.get("logprobs"):
                choice["log_probs"] += log_probs.get("token_logprobs") or [
                    token["logprob"] for token in log_probs.get("content") or ()
                ]
            choice["finish"] = part["finish_reason"] or choice["finish"]
            prompt = part.get("prompt_token_ids") or answer.get("prompt_token_ids")
            choice["prompt"] = prompt or choice.get("prompt")
    return [choices[index] for index in sorted(choices)]


async def check(engine, chat, case, choices):
    """Choices are the engine's completions, up to the first stop string in a text."""
    body, marks = case.body, chat.marks if case.talks else {}
    assert len(choices) == case.choices
    requests = [
        Request(
            prompt=choice["prompt"],
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            top_k=body.get("top_k"),
            stop=(*(chat.stop if case.talks else END), *body["stop_token_ids"]),
            seed=body["seed"],
            id=index,
        )
        for index, choice in enumerate(choices)
    ]
    completions = await asyncio.gather(*map(engine.complete, requests))
    for choice, completion in zip(choices, completions, strict=True):
        tokens = completion.tokens.tolist()
        said = tokens[:-1] if completion.finish == "stop" else tokens
        cut = first_stop(said, body["stop"], marks)
        assert choice["ids"] == tokens[:cut]
        np.testing.assert_allclose(  # other sequences in the batch can change the rounding
            choice["log_probs"], completion.log_probs[:cut], rtol=0, atol=1e-5
        )
        assert choice["versions"] == completion.versions.tolist()[:cut]
        finish = completion.finish if cut is None else "stop"
        assert choice["finish"].replace("tool_calls", "stop") == finish
        if not case.talks:
            text = TOKENIZER.decode(said[:cut])
            at = [text.find(stop) for stop in body["stop"] if stop in text]
            assert choice["text"] == text[: min(at, default=len(text))]


def first_stop(ids, stops, marks):
    """How many tokens there are up to a stop string in a section that is no call, or None."""
    section, kind = [], "text"
    for place, token in enumerate(ids):
        section = [] if token in marks else [*section, token]
        kind = marks.get(token, kind)
        text = TOKENIZER.decode(section).removesuffix("\ufffd")
        if kind != "call" and any(stop in text for stop in stops):
            return place + 1
    return None


def files():
    """What is open: names, as a new socket may have the number of an old one."""
    names = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.add(os.readlink(f"/proc/self/fd/{number}"))
    return names


def run(engine, serve, chat, eventually, requests, at_once, seed):
    rng = random.Random(seed)
    cases = [drawn(rng) for _ in range(requests)]
    threads, opened = set(threading.enumerate()), files()
    with serve(engine, max_waiting=1000) as server:
        answers = asyncio.run(play(server, cases, at_once))
        eventually(lambda: server.tasks == 0 and not server.uvicorn.server_state.connections)
        assert server.open == 0
    eventually(lambda: not engine._open)
    metrics = engine.metrics()
    assert metrics["running"] == metrics["waiting"] == 0
    assert set(threading.enumerate()) == threads and not files() - opened
    answered = [pair for pair in zip(cases, answers, strict=True) if pair[1] is not None]
    assert requests / 4 < len(answered) < requests
    for case, answer in answered:
        asyncio.run(check(engine, chat, case, collected(answer)))
    assert engine.metrics()["compilations"] == metrics["compilations"]


def test_clients_that_come_and_go(engine, serve, chat, eventually):
    run(engine, serve, chat, eventually, 120, 24, seed=0)


@pytest.mark.slow
def test_a_thousand_clients_that_come_and_go(engine, serve, chat, eventually):
    run(engine, serve, chat, eventually, 1000, 60, seed=1)
