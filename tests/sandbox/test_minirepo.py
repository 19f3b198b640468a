"""Generated tasks: sound by construction, the same everywhere, solvable, and not given away."""

import ast
import collections
import functools
import itertools
import math
import os
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.sandbox.tasks import in_process, tools
from c2.sandbox.tasks.minirepo import (
    FAMILIES,
    LEVELS,
    SPLITS,
    draw,
    generate,
    policies,
    slip,
    solve,
    sound,
    split,
    splits,
)
from c2.sandbox.tasks.minirepo.templates import TEMPLATES
from c2.sandbox.tasks.task import Task, from_json

SEEDS = range(3)
ALL = list(itertools.product(FAMILIES, LEVELS))
task_of = functools.lru_cache(maxsize=None)(generate)


def failures(task: Task, files: dict[str, str]) -> set[str]:
    tests = task.files | task.hidden_tests
    results = in_process.run_tests(files, tests, task.test_ids)
    return {name for name, why in results.items() if why}


def played(task: Task, policy: tools.Policy) -> tuple[dict[str, str], list]:
    visible = [name for name in task.test_ids if name.split("::")[0] in task.files]
    repo = tools.MemoryRepo(task.files, in_process.visible_tests(task.files, visible))
    transcript = tools.play(policy, repo, max_calls=30)
    return repo.files, transcript


@pytest.mark.parametrize(("family", "level"), ALL)
def test_the_base_fails_exactly_what_it_should_and_the_expert_solves_it(family, level):
    for seed in SEEDS:
        task = task_of(seed, family, level)
        assert failures(task, task.files) == set(task.fail_to_pass)
        assert task.pass_to_pass or level == 0  # there is nothing else to break
        hidden = [name for name in task.fail_to_pass if name.startswith("hidden/")]
        shown = [name for name in task.fail_to_pass if name.startswith("tests/")]
        assert len(hidden) >= 3 and shown
        for style in ("lines", "match"):
            files, transcript = played(task, policies.expert(task, style=style, test_before=True))
            assert files == solve(task)
            assert transcript[0][0].name == "read_file"
            assert transcript[1][1].startswith("fail ")
            assert transcript[-1][1] == "pass"
            assert not any(answer.startswith("error") for _, answer in transcript)
        assert not failures(task, solve(task))


def test_the_weak_agent_is_weak_where_it_says_and_nothing_does_nothing():
    for (family, level), seed in itertools.product(ALL, SEEDS):
        task = task_of(seed, family, level)
        files, _ = played(task, policies.weak(task))
        able = level < 4 and family not in ("rename", "constant", "config")
        assert (not failures(task, files)) == able, (family, level, seed)
        assert played(task, policies.nothing(task)) == (task.files, [])


def test_a_careless_expert_slips_and_repairs_as_often_as_it_is_told():
    rng = random.Random(0)
    solved = slipped = repaired = unseen = 0
    for seed, family in itertools.product(range(40), ("operator", "constant")):
        task = task_of(seed, family, 1)
        policy = policies.careless(task, rng, slips=0.5, tests=1.0, repairs=0.5)
        files, transcript = played(task, policy)
        tests = [answer for call, answer in transcript if call.name == "run_tests"]
        slipped += tests[0] != "pass"
        repaired += len(tests) > 1
        wrong = failures(task, files)
        shown = any(name.startswith("tests/") for name in wrong)
        assert (transcript[-1][1] == "pass") != shown
        unseen += bool(wrong) and not shown
        assert not any(answer.startswith("error") for _, answer in transcript)
        solved += not wrong
    assert abs(slipped - 40) < 4 * math.sqrt(80) / 2  # four standard errors of a fair coin
    assert abs(repaired - slipped / 2) < 4 * math.sqrt(slipped) / 2
    assert solved == 80 - slipped + repaired - unseen


def test_a_slip_is_wrong_in_another_way():
    rng = random.Random(0)
    slips = 0
    for seed, family in itertools.product(range(20), ("operator", "boundary")):
        task = task_of(seed, family, 1)
        wrong = slip(task, rng)
        assert wrong is None or wrong not in (task.files, solve(task))
        slips += wrong is not None
    assert slips >= 38  # also where the family has one fault only


def test_a_careless_expert_finds_the_file_that_the_prompt_keeps_back():
    told = 0
    for seed in range(20):
        task = task_of(seed, "operator", 1)
        policy = policies.careless(task, random.Random(0), slips=0, tests=0, repairs=0)
        files, ((first, answer), *_) = played(task, policy)
        assert files == solve(task)
        told += ".py" in task.prompt
        if ".py" in task.prompt:
            assert first.name == "read_file"
        else:
            (path,) = (path for path in solve(task) if solve(task)[path] != task.files[path])
            assert first.name == "grep" and answer.startswith(f"{path}:")
    assert 4 < told < 16


