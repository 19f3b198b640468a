"""Lets an agent work on a copy of a repository, in a sandbox, while you watch.

  python -m launch.agent --repo=DIR --prompt="fix the failing test" --endpoint=URL --model=NAME
  python -m launch.agent --policy=scripted          # a demonstration; needs no model

The endpoint is any that speaks OpenAI's chat completions with tools; a key is taken from the
environment variable OPENAI_API_KEY. Your repository is never written to: the agent gets a copy in a
sandbox without network, you get a patch (--out=FILE). Everything is kept in a transcript, a JSON
object in each line.

--config.KEY=VALUE sets a budget or a tool's behaviour, for example --config.harness.max_turns=10 or
--config.tools.reading=strict; --print_config shows all keys.

Exit status: 0 finished; 1 failed; 2 bad input; 130 interrupted.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from c2.agent import harness
from c2.agent.agents import Agent, ScriptedPolicy, TokenAgent
from c2.agent.chat import ByteTokenizer, ChatFormat, Message
from c2.agent.harness import Observer
from c2.agent.transcript import Transcript
from c2.config import ConfigError, located, to_dict
from c2.data.files import atomic
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.protocol import Backend, Handle, SandboxError, SandboxLost, Spec
from c2.sandbox.tasks import grade, minirepo
from c2.sandbox.tasks.minirepo import policies
from c2.sandbox.tasks.task import Task
from c2.sandbox.tools.environment import command_tests, sandbox_tools, task_tests
from c2.sandbox.tools.index import Index
from c2.sandbox.tools.outside import TodoList
from c2.sandbox.tools.toolset import Toolset
from launch import agent_repo
from launch.agent_options import Options, parse
from launch.agent_repo import Changes
from launch.agent_screen import Screen

INSTRUCTIONS = (
    "You are a software engineer. The repository in your working directory, /repo, is yours to "
    "change; there is no network. Look before you edit, keep changes small, run what shows that "
    "they work, and say in the end what you did. A turn without a tool call ends the work."
)
LOOK_S = 600.0  # seconds that a sandbox lives longer than a conversation, for looking at it

Tests = Callable[[Backend, Handle], Callable[[], str]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done and by whom.

    Attributes:
      title: for people.
      folder: the repository as the sandbox gets it.
      left_out: what of the person's repository is not in it.
      messages: how the conversation begins.
      agent: makes who works.
      speaker: who that is, for people.
      run_tests: makes the tool of that name, or None.
      task: the generated task, if it is one.
    """

    title: str
    folder: Path
    left_out: Sequence[str] = ()
    messages: tuple[Message, ...]
    agent: Callable[[Toolset], Agent]
    speaker: str
    run_tests: Tests | None
    task: Task | None = None


