"""Rollouts that are cut off anywhere end as if nothing had happened, and sample nothing twice."""

import asyncio
import dataclasses
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from c2.agent.chat import SUMMARY_REQUEST, ByteTokenizer, ChatFormat, Message, Request
from c2.agent.harness import HarnessConfig, derived_seed
from c2.records import Completion
from c2.rl import environments
from c2.rl.calls import LostError
from c2.rl.checkpoints import RolloutFolder
from c2.rl.environments import EnvironmentConfig, Environments
from c2.sandbox.pool.config import PoolConfig
from c2.sandbox.pool.pool import Pool
from c2.sandbox.protocol import SandboxError
from c2.sandbox.tasks import minirepo
from c2.sandbox.tasks.minirepo import policies
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Toolset
from launch.local import LocalLauncher

PROMPT, SAMPLE = "minirepo/rename/1/3", 2
BYTES = ByteTokenizer()
CONFIG = EnvironmentConfig(
    ready=0,
    harness=HarnessConfig(context=8192, turn_tokens=1000, summary_at=450, summary_tokens=200),
    checkpoint_turns=1,
)
SETUP = "mkdir d; echo 1 > d/old; echo 2 > run; chmod 751 run; ln -s run link; echo 3 > /tmp/x"
LOOK = "find d link run /tmp/x; stat -c %a run; cat link /tmp/x; cat d/new; echo 4 >> d/new"


def lines(*more):
    """What the policy says, turn by turn; every file that it makes or removes shows later."""
    todo = {"items": [{"text": "mend it", "state": "doing"}, {"text": "tell", "state": "open"}]}
    calls = [
        (Call("todo", todo), Call("shell", {"command": SETUP})),
        Call("shell", {"command": f"rm -r d; mkdir d; touch d/new; {LOOK}"}),
        *more,
        *policies.expert(minirepo.from_id(PROMPT), test_before=True),
        Call("shell", {"command": LOOK}),
    ]
    chat, said = ChatFormat(BYTES, Toolset({})), []
    for call in calls:
        several = (call,) if isinstance(call, Call) else call
        requests = tuple(Request(call=one, id=str(n)) for n, one in enumerate(several))
        said.append(chat.encode_turn(Message(role="assistant", thinking="so", requests=requests)))
    return [*said, chat.encode_turn(Message(role="assistant", text="done"))]


SUMMARY = [*BYTES.encode("half of it is done"), BYTES.special("turn_end")]


class Inference:
    """Says its lines; what is sampled a second time has other versions.

    Attributes:
      said: how often each turn was sampled, summaries among them.
      dies: what happens before turns, once each.
    """

    def __init__(self, turns=None):
        self.lines, self.dies, self.said = turns or lines(), {}, Counter()
        seed = derived_seed(0, PROMPT, SAMPLE)
        self._turns = {derived_seed(seed, turn): turn for turn in range(50)}
        self._sums = set()

    async def ping(self):
        return os.getpid()

    async def counts(self):
        return self.said

    async def call(self, method, *args):
        return await getattr(self, method)(*args)

    async def complete(self, ids, max_tokens, stop, temperature, seed):
        turn = self._turns[seed]
        if happens := self.dies.pop(turn, None):
            await happens()
        self.said[turn] += 1
        if BYTES.decode(ids).endswith(f"{SUMMARY_REQUEST}<|turn_end|><|assistant|>"):
            self._sums.add(turn)
        line = self.lines[turn - sum(other < turn for other in self._sums)]
        said = SUMMARY if turn in self._sums else line
        rng = np.random.default_rng([seed, len(ids)])
        return Completion(
            prompt=np.array(ids, np.int32),
            tokens=np.array(said, np.int32),
            log_probs=-rng.random(len(said), np.float32),
            versions=np.full(len(said), turn + 100 * (self.said[turn] - 1), np.int32),
            forced=np.zeros(len(said), bool),
            routes=rng.integers(0, 9, (len(ids) + len(said), 2, 2)).astype(np.int16),
            temperature=temperature,
            finish="stop",
        )


@pytest.fixture(scope="module")
def pool():
    try:
        made = Pool(PoolConfig(backend="zygote"))
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture(scope="module")
def service(pool):
    """Makes services that share a pool and tell which files they have graded."""
    take = environments.place.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "Pool", lambda config: pool)

        def make(inference, folder=None, config=CONFIG):
            folder = folder and str(folder)
            made = Environments(config, ByteTokenizer, inference, folder=folder)
            made.graded = []

            def note(*args):
                made.graded.append(take(*args))
                return made.graded[-1]

            patch.setattr(environments.place, "take", note)
            return made

        yield make


async def cut_off(service, inference, turn):
    """Plays to a turn, and leaves a rollout there as a killed process does."""
    there = asyncio.Event()

    async def stop():
        there.set()
        await asyncio.Event().wait()

    inference.dies[turn] = stop
    playing = asyncio.create_task(service.rollout(PROMPT, SAMPLE))
    await asyncio.wait([playing, asyncio.create_task(there.wait())], return_when="FIRST_COMPLETED")
    assert not playing.done(), playing.result()
    playing.cancel()
    await asyncio.wait([playing])


def same(a, b):
    """Whether two rollouts are bitwise equal; log-probabilities, versions and routes, too."""
    for one, two in zip(a.generations, b.generations, strict=True):
        for name, values in vars(one).items():
            np.testing.assert_array_equal(getattr(two, name), values, strict=True)
    rest = [dataclasses.replace(x, generations=()) for x in (a, b)]
    assert vars(rest[0]) == vars(rest[1])


