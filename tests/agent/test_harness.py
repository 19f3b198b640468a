"""Conversations: budgets, calls, summaries, and who is to blame when one ends early."""

import asyncio
import dataclasses
import itertools
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.agent.agents import AgentError, ScriptedPolicy, TokenAgent, Turn
from c2.agent.chat import SUMMARY_REQUEST, ByteTokenizer, ChatFormat, Message, Request
from c2.agent.compaction import COMPACTION
from c2.agent.harness import GO_ON, HarnessConfig, Saved, answer_all, derived_seed, run
from c2.config import ConfigError
from c2.sandbox.protocol import SandboxLost
from c2.sandbox.tasks import in_process
from c2.sandbox.tasks.minirepo import FAMILIES, LEVELS, generate, policies
from c2.sandbox.tasks.tools import MemoryRepo
from c2.sandbox.tools import calls
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Tool, ToolsConfig, Toolset

BYTES = ByteTokenizer()
TASK = (Message(role="user", text="do it"),)
BUDGETS = HarnessConfig()
LOOK, READ = Call("list_dir"), Call("read_file", {"path": "a.py"})


def repo(files=None, **config):
    return MemoryRepo(files or {"a.py": "x\n"}, lambda files: "pass", ToolsConfig(**config))


def played(script, tools=None, config=BUDGETS, **options):
    """The session, its agent, and the events of a script."""
    tools = tools or repo().tools
    chat, events = ChatFormat(BYTES, tools), []
    agent = TokenAgent(ScriptedPolicy(script, chat), chat)
    session = asyncio.run(run(agent, tools, TASK, config, observe=[events.append], **options))
    assert events[-1]["event"] == "end" and events[-1]["stop"] == session.stop
    return session, agent, events


def forever(*said):
    while True:
        for item in said:  # noqa: UP028 - a tuple can't be sent the answers
            yield item


def once(*said):
    for item in said:  # noqa: UP028
        yield item


def text_of(row) -> str:
    return BYTES.decode(row.tokens.tolist())


def spent(agent) -> int:
    return sum(int(row.loss_mask.sum()) for row in agent.generations)


# Tasks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("syntax", ["json", "plain"])
def test_the_expert_solves_tasks_through_the_harness(syntax):
    for family, level in itertools.product(FAMILIES, LEVELS):
        task = generate(1, family, level)
        shown = [name for name in task.test_ids if name.split("::")[0] in task.files]
        place = MemoryRepo(task.files, in_process.visible_tests(task.files, shown))
        chat = ChatFormat(BYTES, place.tools, syntax=syntax)
        script = policies.expert(task, style="match" if level % 2 else "lines", test_before=True)
        agent = TokenAgent(ScriptedPolicy(script, chat), chat)
        task_message = Message(role="user", text=task.prompt)
        session = asyncio.run(run(agent, place.tools, [task_message], HarnessConfig()))
        tests = task.files | task.hidden_tests
        assert not any(in_process.run_tests(place.files, tests, task.test_ids).values())
        assert (session.stop, session.bad_calls, session.failed) == ("done", 0, False)
        (row,) = agent.generations
        assert session.tokens == row.loss_mask.sum() == sum(vars(session.written).values())
        assert (
            session.answered
            == len(row.tokens)
            - session.tokens
            - len(task.prompt)
            - 3
            - (session.turns)
            + (session.turns - 1 - sum(m.role == "tool" for m in session.messages)) * 0
        )


def test_what_a_script_hears():
    heard = []

    def script():
        heard.append((yield LOOK))
        heard.append((yield [LOOK, READ]))
        yield Message(role="assistant", text="bye", thinking="enough")

    session, agent, events = played(script())
    assert heard == ["a.py", ["a.py", "1|x"]]
    assert session.messages[-1].text == "bye" and session.messages[-1].thinking == "enough"
    assert [event["event"] for event in events] == [
        "message", "turn", "result", "turn", "result", "result", "turn", "end",
    ]  # fmt: skip
    assert text_of(agent.generations[0]).endswith(
        "<|tool|>a.py<|turn_end|><|tool|>1|x<|turn_end|>"
        "<|assistant|><|think|>enough<|assistant|>bye<|turn_end|>"
    )


# Budgets -----------------------------------------------------------------------------------------


def test_turns_are_bounded():
    session, _, _ = played(forever(LOOK), config=HarnessConfig(max_turns=3))
    assert (session.stop, session.turns, session.calls) == ("turns", 3, 3)


@pytest.mark.parametrize("total", [1, 25, 100])
def test_tokens_are_bounded_exactly(total):
    session, agent, _ = played(forever(LOOK), config=HarnessConfig(total_tokens=total))
    # The last turn is cut to what is left, so the last call may be malformed.
    assert session.stop in ("tokens", "cut") and session.tokens == spent(agent) == total