@contextlib.contextmanager
def prepared(options: Options) -> Iterator[Job]:
    """The job of a command line; its folder is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="c2-agent-") as parent:
        folder = Path(parent, "repo")
        yield (_scripted if options.policy else _asked)(options, folder)


def _asked(options: Options, folder: Path) -> Job:
    try:
        from c2.agent.endpoint import EndpointAgent
    except ImportError as error:
        raise ConfigError(f"--endpoint needs `pip install -e .[agent]`: {error}") from error

    def agent(tools: Toolset) -> Agent:
        key = os.environ.get("OPENAI_API_KEY", "")
        return EndpointAgent(options.endpoint, options.model, tools, key=key)

    def tests(backend: Backend, handle: Handle) -> Callable[[], str]:
        return command_tests(backend, handle, options.tests)

    return Job(
        title=options.prompt,
        folder=folder,
        left_out=agent_repo.copy(options.repo, folder),
        messages=(
            Message(role="system", text=INSTRUCTIONS),
            Message(role="user", text=options.prompt),
        ),
        agent=agent,
        speaker=f"{options.model} at {options.endpoint}",
        run_tests=tests if options.tests else None,
    )


def _scripted(options: Options, folder: Path) -> Job:
    task = minirepo.generate(options.seed, options.family, options.level)
    for path, text in task.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    def agent(tools: Toolset) -> Agent:
        chat = ChatFormat(ByteTokenizer(), tools)
        script = policies.expert(task, test_before=True)
        return TokenAgent(ScriptedPolicy(script, chat, last="Done; the tests pass."), chat)

    return Job(
        title=task.prompt,
        folder=folder,
        messages=(Message(role="user", text=task.prompt),),
        agent=agent,
        speaker=f"a script that knows the solution of {task.id}; tokens are bytes",
        run_tests=lambda backend, handle: task_tests(backend, handle, task),
        task=task,
    )


def work(options: Options, console: Console) -> int:
    """Plays the conversation and shows it; returns the exit status.

    Raises:
      ConfigError: if the config names a tool that there is not.
      SandboxError: if there can be no sandbox here.
    """
    screen = Screen(console, options.config.harness.max_turns)
    path = options.transcript or Path("runs/agent", time.strftime("%Y%m%d-%H%M%S.jsonl"))
    with prepared(options) as job:
        screen.facts(task=job.title, agent=job.speaker)
        if job.left_out:
            screen.facts(left_out=", ".join(job.left_out))
        with Bwrap() as backend:
            handle = backend.create(_spec(backend, job, options))
            todo = TodoList()
            with located("config.tools"):
                tools = _tools(backend, handle, job, options, todo)
            screen.facts(
                sandbox="bwrap with a copy of the repository, without network",
                tools=", ".join(tools.tools),
            )
            with Transcript(path) as transcript:
                transcript(
                    {"event": "start", "title": job.title, "config": to_dict(options.config)}
                )
                play = harness.run(
                    job.agent(tools), tools, job.messages, options.config.harness,
                    seed=options.seed, observe=[screen, transcript], state=todo.text,
                )  # fmt: skip
                status = _played(play, backend, handle, screen)
                changed = _changed(backend, handle, job, screen)
                _show_patch(changed, job, options, screen, transcript)
                if job.task:
                    _show_grade(backend, changed.files, job.task, screen, transcript)
    screen.copyable("transcript", str(path))
    return status


def _spec(backend: Bwrap, job: Job, options: Options) -> Spec:
    seconds = options.config.harness.deadline_s + LOOK_S
    return Spec(
        layers=(backend.add_layer(str(job.folder)),),
        resources=options.config.resources,
        deadline_s=seconds,
        ttl_s=seconds,
        env={"PYTHONDONTWRITEBYTECODE": "1"},  # or the patch would have it
    )


def _tools(backend: Backend, handle: Handle, job: Job, options: Options, todo: TodoList) -> Toolset:
    return sandbox_tools(
        backend,
        handle,
        options.config.tools,
        run_tests=job.run_tests and job.run_tests(backend, handle),
        todo=todo,
        index=Index(agent_repo.texts(job.folder)),
    )


def _played(play, backend: Bwrap, handle: Handle, screen: Screen) -> int:
    async def to_the_end() -> harness.Session:
        try:
            return await play
        finally:
            # A command that still runs would keep its thread, and this process, waiting.
            with contextlib.suppress(SandboxError):
                for number in backend.jobs(handle):
                    backend.kill(handle, number)

    try:
        return int(asyncio.run(to_the_end()).failed)
    except KeyboardInterrupt:
        screen.note("interrupted")
        return 130


def _changed(backend: Backend, handle: Handle, job: Job, screen: Screen) -> Changes:
    try:
        return agent_repo.changes(backend, handle, job.folder)
    except SandboxLost as error:
        screen.note(f"no changes can be had: {error}")
        return Changes({}, [])


def _show_patch(
    changed: Changes,
    job: Job,
    options: Options,
    screen: Screen,
    transcript: Observer,
) -> None:
    patch, binary = agent_repo.patch(job.folder, changed.files)
    missing = changed.skipped + binary
    transcript({"event": "patch", "text": patch, "missing": missing})
    if not patch:
        screen.note("no text was changed")
    else:
        screen.diff(patch)
    if missing:
        why = "not in the patch (no text, links, too large, odd names)"
        screen.note(f"{why}: {', '.join(missing)}")
    if patch and options.out:
        with atomic(options.out) as temporary:
            temporary.write_bytes(patch.encode())
        folder = f"-C {options.repo} " if options.repo else ""
        screen.copyable("patch", f"git {folder}apply {options.out.absolute()}")


def _show_grade(
    backend: Backend,
    changed: dict[str, bytes | None],
    task: Task,
    screen: Screen,
    transcript: Observer,
) -> None:
    texts = {
        path: data.decode(errors="surrogateescape")
        for path, data in changed.items()
        if data is not None
    }
    files = {path: text for path, text in task.files.items() if path not in changed} | texts
    outcome = grade.grade(task, files, grade.in_sandbox(backend, Spec()))
    transcript({"event": "grade", "kind": outcome.kind, "reward": outcome.reward})
    tests = f"{len(task.test_ids)} tests, hidden ones among them, in a second sandbox"
    if outcome.reward == 1:
        screen.facts(grade=f"solved: passes {tests}")
    else:
        why = outcome.reason or "; ".join(f"{name} {why}" for name, why in outcome.failed.items())
        screen.facts(grade=f"not solved, of {tests}: {why}")


def run_main(argv: Sequence[str], console: Console | None = None) -> int:
    """One command line; every failure is one line on stderr. Returns the exit status."""
    try:
        options = parse(argv, __doc__)
        if options.print_config:
            print(json.dumps(to_dict(options.config), indent=2))
            return 0
        return work(options, console or Console(highlight=False))
    except ConfigError as error:
        return _fail(str(error), 2)
    except (SandboxError, OSError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


def main() -> NoReturn:
    """Starts the process."""
    sys.exit(run_main(sys.argv))


if __name__ == "__main__":
    main()