@pytest.fixture(scope="module")
def whole(service):
    """A rollout that nobody has interrupted, how many turns it has, and the files at its end."""
    inference = Inference()
    made = service(inference)
    rollout = asyncio.run(made.rollout(PROMPT, SAMPLE))
    assert rollout.correct == 1 and rollout.stop == "done"
    assert len(rollout.generations) > 2  # there were summaries
    assert set(inference.said.values()) == {1}
    return rollout, len(inference.said), made.graded


def test_a_rollout_that_is_killed_after_every_turn_ends_as_if_nothing_had_happened(
    service, whole, tmp_path
):
    rollout, turns, files = whole
    inference = Inference()

    async def body():
        for turn in range(turns):
            await cut_off(service(inference, tmp_path), inference, turn)
        last = service(inference, tmp_path)
        same(rollout, await last.rollout(PROMPT, SAMPLE))
        assert last.graded == files
        same(rollout, await last.rollout(PROMPT, SAMPLE))  # if nobody has heard of its end
        assert last.graded == files and inference.said == Counter(range(turns))
        await last.forget([PROMPT, "another"])
        assert list(tmp_path.iterdir()) == []

    asyncio.run(body())


def test_a_sandbox_that_is_lost_costs_no_token(service, whole, pool, tmp_path):
    inference = Inference()

    async def kill():
        for pid in pool.node_pids():
            os.kill(pid, signal.SIGKILL)

    inference.dies[5] = kill

    async def body():
        made = service(inference, tmp_path)
        lost = await made.rollout(PROMPT, SAMPLE)
        assert lost.failed and not made.graded
        return await made.rollout(PROMPT, SAMPLE)

    again = asyncio.run(body())
    assert again.transcript == whole[0].transcript and again.correct == 1
    twice = inference.said - Counter(range(whole[1]))
    assert set(twice) <= {5, 6} and twice.total() <= 2  # what nobody had answered yet


@pytest.mark.parametrize("what", ["checkpoint", "layer", "lost layer"])
def test_a_checkpoint_that_is_damaged_is_not_used_and_that_is_said(
    service, whole, tmp_path, caplog, what
):
    inference = Inference()

    async def body():
        await cut_off(service(inference, tmp_path), inference, 3)
        (file,) = tmp_path.rglob("checkpoint")
        (layer,) = (path for path in file.parent.iterdir() if path != file)
        if what == "checkpoint":
            file.write_bytes(file.read_bytes()[:-1])
        elif what == "layer":
            (layer / "tmp" / "x").write_text("4")
        else:
            layer.rename(tmp_path / "elsewhere")
        again = await service(inference, tmp_path).rollout(PROMPT, SAMPLE)
        assert "its checksum is wrong; the rollout starts again from its prompt" in caplog.text
        assert again.transcript == whole[0].transcript
        assert inference.said == Counter(range(whole[1])) + Counter(range(3))

    asyncio.run(body())


def test_what_a_killed_process_leaves_half_written_goes_with_the_next_checkpoint(service, tmp_path):
    inference, config = Inference(), dataclasses.replace(CONFIG, checkpoint_turns=2)

    async def body():
        await cut_off(service(inference, tmp_path, config), inference, 1)
        assert not list(tmp_path.rglob("*"))  # one turn is not enough
        await cut_off(service(inference, tmp_path, config), inference, 2)
        (file,) = tmp_path.rglob("checkpoint")
        file.with_name("checkpoint.123").write_bytes(b"half")
        (file.parent / "tmphalf" / "d").mkdir(parents=True)
        await cut_off(service(inference, tmp_path, config), inference, 7)
        assert len(list(file.parent.iterdir())) == 3  # one that was gone on from, and one on top

    asyncio.run(body())
    assert inference.said[0] == 2 and inference.said[1] == 1


def test_a_command_in_the_background_cannot_be_saved(service, tmp_path):
    inference = Inference(lines(Call("shell", {"command": "sleep 1e-3", "background": True})))

    async def body():
        await cut_off(service(inference, tmp_path), inference, 8)
        place = RolloutFolder(tmp_path, PROMPT, SAMPLE)
        assert place.load().saved.session.turns == 2  # the last one before it

    asyncio.run(body())


def test_a_process_that_is_killed_is_replaced_by_one_that_goes_on(pool, whole, tmp_path):
    """With services in processes: SIGKILL of the one that plays, again and again."""
    del pool  # where there are no sandboxes it is skipped

    async def body():
        launcher = LocalLauncher()
        try:
            inference = await launcher.start("inference", Slow)
            make = partial(Environments, CONFIG, ByteTokenizer, inference, folder=str(tmp_path))
            for turns in (2, 6, None):
                made = await launcher.start("environments", make)
                playing = asyncio.create_task(made.call("rollout", PROMPT, SAMPLE))
                if turns is None:
                    return await playing, await inference.call("counts")
                while len(await inference.call("counts")) < turns:
                    await asyncio.sleep(0.01)
                os.kill(launcher.pid("environments"), signal.SIGKILL)
                with pytest.raises(LostError):
                    await playing
        finally:
            await launcher.close()

    rollout, said = asyncio.run(body())
    assert rollout.transcript == whole[0].transcript and rollout.reward == whole[0].reward
    again = said - Counter(range(whole[1]))
    assert said.keys() == set(range(whole[1])) and again.total() <= 2  # turns without an answer yet


class Slow(Inference):
    """Takes its time, so that there is some to be killed in."""

    async def complete(self, *args):
        await asyncio.sleep(0.2)
        return await super().complete(*args)


def test_a_service_without_a_folder_saves_nothing(service):
    assert service(Inference(), None)._folder is None
    off = dataclasses.replace(CONFIG, checkpoint_turns=0)
    assert service(Inference(), Path("x"), off)._folder is None