@pytest.mark.parametrize("context", [60, 61, 62, 100, 128])
def test_a_context_is_never_longer_than_its_bound(context):
    config = HarnessConfig(context=context, turn_tokens=20)
    session, agent, _ = played(forever(LOOK, READ), config=config)
    assert session.stop in ("context", "cut")
    assert context - 30 < len(agent.generations[0].tokens) <= context


def test_long_answers_are_cut_to_fit():
    tools = repo({"a.py": "word " * 1000}).tools
    config = HarnessConfig(context=1500, turn_tokens=100)
    session, agent, _ = played(once([READ, LOOK]), tools, config)
    assert session.stop == "done"
    assert "bytes left out" in text_of(agent.generations[0])
    assert len(agent.generations[0].tokens) <= 1500


def test_calls_of_a_turn_are_bounded():
    session, _, events = played(once([LOOK] * 5), config=HarnessConfig(max_calls=3))
    texts = [event["text"] for event in events if event["event"] == "result"]
    assert texts == ["a.py"] * 3 + ["error: more than 3 calls in one turn"] * 2
    assert (session.calls, session.bad_calls) == (5, 2)


def test_time_is_bounded():
    release = threading.Event()
    tools = Toolset.of([Tool(calls.RunTests, lambda _: str(release.wait(20)))], ToolsConfig())
    chat = ChatFormat(BYTES, tools)
    agent = TokenAgent(ScriptedPolicy(forever(Call("run_tests")), chat), chat)

    async def timed():
        session = await run(agent, tools, TASK, HarnessConfig(deadline_s=0.2))
        release.set()
        return session

    session = asyncio.run(timed())
    assert session.stop == "deadline" and not session.failed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_turns": 0}, "max_turns: 0"),
        ({"deadline_s": float("nan")}, "deadline_s: nan"),
        ({"context": 4096}, "context: 4096; legal are > turn_tokens"),
        ({"summary_at": 30000}, "summary_at: 30000; legal are 1 to "),
        ({"summary_at": 0}, "summary_at: 0"),
    ],
)
def test_bad_budgets_are_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        HarnessConfig(**change)


# Calls -------------------------------------------------------------------------------------------


def test_broken_calls_do_not_keep_others_from_running():
    requests = (
        Request(call=LOOK, id="0"), Request(call=None, error="no JSON", id="1"),
        Request(call=Call("nothing"), id="2"), Request(call=Call("read_file", {"x": 1}), id="3"),
        Request(call=READ, id="4"),
    )  # fmt: skip
    results = asyncio.run(answer_all(repo().tools, requests, 9))
    assert [result.ok for result in results] == [True, False, False, False, True]
    assert results[1].text == "error: no JSON" and results[4].text == "1|x"


def test_calls_that_only_read_run_together_and_others_alone_in_order():
    log, meet, alone = [], threading.Barrier(3, timeout=20), threading.Lock()

    def look(_):
        meet.wait()  # nobody goes on before all three are here
        log.append("look")
        return "seen"

    def write(call):
        assert alone.acquire(blocking=False)
        time.sleep(0.02)  # another one would come in now
        log.append(call.text)
        alone.release()
        return "ok"

    tools = Toolset.of(
        [Tool(calls.ListDir, look, reads_only=True), Tool(calls.WriteFile, write)], ToolsConfig()
    )
    writes = [Call("write_file", {"path": "a", "text": text}) for text in "1234"]
    order = [*writes[:2], LOOK, LOOK, LOOK, *writes[2:]]
    results = asyncio.run(answer_all(tools, [Request(call=call) for call in order], 9))
    assert log == ["1", "2", "look", "look", "look", "3", "4"]
    assert [result.text for result in results] == ["ok"] * 2 + ["seen"] * 3 + ["ok"] * 2


@pytest.mark.parametrize(
    ("reason", "failed"),
    [("closed", True), ("lease", True), ("backend", True), ("exited", False), ("deadline", False)],
)
def test_a_lost_sandbox_ends_the_conversation(reason, failed):
    def lose(_):
        raise SandboxLost("gone", reason)

    tools = Toolset.of([Tool(calls.RunTests, lose)], ToolsConfig())
    session, _, _ = played(forever(Call("run_tests")), tools)
    assert (session.stop, session.lost, session.turns) == ("lost", reason, 1)
    assert session.failed == failed


