"""Tasks: repositories with something to do, and grading that their code cannot influence.

`task.Task` is the record, `grade.grade` scores what an agent made of it, `tools` lets scripted
agents work in memory and `in_process` runs tests of trusted code without a process.

Where tasks come from: `minirepo` generates them for models of about a million parameters;
`release_pairs`, `git_tasks` and `swebench` make candidates of real projects, which `gates` lets
through if their tests are sound; `harbor` runs tasks in a format of others. `honeypots` makes tasks
that only cheating solves, `monitors` finds signs of it, `leaks` copies of a solution.
"""
