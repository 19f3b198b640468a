"""A repository in memory with the tools that work without a sandbox, and agents that call them."""

from collections.abc import Callable, Generator, Mapping

from c2.sandbox.tasks.task import Solved
from c2.sandbox.tools import calls
from c2.sandbox.tools.files import MemoryFiles, file_tools
from c2.sandbox.tools.schema import Call
from c2.sandbox.tools.toolset import Tool, ToolsConfig, Toolset

Policy = Generator[Call, str, None]
"""An agent: yields calls and is sent their answers. It has finished when it returns."""


class MemoryRepo:
    """Files in a dict that the tools work on. Every answer is text, errors too.

    Attributes:
      tools: the tools on files and `run_tests`.
    """

    def __init__(
        self,
        files: Mapping[str, str],
        run_tests: Callable[[Mapping[str, str]], str],
        config: ToolsConfig = ToolsConfig(),  # noqa: B008 - frozen
    ) -> None:
        self._files = MemoryFiles(files)
        tests = Tool(calls.RunTests, lambda _: run_tests(self.files))
        self.tools = Toolset.of([*file_tools(self._files, config.max_result), tests], config)

    @property
    def files(self) -> dict[str, str]:
        """Path -> text, as it is now."""
        return self._files.texts

    def __call__(self, call: Call) -> str:
        """The answer; "error: ..." for a call that cannot be done."""
        return self.tools(call).text


def play(policy: Policy, repo: Callable[[Call], str], *, max_calls: int) -> list[tuple[Call, str]]:
    """Lets a policy work on a repository; returns its calls with their answers.

    Args:
      policy: a fresh generator.
      repo: answers calls, for example a `MemoryRepo`.
      max_calls: calls after which the policy is stopped.
    """
    transcript, answer = [], None
    try:
        while len(transcript) < max_calls:
            call = policy.send(answer)
            answer = repo(call)
            transcript.append((call, answer))
    except StopIteration:
        pass
    finally:
        policy.close()
    return transcript


def expert(solved: Solved) -> Policy:
    """An agent that knows the solution: it writes every file that differs, and deletes none."""
    for path, text in sorted(solved.solution.items()):
        if solved.task.files.get(path) != text:
            yield Call("write_file", {"path": path, "text": text})
