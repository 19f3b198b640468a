"""All tools of one sandbox in one set."""

import shlex
from collections.abc import Callable, Sequence

from c2.sandbox.protocol import Backend, Handle
from c2.sandbox.tasks.grade import START_S, TOTAL_S, begin, tests_command, verdict
from c2.sandbox.tasks.task import Task
from c2.sandbox.tools import calls
from c2.sandbox.tools.files import SandboxFiles, file_tools
from c2.sandbox.tools.index import Index
from c2.sandbox.tools.outside import TodoList, WebSearch, semantic_search_tool, web_search_tool
from c2.sandbox.tools.shell import Commands, shown
from c2.sandbox.tools.toolset import Tool, ToolsConfig, Toolset


def sandbox_tools(
    backend: Backend,
    handle: Handle,
    config: ToolsConfig,
    *,
    run_tests: Callable[[], str] | None = None,
    todo: TodoList | None = None,
    index: Index | None = None,
    web: WebSearch | None = None,
) -> Toolset:
    """The tools on a sandbox, and those outside of it for which something is given.

    Args:
      backend: whose sandbox it is.
      handle: the sandbox.
      config: which of the tools, and how they behave.
      run_tests: what the tool of that name says, for instance `task_tests`.
      todo: a list of the rollout's own.
      index: of the repository's files as they are at the beginning.
      web: a search service.

    Raises:
      ConfigError: if the config names a tool that there is not.
    """
    tools = file_tools(SandboxFiles(backend, handle), config.max_result)
    tools += Commands(backend, handle, config.max_shell_s, config.max_result).tools()
    if run_tests:
        tools.append(Tool(calls.RunTests, lambda _: run_tests()))
    if todo:
        tools.append(todo.tool())
    if index:
        tools.append(semantic_search_tool(index))
    if web:
        tools.append(web_search_tool(web))
    return Toolset.of(tools, config)


def command_tests(
    backend: Backend, handle: Handle, command: str, *, timeout_s: float = 600.0
) -> Callable[[], str]:
    """Tests by a command of the repository, such as "python3 -m pytest -q"."""

    def run() -> str:
        result = backend.exec(handle, shlex.split(command), timeout_s=timeout_s)
        return shown(result, timeout_s)

    return run


def task_tests(
    backend: Backend, handle: Handle, task: Task, ids: Sequence[str] | None = None
) -> Callable[[], str]:
    """Tests of a task that its agent can see: "pass", or why the first one fails.

    For tasks of real projects it is what pytest prints; their sandboxes need the layer and the
    variables of `python_env`.

    Args:
      backend: whose sandbox it is.
      handle: the sandbox.
      task: the task.
      ids: tests to run; None means those in visible files.
    """
    if task.requires:  # for the agent's own use, so without the walls around a verdict
        return command_tests(backend, handle, "python3 -m pytest -q")
    chosen = ids or [name for name in task.test_ids if name.partition("::")[0] in task.files]
    tests = {name.partition("::")[0] for name in chosen}

    def run() -> str:
        command = tests_command(task.files, {path: task.files[path] for path in tests}, chosen)
        finish = begin(backend, handle, command.argv)
        result = finish(command.stdin, TOTAL_S + START_S)
        _, results = verdict(result.stdout, command.nonce, chosen)
        if results is None:
            return f"fail the tests ended early: {shown(result, TOTAL_S + START_S)}"
        return next((f"fail {why}" for why in results.values() if why), "pass")

    return run
