"""Bad input for the recipe: one line that names the key and what is legal, and no traces."""

import errno
import os
from pathlib import Path

import pytest

from c2.data import tokenizer
from launch import jax_setup
from launch.main import run_main

ROOT = Path(jax_setup.__file__).parent.parent
CODE = 'def f(x):\n    """Doubles."""\n    return 2 * x\n'


@pytest.fixture(autouse=True)
def leave_jax_alone(monkeypatch):
    monkeypatch.setattr(jax_setup, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(jax_setup, "split_cpu", lambda: None)
    monkeypatch.setattr(jax_setup, "release_compiler_memory", lambda: None)


@pytest.fixture
def refused(tiny_json, tmp_path, monkeypatch, capsys):
    """Runs a command that must be refused; gives its line on stderr."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def run(*overrides, status=2):
        words = ["launch/main.py", f"--config={tiny_json}", *overrides]
        assert run_main(words) == status
        printed = capsys.readouterr().err
        assert printed.startswith("error: ")
        assert printed.endswith("\n")
        assert printed.count("\n") == 1
        if status == 2:
            assert os.listdir(here) == []
        return printed.removeprefix("error: ").rstrip()

    return run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hiden=3", "model.hiden: unknown key; did you mean 'hidden'? legal keys: vocab, "),
        ("phases.0.step=3", "phases.0.step: unknown key; did you mean 'steps'? legal keys: name, "),
        ("phases.3.steps=3", "phases.3: no such item; config.phases has 3, counted from 0"),
        ("phases.0.steps=many", "phases.0.steps: expected int, got 'many'"),
        ("phases.0.data=cod", "phases.0.data: 'cod' is not legal; did you mean 'code'? expected"),
        ("model.moe.top_k=5", "model.moe.top_k must be in 1..4 eligible experts, got 5"),
        ("model.moe.groups=3", "model.moe.groups = 3 must divide experts = 4"),
        ("model.attention.rope=3", "model.attention.rope must be even (features rotate in pairs)"),
        ("model.attention.heads=0", "model.attention.heads must be positive, got 0"),
        ("phases.1.micro_batches=3", "phases.1.micro_batches: 3 must divide batch = 4"),
        ("phases.0.batch=0", "phases.0.batch: 0 is not legal; legal: 1 or more"),
        (
            "phases.0.learning_rate.warmup_steps=12",
            "phases.0.learning_rate.warmup_steps: 12 must be below steps = 12",
        ),
        ("phases.0.learning_rate.peak=0", "phases.0.learning_rate.peak must be positive, got 0.0"),
        ("phases.0.yarn.factor=0.5", "phases.0.yarn.original_context: missing; expected int"),
        ("phases.1.name=main", "phases: names ['main', 'main', 'fine_tuning'] must be distinct"),
        ("model.mtp=0", "model.mtp: 0, but a phase trains a module (phases.*.mtp); legal: 1"),
        ("phases.1.mtp.loss=kl", "phases.1.mtp.loss: 'kl' is not legal; expected one of forward_k"),
        (
            "phases.1.mtp.into_trunk=true",
            "phases.1.mtp.into_trunk: the main model is frozen; legal: true with joint_weight",
        ),
        ("data.vocab_size=513", "data.vocab_size: 513 exceeds model.vocab; legal: 512 to 512"),
        ("data.vocab_size=100", "data.vocab_size: 100 is too small; legal: 512 or more"),
        ("data.sources.0.weight=0", "data.sources.0.weight: 0.0 is not legal; legal: a finite"),
        ("optimizer.b1=1", "optimizer.b1 must be in [0, 1), got 1.0"),
        ("evaluation.windows=[1]", "evaluation.windows: (1,) is not legal; legal: lengths of 2"),
        ("loop.keep=0", "loop.keep: 0; must be at least 1"),
    ],
)
def test_config_alone(refused, override, message):
    assert refused(f"--config.{override}").startswith(f"config.{message}")


def test_a_corpus_that_is_not_there(refused):
    message = "config.data.sources: cannot read '/no/such': no such file; legal: 'stdlib', a dir"
    assert refused("--config.data.sources.0.path=/no/such").startswith(message)
    message = "config.data.sources: cannot read 'stdlib:emial': no such package; did you mean 'em"
    assert refused("--config.data.sources.0.path=stdlib:emial").startswith(message)


def test_an_unreadable_corpus(refused, tmp_path, monkeypatch):
    folder = tmp_path / "corpus"
    folder.mkdir()
    scandir = os.scandir

    def deny(path):  # also to root, who may read everything
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    message = f"config.data.sources: cannot read '{folder}': [Errno 13] Permission denied"
    assert refused(f"--config.data.sources.0.path={folder}").startswith(message)


def test_an_empty_corpus(refused, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    override = f"--config.data.sources.0.path={folder}"
    message = f"config.data.sources: '{folder}' is empty: no usable file ending in .py"
    assert refused(override) == message
    (folder / "a.py").write_text(" \n")
    assert refused(override) == f"{message} (1 empty)"


def test_a_corpus_smaller_than_a_batch(refused, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.py").write_text(CODE)
    override = f"--config.data.sources.0.path={folder}"
    assert refused(override).startswith(
        "config.phases.0.batch: 4 rows of 128 tokens, but the documents fill only 1 ("
    )
    # The documents are enough, but not what can be learned from them in the last phase.
    (folder / "a.py").write_text(CODE + "".join(f"x{n} = {n}\n" for n in range(100)))
    assert refused(override).startswith("config.phases.2.batch: 4 rows of 128 tokens, but the do")
    (folder / "a.py").write_text("".join(f"x{n} = {n}\n" for n in range(100)))
    assert refused(override) == (
        "config.data.sources: no Python function with a docstring to fine-tune on"
    )


def test_an_unknown_held_out_package(refused, tmp_path):
    message = "config.data.held_out: 'jsn' is neither a package of the stdlib nor a directory; did"
    assert refused("--config.data.held_out=jsn").startswith(message)
    assert refused(f"--config.data.held_out={tmp_path}").endswith("usable file ending in .py")
    assert refused("--config.data.held_out=email").startswith(
        "config.data.sources: every file of 'stdlib:email' duplicates an earlier source or the held"
    )


def test_a_corrupt_tokenizer(refused, tmp_path):
    path = tmp_path / "tokenizer.json"
    override = f"--config.data.tokenizer={path}"
    message = f"config.data.tokenizer: cannot read '{path}': No such file or directory"
    assert refused(override) == message
    path.write_text('{"model": ')
    message = f"config.data.tokenizer: '{path}' is corrupt or not a tokenizer.json: "
    assert refused(override).startswith(message)
    path.write_bytes(b"\xff\x00")
    assert refused(override).startswith(message)


def test_a_tokenizer_that_the_model_cannot_hold(refused, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.train(["for x in range(10):\n    print(x)\n" * 2], 512).save(path)
    assert refused(f"--config.data.tokenizer={path}", "--config.model.vocab=200").startswith(
        "config.model.vocab: 200 is smaller than the tokenizer's "
    )


def test_a_corrected_command_can_use_the_same_workdir(refused, tmp_path, tiny_json, capsys):
    """What is found after the corpus was cached takes the cache with it."""
    assert "config.phases.0.batch" in refused("--workdir=w", "--config.phases.0.batch=100000")
    assert run_main(["main", f"--config={tiny_json}", "--workdir=w", "--dry_run"]) == 0
    assert "(new run)" in capsys.readouterr().out
