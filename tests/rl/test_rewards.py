"""Rewards of conversations through the harness and by hand."""

import asyncio
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from c2.agent.agents import ScriptedPolicy, TokenAgent
from c2.agent.chat import ByteTokenizer, ChatFormat, Counts, Message, Request
from c2.agent.harness import HarnessConfig, Session, run
from c2.config import ConfigError, from_dict
from c2.losses.length_penalty import length_penalty
from c2.records import Effort
from c2.rl import rewards
from c2.rl.rewards import LengthPenaltyConfig, RewardConfig
from c2.sandbox.tasks.grade import Outcome
from c2.sandbox.tools.calls import ListDir
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Tool, Toolset

TOOLS = Toolset({"list_dir": Tool(ListDir, lambda _: "a.py b.py", reads_only=True)})
LOOK = Request(call=Call("list_dir", {}), raw=" {}")
ONE_EACH = Effort(
    thinking_tokens=1, call_tokens=10, answer_tokens=100, final_tokens=1e3, calls=1e4, turns=1e5
)


def turn(text="", thinking="", *requests):
    return Message(role="assistant", text=text, thinking=thinking, requests=requests)


def played(*turns, **budgets):
    chat = ChatFormat(ByteTokenizer(), TOOLS)
    agent = TokenAgent(ScriptedPolicy((one for one in turns), chat), chat)
    task = [Message(role="user", text="do it")]
    return asyncio.run(run(agent, TOOLS, task, HarnessConfig(**budgets))), agent.generations


def graded(kind="scored", reward=1.0):
    return Outcome(kind=kind, reward=reward, failed={}, changed=(), ignored=())


def test_every_token_is_of_one_kind_of_effort():
    session, links = played(
        turn("I look", "hm", LOOK), turn("", "well", LOOK, LOOK), turn("ready", "so")
    )
    spent = rewards.effort(session)
    written = spent.thinking_tokens + spent.call_tokens + spent.final_tokens
    assert written == session.tokens == sum(link.loss_mask.sum() for link in links)
    # every section but the first of a turn begins with a mark, and the last one has the turn's end
    thoughts = sum(1 + len(text) for text in ("hm", "well", "so")) + 1 + len("I look")
    assert spent == Effort(
        thinking_tokens=thoughts,
        call_tokens=session.written.call,
        answer_tokens=session.answered,
        final_tokens=1 + len("ready") + 1,
        calls=3,
        turns=3,
    )
    assert session.final == spent.final_tokens


def test_without_a_final_message_there_is_no_effort_for_it():
    session, _ = played(turn("I look", "", LOOK), turn("ready"), max_turns=1)
    assert session.stop == "turns" and rewards.effort(session).final_tokens == 0
    assert rewards.effort(session).thinking_tokens == session.written.text > 0


def test_summaries_are_thoughts():
    session, links = played(
        *[turn("I look", "hm" * 9, LOOK)] * 8, turn("ready"), context=800, turn_tokens=100,
        summary_at=300, summary_tokens=60,
    )  # fmt: skip
    assert session.summaries > 0 and len(links) == session.summaries + 1
    spent = rewards.effort(session)
    assert spent.final_tokens == len("ready") + 1
    assert spent.thinking_tokens == session.tokens - spent.call_tokens - spent.final_tokens


def test_the_six_quantities_have_weights_of_their_own():
    config = LengthPenaltyConfig(price=2.0, q=0, weights=ONE_EACH)
    for number, name in enumerate(vars(ONE_EACH)):
        cost = rewards.length_cost(Effort(**{name: 3}), config)
        assert cost == pytest.approx(2 * 3 * 10**number, rel=1e-12)
    assert rewards.length_cost(Effort(turns=1, calls=1), config) == pytest.approx(2 * 110_000)


