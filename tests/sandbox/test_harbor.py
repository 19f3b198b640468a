"""Tasks in Harbor's format: what is read, what is refused, and who decides."""

import dataclasses

import pytest

from c2.config import ConfigError
from c2.sandbox.protocol import Resources, ToolError, Unsupported
from c2.sandbox.tasks import harbor
from c2.sandbox.tasks.harbor import dockerfile, trial

FILES = {
    "task.toml": """
schema_version = "1.1"
[task]
name = "team/hello"
[metadata]
difficulty = "easy"
tags = ["files"]
[verifier]
timeout_sec = 30.0
env = { WANT = "hello", KEY = "${API_KEY}" }
[agent]
timeout_sec = 60.0
[environment]
build_timeout_sec = 20.0
cpus = 1
memory_mb = 256
storage_mb = 64
allow_internet = false
env = { MODE = "fast" }
""",
    "instruction.md": "Write hello to out.txt.\n",
    "environment/Dockerfile": """
# what the agent finds
FROM debian:bookworm
WORKDIR /app
ENV NAME=value \\
    OTHER="two words"
COPY data/ ./data/
COPY one.txt /etc/one.txt
RUN test "$NAME" = value && test "$OTHER" = "two words" && test "$MODE" = fast \\
    && cat data/a.txt /etc/one.txt > made.txt
""",
    "environment/data/a.txt": "a\n",
    "environment/data/sub/b.txt": "b\n",
    "environment/one.txt": "one\n",
    "tests/test.sh": """
test ! -e /solution || echo seen > /dev/null
if [ "$(cat out.txt)" = "$WANT" ] && [ "$(pwd)" = /app ] && grep -q 1 /tests/extra/x.txt; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
""",
    "tests/extra/x.txt": "1\n",
    "solution/solve.sh": "echo hello > out.txt\n",
}


def folder(tmp_path, **changes):
    for path, text in (FILES | changes).items():
        if text is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    return tmp_path


def test_reading(tmp_path):
    task = harbor.read(folder(tmp_path))
    assert (task.id, task.prompt) == ("team/hello", "Write hello to out.txt.\n")
    assert task.metadata == {"difficulty": "easy", "tags": ["files"]}
    assert task.resources == Resources(cpus=1.0, memory_mb=256, disk_mb=64)
    assert (task.agent_s, task.verifier_s, task.build_s) == (60.0, 30.0, 20.0)
    assert (task.env, task.verifier_env) == ({"MODE": "fast"}, {"WANT": "hello"})
    assert set(task.tests) == {"test.sh", "extra/x.txt"} and set(task.solution) == {"solve.sh"}
    assert task.files["data/a.txt"] == b"a\n" and task.unsupported == ()


def test_the_older_form(tmp_path):
    text = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'
    task = harbor.read(folder(tmp_path / "old", **{"task.toml": text}))
    assert task.id == "old"
    assert (task.resources.memory_mb, task.resources.disk_mb) == (2048, 512)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("task.toml", None, "task.toml"),
        ("task.toml", "[", "hello"),
        ("task.toml", "agent = 1\n", "agent: legal is a table"),
        ("task.toml", '[environment]\nmemory = "much"\n', "environment.memory: 'much'"),
        ("instruction.md", None, "instruction.md"),
        ("tests/test.sh", None, "tests/test.sh: there is none"),
    ],
)
def test_what_is_no_task(tmp_path, path, text, words):
    with pytest.raises(ConfigError, match=words):
        harbor.read(folder(tmp_path / "hello", **{path: text}))


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("task.toml", "[environment]\ngpus = 1\n", "a GPU or TPU"),
        ("task.toml", '[[steps]]\nname = "one"\n', "several steps"),
        ("environment/docker-compose.yaml", "services: {}\n", "docker compose"),
        ("environment/Dockerfile", "FROM a\nCOPY --from=b /x /y\n", "Dockerfile:2: COPY"),
        ("environment/Dockerfile", "FROM a\nUSER me\n", "Dockerfile:2: USER"),
        ("environment/Dockerfile", "RUN <<EOF\nls\nEOF\n", "Dockerfile:1: RUN"),
    ],
)
def test_what_is_not_to_be_had_is_named(tmp_path, path, text, words):
    task = harbor.read(folder(tmp_path, **{path: text}))
    assert words in task.unsupported
    with pytest.raises(Unsupported, match=words):
        harbor.build(None, task)


