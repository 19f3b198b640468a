"""Tasks in Harbor's format, the one of Terminal-Bench 2, in sandboxes of this machine's programs.

A task is a folder with `task.toml`, `instruction.md`, `environment/`, `tests/test.sh` and, often,
`solution/solve.sh`; the tests write a number to /logs/verifier/reward.txt, or names with numbers to
reward.json. Of a Dockerfile, COPY, ENV, RUN and WORKDIR are followed, on top of the programs of
this machine instead of those of FROM; what a sandbox cannot give is named and refused.
"""

from c2.sandbox.tasks.harbor.format import HarborTask, read
from c2.sandbox.tasks.harbor.trial import Place, build, solve, start, verify

__all__ = ["HarborTask", "Place", "build", "read", "solve", "start", "verify"]