@given(
    st.just(0.0) | st.floats(1e-6, 1e6),
    st.just(0.0) | st.floats(1e-12, 100),
    st.sampled_from([0, 1, 1 - 1e-9, 1 + 1e-9, 2]) | st.floats(0, 6),
)
def test_the_cost_is_the_length_penalty(x, k, q):
    config = LengthPenaltyConfig(price=1.0, k=k, q=q, weights=Effort(turns=1))
    with jax.enable_x64(True):
        expected = float(length_penalty(*map(np.float64, (x, k, q))))
    assert rewards.length_cost(Effort(turns=x), config) == pytest.approx(
        expected, rel=1e-10, abs=1e-300
    )


def test_calls_made_together_are_cheaper():
    config = LengthPenaltyConfig(price=1.0)
    one_by_one = Effort(calls=6, turns=7, call_tokens=60, answer_tokens=600)
    together = Effort(calls=6, turns=2, call_tokens=60, answer_tokens=600)
    assert rewards.length_cost(together, config) < rewards.length_cost(one_by_one, config)


@pytest.mark.parametrize(
    ("stop", "lost", "grade", "outcome", "correct"),
    [
        ("done", "", graded(), "scored", 1.0),
        ("turns", "", graded(reward=0.0), "scored", 0.0),
        ("deadline", "", graded(), "scored", 1.0),
        ("done", "", graded("policy_failure", 0.0), "policy_failure", 0.0),
        ("lost", "exited", None, "policy_failure", 0.0),
        ("lost", "deadline", None, "policy_failure", 0.0),
        ("lost", "node", None, "infrastructure_failure", math.nan),
        ("lost", "backend", graded(), "infrastructure_failure", math.nan),
        ("agent", "no answer", None, "infrastructure_failure", math.nan),
        ("done", "", graded("infrastructure_failure", None), "infrastructure_failure", math.nan),
    ],
)
def test_who_is_to_blame(stop, lost, grade, outcome, correct):
    session = Session(messages=[turn("ready")], stop=stop, lost=lost)
    got = rewards.rollout((), session, grade, RewardConfig())
    assert (got.outcome, got.stop) == (outcome, stop)
    np.testing.assert_equal((got.correct, got.reward), (correct, correct))
    assert got.failed == math.isnan(correct)


def test_rewards_add_up_and_all_behaviours_are_seen():
    session = Session(
        messages=[turn("", "", LOOK), turn("ready")],
        calls=4,
        bad_calls=1,
        turns=2,
        written=Counts(text=20, thinking=30, call=40),
        final=5,
        answered=7,
    )
    config = RewardConfig(
        length=LengthPenaltyConfig(price=0.01, k=0, weights=ONE_EACH),
        behaviours={"bad_calls": -0.2, "final_message": 0.1, "terminal_only": -9.0},
    )
    got = rewards.rollout((), session, graded(), config)
    cost = 0.01 * (45 * 1 + 40 * 10 + 7 * 100 + 5 * 1e3 + 4 * 1e4 + 2 * 1e5)
    assert got.reward == pytest.approx(1 - 0.2 / 4 + 0.1 - cost)
    plain = rewards.rollout((), session, graded(), RewardConfig())
    assert plain.reward == plain.correct == 1
    assert plain.behaviours == got.behaviours and plain.behaviours["bad_calls"] == 0.25
    assert len(plain.behaviours) == 7


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"length": {"price": -1.0}}, "length.price: -1.0; legal"),
        ({"length": {"q": math.inf}}, "length.q: inf"),
        ({"length": {"weights": {"turns": -0.5}}}, "turns: -0.5"),
        ({"behaviours": {"bad_call": 1.0}}, "behaviours.bad_call: unknown; did you mean"),
        ({"behaviours": {"bad_calls": math.nan}}, "behaviours.bad_calls: nan"),
    ],
)  # fmt: skip
def test_bad_config_is_refused_in_a_line(data, words):
    with pytest.raises(ConfigError, match=words):
        from_dict(RewardConfig, data)


def test_the_penalty_is_concave_and_rising():
    config = LengthPenaltyConfig(price=1.0, k=0.5, q=1.5)
    costs = [rewards.length_cost(Effort(turns=x), config) for x in range(60)]
    steps = [b - a for a, b in itertools.pairwise(costs)]
    assert costs[0] == 0 and min(steps) > 0
    assert all(b < a for a, b in itertools.pairwise(steps))