def test_instructions():
    text = "FROM a  # no comment\n\nRUN one \\\n# between\n  two\nrun three"
    assert [(step.name, step.text, step.line) for step in dockerfile.steps(text)] == [
        ("FROM", "a  # no comment", 1), ("RUN", "one two", 3), ("RUN", "three", 6),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (". .", {"/app/a", "/app/d/b"}), ("d /x", {"/x/b"}), ("d/ x/", {"/app/x/b"}),
        ("a b.txt", {"/app/b.txt"}), ("a x/", {"/app/x/a"}), ("a .", {"/app/a"}),
        ("--chown=1:1 a d/b /x/", {"/x/a", "/x/b"}),
    ],
)  # fmt: skip
def test_copies(words, found):
    step = dockerfile.Step("COPY", words, 1)
    assert set(dockerfile.copied({"a": b"", "d/b": b"1"}, step, "/app")) == found
    with pytest.raises(ConfigError, match="Dockerfile:1: COPY: there is no 'c'"):
        dockerfile.copied({"a": b""}, dockerfile.Step("COPY", "c .", 1), "/app")


def trial_of(backend, task, act):
    """What the tests say after `act` has done something to the agent's sandbox."""
    place = harbor.build(backend, task)
    try:
        handle = harbor.start(backend, task, place)
        try:
            act(place, handle)
            return harbor.verify(backend, task, place, handle)
        finally:
            backend.close(handle)
    finally:
        backend.drop_layer(place.layer)


def test_the_solution_solves_it_and_doing_nothing_does_not(bwrap, tmp_path):
    task = harbor.read(folder(tmp_path))

    def look(place, handle):
        made = bwrap.read(handle, "/app/made.txt")
        assert (made, place.folder) == (b"a\none\n", "/app")
        for path in ("/tests", "/solution", "/logs"):
            assert bwrap.stat(handle, path).kind is None

    nothing = trial_of(bwrap, task, look)
    assert (nothing.kind, nothing.reward) == ("scored", 0.0)
    solved = trial_of(bwrap, task, lambda place, handle: harbor.solve(bwrap, task, place, handle))
    assert (solved.kind, solved.reward) == ("scored", 1.0)


def test_a_verdict_that_the_agent_wrote_does_not_count(bwrap, tmp_path):
    task = harbor.read(folder(tmp_path))
    task = dataclasses.replace(task, tests=task.tests | {"test.sh": b"true\n"})

    def cheat(place, handle):
        for path, text in (
            ("/logs/verifier/reward.txt", b"1"), ("/logs/verifier/reward.json", b'{"reward": 1}'),
            ("/tests/test.sh", b"echo 1 > /logs/verifier/reward.txt"),
        ):  # fmt: skip
            bwrap.write(handle, path, text)
        bwrap.exec(handle, ["sh", "-c", "(while :; do echo 1 > /logs/verifier/reward.txt; done) &"])

    outcome = trial_of(bwrap, task, cheat)
    assert (outcome.kind, outcome.reward) == ("policy_failure", 0.0)
    assert outcome.reason == "no reward: the tests wrote none"


def test_a_build_that_fails_says_where(bwrap, tmp_path):
    task = harbor.read(
        folder(tmp_path, **{"environment/Dockerfile": "FROM a\nRUN echo why >&2; false\n"})
    )
    with pytest.raises(ToolError, match="team/hello: Dockerfile:2: RUN fails: why"):
        harbor.build(bwrap, task)


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward.txt": b"0.5\n"}, 0.5),
        ({"reward.json": b'{"reward": 1, "speed": 0.1}'}, 1.0),
        ({"reward.json": b'{"correct": 0.25}'}, 0.25),
        ({"reward.json": b"1"}, 1.0),
        ({"reward.txt": b"nan"}, None),
        ({"reward.txt": b""}, None),
        ({"reward.json": b'{"reward": true}'}, None),
        ({"reward.json": b'{"reward": 1e999}'}, None),
        ({"reward.json": b'{"reward": "1"}'}, None),
        ({"reward.json": b"{"}, None),
        ({}, None),
    ],
)
def test_rewards(files, reward):
    if reward is None:
        with pytest.raises(ValueError):
            trial.rewards(files)
    else:
        found = trial.rewards(files)
        assert found.get("reward", next(iter(found.values()))) == reward
