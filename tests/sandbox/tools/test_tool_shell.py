"""The tools that run commands and tests, and the list of things to do."""

import re

from c2.sandbox.tasks.minirepo import generate, solve
from c2.sandbox.tools import outside
from c2.sandbox.tools.environment import command_tests, sandbox_tools, task_tests
from c2.sandbox.tools.toolset import ToolsConfig, Toolset


def test_shell(tools, said):
    assert said(tools, "shell", command="echo a; echo b >&2; echo c; exit 3") == (
        "a\nb\nc\n[exit status 3]"
    )
    assert said(tools, "shell", command="pwd") == "/repo\n[exit status 0]"
    assert said(tools, "shell", command="kill -9 $$") == "[ended by signal 9]"
    left = said(tools, "shell", command="setsid sleep .3 & echo hi")
    assert left == "hi\n[exit status 0; it left processes running]"
    late = said(tools, "shell", command="echo x; sleep 9", timeout_s=0.2)
    assert late == "x\n[killed: it ran longer than 0.2 s]"
    for timeout_s in (0, -1, 601, "inf"):
        assert "timeout_s: " in said(tools, "shell", command="true", timeout_s=timeout_s)
    flood = said(tools, "shell", command="yes é | head -c 999999; echo end")
    assert len(flood.encode()) <= 16384 and "bytes left out" in flood
    assert flood.endswith("end\n[exit status 0]") and "\ufffd" not in flood


def test_background_jobs(bwrap, tools, place, said):
    started = said(tools, "shell", command="echo up; tail -f /dev/null", background=True)
    number, log = re.fullmatch(r"\[job (\d+) runs; its output goes to (\S+)\]", started).groups()
    number = int(number)
    waiting = f"until grep -q up {log}; do sleep .01; done"
    assert said(tools, "shell", command=waiting) == "[exit status 0]"
    assert said(tools, "job", number=number) == "up\n[it runs]"
    said(tools, "job", number=number, kill=True)
    said(tools, "shell", command="while pgrep -x tail; do sleep .01; done")
    assert said(tools, "job", number=number) == "up\n[killed: you asked for it]"
    assert said(tools, "job", number=99) == f"error: no job 99; there are {number}"


def test_run_tests_of_a_command_and_of_a_task(bwrap, place, said):
    tests = command_tests(bwrap, place, "python3 -c 'print(1); exit(1)'")
    assert said(sandbox_tools(bwrap, place, ToolsConfig(), run_tests=tests), "run_tests") == (
        "1\n[exit status 1]"
    )
    task = generate(3, "operator", 1)
    for files, begin in ((task.files, "fail "), (solve(task), "pass")):
        for path, text in files.items():
            bwrap.write(place, f"/repo/{path}", text.encode())
        tools = sandbox_tools(
            bwrap,
            place,
            ToolsConfig(names=("run_tests",)),
            run_tests=task_tests(bwrap, place, task),
        )
        assert said(tools, "run_tests").startswith(begin)


def test_todo(said):
    todo = outside.TodoList()
    tools = Toolset.of([todo.tool()], ToolsConfig())
    items = [{"text": "a"}, {"text": "b", "state": "done"}]
    assert said(tools, "todo", items=items) == "[ ] a\n[x] b"
    assert [item.state for item in todo.items] == ["open", "done"]
    assert said(tools, "todo", items=[{"text": "a", "state": "x"}]).startswith(
        "error: todo.items.0"
    )
    assert said(tools, "todo", items=[{"text": "a"}] * 51).startswith("error: items: 51; at most")
    assert len(todo.items) == 2