def test_an_agent_that_cannot_speak_is_not_to_blame():
    class Mute:
        generations = ()

        def size(self, messages):
            return 1

        async def turn(self, messages, *, max_tokens, seed) -> Turn:
            raise AgentError("no answer")

    session = asyncio.run(run(Mute(), repo().tools, TASK, HarnessConfig()))
    assert (session.stop, session.lost, session.failed) == ("agent", "no answer", True)


def test_a_timeout_of_the_agents_own_is_no_deadline():
    class Slow:
        generations = ()

        def size(self, messages):
            return 1

        async def turn(self, messages, *, max_tokens, seed) -> Turn:
            raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(run(Slow(), repo().tools, TASK, HarnessConfig()))


def test_every_turn_has_a_seed_of_its_own(fixed_policy):
    def seeds(seed):
        chat = ChatFormat(BYTES, repo().tools)
        call = [BYTES.special("call"), *BYTES.encode("list_dir"), BYTES.special("turn_end")]
        policy = fixed_policy([call, call, [BYTES.special("turn_end")]])
        session = asyncio.run(
            run(TokenAgent(policy, chat), repo().tools, TASK, HarnessConfig(), seed=seed)
        )
        assert session.stop == "done"
        return policy.seeds

    assert seeds(3) == seeds(3) == [derived_seed(3, turn) for turn in range(3)]
    assert len({*seeds(3), *seeds(4)}) == 6


# Summaries ---------------------------------------------------------------------------------------

SUMMARY = HarnessConfig(context=1400, turn_tokens=100, summary_at=500, summary_tokens=100)


def test_a_summary_takes_the_place_of_the_turns():
    script = once(*[[LOOK, READ]] * 24)
    session, agent, events = played(script, config=SUMMARY, state=lambda: "[ ] more")
    assert session.stop == "done" and session.turns == 25 and session.summaries >= 2
    rows = agent.generations
    assert len(rows) == 1 + session.summaries
    begin = "<|end|><|user|>do it<|turn_end|><|assistant|>"
    for row in rows[:-1]:
        assert text_of(row).startswith(begin)
        assert text_of(row).endswith(
            f"<|user|>{SUMMARY_REQUEST}<|turn_end|><|assistant|>I go on as planned.<|turn_end|>"
        )
    for row in rows[1:]:
        assert text_of(row).startswith(
            f"{begin}I go on as planned.<|turn_end|><|user|>{GO_ON}\n\n[ ] more<|turn_end|>"
            "<|assistant|>"
        )
    # The whole story, from the events.
    assert sum(event["event"] == "summary" for event in events) == session.summaries
    assert spent(agent) == session.tokens


def test_there_is_always_room_for_a_summary(fixed_policy):
    end, call = BYTES.special("turn_end"), BYTES.special("call")
    read = [call, *BYTES.encode('read_file {"path": "a.py"}'), end]
    policy = fixed_policy([[*[97] * (100 - len(read)), *read]] * 20)
    place = repo({"a.py": "long " * 1000})
    chat = ChatFormat(BYTES, place.tools)
    config = dataclasses.replace(SUMMARY, max_turns=9)
    session = asyncio.run(run(TokenAgent(policy, chat), place.tools, TASK, config))
    assert session.stop == "turns" and session.summaries >= 3
    asked = [BYTES.decode(prompt).count(SUMMARY_REQUEST) for prompt in policy.prompts]
    assert sum(asked) == session.summaries and set(policy.limits) == {100}


def test_a_summary_too_long_ends_the_conversation():
    chat = ChatFormat(BYTES, repo().tools)
    policy = ScriptedPolicy(forever(READ), chat, summary="long " * 99)
    config = dataclasses.replace(SUMMARY, summary_at=400, summary_tokens=400)
    session = asyncio.run(run(TokenAgent(policy, chat), repo().tools, TASK, config))
    assert session.stop == "context" and session.summaries == 1


def test_compaction_by_prompt_differs_in_what_is_read_for_a_summary_alone():
    begin = (Message(role="system", text="be brief"), *TASK)
    told = {}
    for by in ("request", "prompt"):
        tools, context = repo().tools, 1400 + len(COMPACTION)
        chat = ChatFormat(BYTES, tools)
        policy = ScriptedPolicy(once(*[[LOOK, READ]] * 24), chat)
        agent = TokenAgent(policy, chat)
        config = dataclasses.replace(SUMMARY, context=context, summary_by=by)
        told[by] = asyncio.run(run(agent, tools, begin, config)), agent.generations
    (own, rows), (prompted, read) = told.values()
    assert own == prompted and own.summaries >= 2  # triggered at the same turns, too
    assert len(rows) == 1 + own.summaries and len(read) == 1 + 2 * own.summaries
    for row, after in zip(read[1::2], read[2::2], strict=True):  # summaries, what came of them
        text = text_of(row)
        assert text.startswith(f"<|end|><|system|>{COMPACTION}<|turn_end|><|user|>do it")
        assert text.count("<|system|>") == 1 and "<|call|>list_dir" in text
        assert BYTES.decode(row.tokens[row.loss_mask].tolist()) == "I go on as planned.<|turn_end|>"
        assert text_of(after).startswith("<|end|><|system|>be brief<|turn_end|>")
    for links in (rows, read):  # one credit for every token that was sampled
        assert sum(int(link.loss_mask.sum()) for link in links) == own.tokens


