"""The environments service: plays rollouts in sandboxes and has them graded; imports no jax.

    rollout = await environments.rollout("minirepo/constant/1/17", sample=3)

A rollout gets a sandbox of its own with the task's repository, a conversation between the policy
and its tools, and a grade from a second sandbox that the policy never saw. What is random in it
follows from the seed, the task and the sample, so the same weights give the same rollout again.
With checkpoints it goes on behind its last one, wherever its service or its sandbox has died.
"""

import asyncio
import dataclasses
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from c2.agent import harness
from c2.agent.agents import AgentError, TokenAgent
from c2.agent.chat import ChatFormat, Message, Syntax, Tokenizer, system_text
from c2.agent.harness import HarnessConfig, Saved, Session, derived_seed
from c2.config import ConfigError
from c2.records import Completion, Rollout
from c2.rl import checkpoints, rewards
from c2.rl.calls import Handle, LostError
from c2.rl.checkpoints import Checkpoint, CheckpointError, RolloutFolder
from c2.rl.rewards import RewardConfig
from c2.sandbox import protocol
from c2.sandbox.layers import CopyError
from c2.sandbox.pool.config import PoolConfig
from c2.sandbox.pool.pool import Pool
from c2.sandbox.protocol import SandboxError, SandboxLost, Spec
from c2.sandbox.store import MAX_LAYERS
from c2.sandbox.tasks import grade, minirepo, place
from c2.sandbox.tasks.grade import Outcome
from c2.sandbox.tasks.task import Task
from c2.sandbox.tools.environment import sandbox_tools, task_tests
from c2.sandbox.tools.outside import TodoList
from c2.sandbox.tools.toolset import ToolsConfig, Toolset