def test_sound_packages_are_of_no_held_out_template_and_run():
    names = {name for key in splits.HELD_TEMPLATES for name in TEMPLATES[key].names}
    for seed in range(50):
        files = sound(seed)
        functions = {
            node.name for text in files.values() for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
        }  # fmt: skip
        assert len(functions) >= 3 and not functions & names
        assert files == sound(seed) != sound(seed + 1)


@pytest.mark.parametrize("level", LEVELS)
def test_repositories_are_small_and_grow_with_the_level(level):
    for family, seed in itertools.product(FAMILIES, SEEDS):
        task = task_of(seed, family, level)
        package = {path: text for path, text in task.files.items() if "tests/" not in path}
        for path, text in package.items():
            if path.endswith(".py"):
                ast.parse(text)
            assert len(text.splitlines()) <= 40 and len(text) <= 1000
        assert all(len(line) <= 100 for text in package.values() for line in text.splitlines())
        modules = [path for path in package if not path.endswith(("__init__.py", "config.py"))]
        assert len([path for path in modules if path.endswith(".py")]) == max(level, 1)
        assert len(task.prompt) <= 200 and "\n" not in task.prompt
        fixed = solve(task)
        edits = sum(
            len(policies.edits(text, fixed[path], path, "lines"))
            for path, text in task.files.items()
        )
        assert edits >= (2 if level == 4 or family == "rename" else 1)


def test_tests_that_decide_differ_from_those_shown():
    for family, level in ALL:
        task = task_of(0, family, level)
        asserts = [
            {line for text in files.values() for line in text.splitlines() if "assert" in line}
            for files in (task.files, task.hidden_tests)
        ]
        assert not asserts[0] & asserts[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(), st.sampled_from(FAMILIES), st.sampled_from(LEVELS))
def test_what_an_agent_sees_does_not_hold_the_solution(seed, family, level):
    task = generate(seed, family, level)
    fixed = solve(task)
    for path, text in task.files.items():
        new = set(fixed[path].splitlines()) - set(text.splitlines())
        for line in filter(str.strip, new):
            assert line.strip() not in task.prompt
    assert fixed.keys() == task.files.keys() and fixed != task.files
    assert not set(task.hidden_tests) & set(task.files)
    changed = [path for path in fixed if fixed[path] != task.files[path]]
    assert all(task.allows(path) for path in changed)
    assert from_json(task.to_json()) == task


def test_the_same_in_another_process_with_another_hash_seed():
    script = (
        "from c2.sandbox.tasks.minirepo import *\n"
        "for family in FAMILIES:\n"
        "    for level in LEVELS: print(generate(7, family, level).content_hash)\n"
        "print(draw(5, 2, 'template').content_hash)"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    here = [generate(7, family, level).content_hash for family, level in ALL]
    assert outputs[0] == outputs[1] == [*here, draw(5, 2, "template").content_hash]
    assert len(set(outputs[0])) == len(outputs[0])


def test_splits_are_disjoint():
    combinations = {}
    held = set(splits.HELD_TEMPLATES)
    names = {name for key in held for name in TEMPLATES[key].names}
    for part, seed in itertools.product(SPLITS, range(24)):
        task = draw(seed, seed % 4 + 1, part)
        assert split(task) == part
        assert (task.family in splits.HELD_FAMILIES) == (part == "family")
        templates = set(task.split_keys["template"].split("+"))
        assert part == "family" or bool(templates & held) == (part == "template")
        assert combinations.setdefault(task.split_keys["combination"], part) == part
        if part in ("train", "combination"):
            words = set(re.findall(r"\w+", " ".join(task.files.values())))
            assert not names & words, task.id


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(splits.HELD_FAMILIES)))
def test_every_family_is_in_every_split(family):
    for part in ("train", "combination", "template"):
        assert draw(0, 1, part, families=[family]).family == family


def test_families_are_drawn_evenly():
    counts = collections.Counter(draw(seed, 1).family for seed in range(180))
    assert set(counts) == set(FAMILIES) - set(splits.HELD_FAMILIES)
    # 20 are expected of each; 4.2 standard deviations either way.
    assert all(abs(count - 20) <= 18 for count in counts.values()), counts


def test_combinations_are_held_out_at_the_rate_of_an_eighth():
    tasks = [generate(seed, "operator", 2) for seed in range(150)]
    parts = collections.Counter(map(split, tasks))
    rest = parts["train"] + parts["combination"]
    assert 0.02 <= parts["combination"] / rest <= 0.28


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: generate(0, "operators"), "family: 'operators'"),
        (lambda: generate(0, "operator", 5), "level: 5"),
        (lambda: draw(0, 1, "test"), "part: 'test'"),
        (lambda: draw(0, families=["arguments"]), "families: split 'train' has none of arguments"),
    ],
)
def test_what_there_is_not_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_no_fault_loops_for_ever():
    """A wrong name made a loop append to the list that it went through, in this very process."""
    task = draw(559662310274, families=("operator", "name"))
    assert task.family == "name"