def test_room_is_kept_for_the_instructions_of_a_compaction():
    with pytest.raises(ConfigError, match="summary_at: 500; legal are 1 to -"):
        dataclasses.replace(SUMMARY, summary_by="prompt")


# Turns of the toy policy: words, thoughts, and calls that are answered or refused.
PIECE = st.sampled_from(["a", "bb", "<think>", "<call>list_dir", "<call>read_file {", "é"])
STORY = st.lists(st.lists(PIECE, max_size=4), min_size=1, max_size=12)


def turns_of(story):
    end = BYTES.special("turn_end")
    marks = {"": 0, "<think>": BYTES.special("think"), "<call>": BYTES.special("call")}
    turns = []
    for pieces in story:
        ids = []
        for piece in pieces:
            mark = max(filter(piece.startswith, marks), key=len)
            ids += [marks[mark]] * bool(mark) + list(BYTES.encode(piece.removeprefix(mark)))
        turns.append([*ids, BYTES.special("call"), *BYTES.encode("list_dir"), end])
    return [*turns, *[[end]] * 40]


@settings(max_examples=100, deadline=None)
@given(STORY, st.integers(60, 900), st.booleans(), st.booleans())
def test_a_chain_has_every_sampled_token_once(
    fixed_policy, story, summary_at, drop_thinking, by_prompt
):
    policy = fixed_policy(turns_of(story))
    chat = ChatFormat(BYTES, repo().tools, drop_thinking=drop_thinking)
    agent = TokenAgent(policy, chat)
    config = HarnessConfig(
        context=1600 + len(COMPACTION) * by_prompt, turn_tokens=60, summary_at=summary_at,
        summary_tokens=90, summary_by="prompt" if by_prompt else "request",
    )  # fmt: skip
    session = asyncio.run(run(agent, repo().tools, TASK, config))
    sampled = [done.tokens for done in policy.completions]
    rows = agent.generations
    trained = np.concatenate([row.tokens[row.loss_mask] for row in rows])
    assert trained.tolist() == np.concatenate(sampled).tolist()
    assert len(trained) == session.tokens == sum(vars(session.written).values())
    assert len(policy.prompts) == session.turns + session.summaries
    breaks = sum(
        after[: len(before) + len(done)] != [*before, *done]
        for before, done, after in zip(policy.prompts, sampled, policy.prompts[1:], strict=False)
    )
    assert len(rows) == 1 + breaks
    assert all(len(row.tokens) <= config.context for row in rows)


@settings(max_examples=50, deadline=None)
@given(STORY, st.integers(60, 900), st.data())
def test_a_conversation_goes_on_from_wherever_it_was_saved(fixed_policy, story, summary_at, data):
    """What was saved goes through JSON; tokens that were sampled before are not sampled again."""
    tools, turns, points = repo().tools, turns_of(story), []
    chat = ChatFormat(BYTES, tools)
    config = HarnessConfig(context=1600, turn_tokens=60, summary_at=summary_at, summary_tokens=90)

    def play(policy, agent, events, saved=None):
        async def save(saved):
            written = json.dumps(dataclasses.asdict(saved))
            points.append((written, agent.generations, len(policy.prompts), len(events)))

        observe = [events.append]
        return asyncio.run(run(agent, tools, TASK, config, observe=observe, save=save, saved=saved))

    whole, heard = fixed_policy(turns), []
    agent = TokenAgent(whole, chat)
    session = play(whole, agent, heard)
    if not points:
        return  # it ended before anything could be saved
    written, generations, done, told = data.draw(st.sampled_from(points))
    rest, events = fixed_policy(turns), heard[:told]
    rest.prompts += whole.prompts[:done]
    late = TokenAgent(rest, chat, generations)
    assert play(rest, late, events, Saved.from_dict(json.loads(written))) == session
    assert events == heard and rest.prompts == whole.prompts
    for one, two in zip(agent.generations, late.generations, strict=True):
        for name, values in vars(one).items():
            np.testing.assert_array_equal(getattr(two, name), values, strict=True)
