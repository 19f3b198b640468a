"""Conversations of scripted agents as rows of tokens, to learn from before anything is rewarded."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from c2.agent import harness
from c2.agent.agents import Script, ScriptedPolicy, TokenAgent
from c2.agent.chat import ChatFormat, Message, Syntax, Tokenizer
from c2.agent.harness import HarnessConfig
from c2.records import Generation
from c2.sandbox.tasks.in_process import visible_tests
from c2.sandbox.tasks.task import Task
from c2.sandbox.tasks.tools import MemoryRepo
from c2.sandbox.tools.toolset import ToolsConfig


def demonstrate(
    tasks: Iterable[Task],
    script: Callable[[Task], Script],
    tokenizer: Tokenizer,
    *,
    syntax: Syntax,
    tools: ToolsConfig,
    budgets: HarnessConfig,
    last: str = "done",
) -> list[Generation]:
    """Plays scripts in memory, without sandboxes; the answers are those of the same tools.

    Args:
      tasks: what to work on.
      script: a fresh script for a task.
      tokenizer: of the policy that is to learn.
      syntax: how calls are written.
      tools: which there are, and how they behave.
      budgets: of a conversation.
      last: what the agent says in the end.

    Returns:
      A generation for every link of every conversation.
    """

    async def play(task: Task) -> Sequence[Generation]:
        shown = [name for name in task.test_ids if name.partition("::")[0] in task.files]
        repo = MemoryRepo(task.files, visible_tests(task.files, shown), tools)
        chat = ChatFormat(tokenizer, repo.tools, syntax=syntax)
        agent = TokenAgent(ScriptedPolicy(script(task), chat, last=last), chat)
        said = [Message(role="user", text=task.prompt)]
        await harness.run(agent, repo.tools, said, budgets)
        return agent.generations

    async def play_all() -> list[Generation]:
        return [link for task in tasks for link in await play(task)]

    return asyncio.run(play_all())
