"""Tasks: repositories with something to do, and grading that their code cannot influence.

`task.Task` is the record, `grade.grade` scores what an agent made of it, `tools` lets scripted
agents work in memory and `in_process` runs tests of trusted code without a process. `minirepo`
generates tasks for models of about a million parameters.
"""
