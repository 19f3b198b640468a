"""The default list of release pairs, from the package index."""

import functools
import sys
import tempfile
from pathlib import Path

import pytest

from c2.sandbox.protocol import Resources, SandboxError, Spec
from c2.sandbox.tasks import leaks, python_env, release_pairs, tools
from c2.sandbox.tasks.grade import grade, in_sandbox
from c2.sandbox.tasks.tools import MemoryRepo, play


@functools.cache
def _cache() -> Path:
    return Path(tempfile.gettempdir()) / "c2-tests-packages"  # so that a second run has them


@pytest.mark.slow
@pytest.mark.parametrize("project", release_pairs.recipes())
def test_expert_and_idler_on_the_default_list(bwrap, project):
    """Ten times each: the expert solves the task, who does nothing does not; always the same."""
    recipe = release_pairs.recipes()[project]
    if recipe.found.python != f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip(f"the gates were run with Python {recipe.found.python}")
    try:
        solved = release_pairs.build(recipe, _cache())
        site = python_env.install(solved.task.requires, _cache())
    except SandboxError as error:
        pytest.skip(f"no package index: {error}")
    layer = bwrap.add_layer(str(site), at=python_env.SITE)
    try:
        spec = Spec(layers=(layer,), resources=Resources(memory_mb=1024))
        run = in_sandbox(bwrap, spec, timeout_s=240.0)
        repo = MemoryRepo(solved.task.files, lambda _: "pass")
        calls = play(tools.expert(solved), repo, max_calls=1000)
        assert all(not answer.startswith("error") for _, answer in calls)
        done = {repr(grade(solved.task, repo.files, run)) for _ in range(10)}
        undone = [grade(solved.task, solved.task.files, run) for _ in range(10)]
        assert len(done) == 1 and "reward=1.0" in done.pop()
        assert {outcome.reward for outcome in undone} == {0.0}
        assert {frozenset(outcome.failed) for outcome in undone} == {
            frozenset(solved.task.fail_to_pass)
        }
        assert leaks.copies(solved, run, project) == []
    finally:
        bwrap.drop_layer(layer)