_LOG = logging.getLogger(__name__)
VERDICTS = 256  # repositories whose grades are remembered
GRACE_S = 60.0  # that a sandbox lives longer than a conversation, for its files to be read


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What an agent finds, and what its work is worth.

    Attributes:
      pool: where sandboxes come from.
      ready: sandboxes that are kept running for rollouts to come.
      resources: of each.
      harness: budgets of a conversation.
      tools: which there are, and how they behave.
      rewards: what counts beside the grade.
      syntax: how calls are written.
      instructions: what the system says, with the tools' schemas behind it; "" says nothing.
      temperature: of sampling.
      checkpoint_turns: turns between two checkpoints of a rollout; 0 for none.
      patience_s: seconds that a rollout waits for inference that has died.
    """

    pool: PoolConfig = field(default_factory=lambda: PoolConfig(backend="zygote"))
    ready: int = 8
    resources: protocol.Resources = field(default_factory=protocol.Resources)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    syntax: Syntax = "json"
    instructions: str = ""
    temperature: float = 1.0
    checkpoint_turns: int = 0
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("ready", "checkpoint_turns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: at least 0")
        for name in ("temperature", "patience_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: above 0")


class ServedPolicy:
    """A `c2.agent.agents.Policy` behind the inference service.

    If that dies the request is made again: it says the same as long as the weights are the same.
    """

    def __init__(self, inference: Handle, temperature: float, patience_s: float) -> None:
        self._inference = inference
        self._temperature, self._patience_s = temperature, patience_s

    async def complete(
        self, ids: Sequence[int], *, max_tokens: int, stop: Sequence[int], seed: int
    ) -> Completion:
        """As `c2.agent.agents.Policy.complete`."""
        until = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._inference.call(
                    "complete", list(ids), max_tokens, tuple(stop), self._temperature, seed
                )
            except LostError as error:
                if time.monotonic() > until:
                    raise AgentError(f"inference: {error}") from None
                await asyncio.sleep(0.2)
            except ConfigError as error:
                raise AgentError(f"inference: {error}") from None


class Environments:
    """Plays rollouts; see the module."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Callable[[], Tokenizer],
        inference: Handle,
        *,
        seed: int = 0,
        task: Callable[[str], Task] = minirepo.from_id,
        folder: str | None = None,
    ) -> None:
        """Starts a pool.

        Args:
          config: what an agent finds.
          tokenizer: makes the policy's.
          inference: samples, see `c2.rl.inference.Inference.complete`.
          seed: of the run.
          task: the task of a prompt.
          folder: for checkpoints, shared by the environment services of a run; None for none.
        """
        self._config, self._task, self._seed = config, task, seed
        self._folder = Path(folder) if folder and config.checkpoint_turns else None
        self._tokenizer = tokenizer()
        self._policy = ServedPolicy(inference, config.temperature, config.patience_s)
        self._spec = Spec(
            resources=config.resources,
            deadline_s=config.harness.deadline_s + GRACE_S,
            ttl_s=config.harness.deadline_s + GRACE_S,
            env={"PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._pool = Pool(config.pool)
        self._verdicts: OrderedDict[tuple[str, bytes], Outcome] = OrderedDict()
        if config.ready:
            self._pool.keep_ready(self._spec, config.ready)

    async def ping(self) -> int:
        """Is alive; its process id."""
        return os.getpid()

    async def close(self) -> None:
        """Ends all sandboxes."""
        await asyncio.to_thread(self._pool.shutdown)

    async def rollout(self, prompt: str, sample: int) -> Rollout:
        """Plays a rollout, or goes on with it.

        Args:
          prompt: names the task.
          sample: which rollout of the task.
        """
        kept = self._folder and RolloutFolder(self._folder, prompt, sample)
        last = await asyncio.to_thread(_load, kept) if kept else None
        if isinstance(last, Rollout):
            return last
        task = await asyncio.to_thread(self._task, prompt)
        try:
            handle = await asyncio.to_thread(self._sandbox, task, last)
            try:
                done = await self._play(task, handle, sample, kept, last)
            finally:
                await asyncio.to_thread(self._pool.close, handle)
        except SandboxError as error:  # none came up, or it went before the policy was at work
            nothing = Session(stop="lost", lost=str(error))
            return rewards.rollout((), nothing, None, self._config.rewards)
        if kept and not done.failed:
            await asyncio.to_thread(kept.end, done)
        return done

    async def forget(self, prompts: Sequence[str]) -> None:
        """Removes the checkpoints of prompts whose rollouts nobody will ask for again."""
        if self._folder:
            await asyncio.to_thread(checkpoints.forget, self._folder, prompts)

    def _sandbox(self, task: Task, last: Checkpoint | None) -> protocol.Handle:
        """A sandbox with the files of a task, or those of a checkpoint."""
        pool = self._pool
        names = [pool.add_layer(str(path), at="/") for path in (last.layers if last else ())]
        try:
            layers = (*self._spec.layers, *names)
            handle = pool.create(dataclasses.replace(self._spec, layers=layers))
        finally:
            for name in names:
                pool.drop_layer(name)  # goes with the sandbox
        if last is None:
            try:
                place.put(pool, handle, task.files)
            except BaseException:
                pool.close(handle)
                raise
        return handle

    async def _play(
        self,
        task: Task,
        handle: protocol.Handle,
        sample: int,
        kept: RolloutFolder | None,
        last: Checkpoint | None,
    ) -> Rollout:
        config, pool = self._config, self._pool
        todo = TodoList()
        run_tests = task_tests(pool, handle, task)
        tools = sandbox_tools(pool, handle, config.tools, run_tests=run_tests, todo=todo)
        chat = ChatFormat(self._tokenizer, tools, syntax=config.syntax)
        agent = TokenAgent(self._policy, chat, last.generations if last else ())
        events: list[Any] = list(last.events) if last else []
        todo.items = last.todo if last else ()

        async def save(saved: Saved) -> None:
            if saved.session.turns % config.checkpoint_turns:
                return
            now = Checkpoint(
                saved=saved, generations=agent.generations, events=tuple(events),
                todo=todo.items, layers=last.layers if last else (),
            )  # fmt: skip
            await asyncio.to_thread(self._save, kept, now, handle)

        session = await harness.run(
            agent, tools, self._messages(task, tools), config.harness,
            seed=derived_seed(self._seed, task.id, sample), observe=[events.append],
            state=todo.text, save=save if kept else None, saved=last.saved if last else None,
        )  # fmt: skip
        graded = None if session.stop in ("lost", "agent") else await self._grade(task, handle)
        done = rewards.rollout(agent.generations, session, graded, config.rewards)
        return dataclasses.replace(done, transcript=tuple(events))

    def _save(self, kept: RolloutFolder, now: Checkpoint, handle: protocol.Handle) -> None:
        """Saves a rollout unless files are not all there is; without one it goes on as well."""
        if len(self._spec.layers) + len(now.layers) + 1 > MAX_LAYERS - 1:  # an image is one, too
            return  # it has been interrupted that often
        try:
            if not (_in_background(now.saved.session) or self._pool.jobs(handle)):
                kept.save(now, partial(self._pool.save, handle))
        except (SandboxError, CopyError, OSError) as error:
            _LOG.warning("no checkpoint of a rollout: %s", error)

    def _messages(self, task: Task, tools: Toolset) -> list[Message]:
        said = [Message(role="user", text=task.prompt)]
        if self._config.instructions:
            text = system_text(self._config.instructions, tools)
            said.insert(0, Message(role="system", text=text))
        return said

    async def _grade(self, task: Task, handle: protocol.Handle) -> Outcome | None:
        """What the work is worth; None if the policy has left nothing to look at."""

        def graded() -> Outcome | None:
            try:
                files = place.take(self._pool, handle)
            except SandboxLost as lost:
                if lost.reason in ("exited", "deadline"):
                    return None
                return _infrastructure(str(lost))
            except SandboxError as error:
                return _infrastructure(str(error))
            return self._verdict(task, files)

        return await asyncio.to_thread(graded)

    def _verdict(self, task: Task, files: Mapping[str, str]) -> Outcome:
        """The grade of a repository, once for all rollouts of a group that end in the same one."""
        content = repr(sorted(files.items())).encode()
        key = task.id, hashlib.sha256(content).digest()  # the files themselves would fill memory
        known = self._verdicts.get(key)
        if known is None:
            known = grade.grade(task, files, grade.in_sandbox(self._pool, self._spec))
            if known.kind != "infrastructure_failure":
                self._verdicts[key] = known
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        return known


def _load(kept: RolloutFolder) -> Checkpoint | Rollout | None:
    try:
        return kept.load()
    except CheckpointError as error:
        _LOG.warning("%s; the rollout starts again from its prompt", error)
        return None


def _in_background(session: Session) -> bool:
    """Whether the agent has started something that its files do not bring back."""
    calls = (request.call for message in session.messages for request in message.requests)
    return any(call and call.name == "shell" and call.arguments.get("background") for call in calls)


def _infrastructure(reason: str) -> Outcome:
    return Outcome(
        kind="infrastructure_failure", reward=None, failed={}, changed=(), ignored=(), reason=reason
    )
