"""`python -m launch.serve`: from a checkpoint to an agent's turns, and bad input in one line."""

import asyncio
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

for extra in ("starlette", "prometheus_client", "pydantic", "httpx2"):
    pytest.importorskip(extra)
uvicorn = pytest.importorskip("uvicorn")

from c2.agent.chat import ByteTokenizer, Message  # noqa: E402
from c2.agent.endpoint import EndpointAgent  # noqa: E402
from c2.config import ConfigError  # noqa: E402
from c2.data import tokenizer as tokenizers  # noqa: E402
from c2.models import hf  # noqa: E402
from c2.sandbox.tools.calls import ReadFile  # noqa: E402
from c2.sandbox.tools.toolset import Tool, ToolsConfig, Toolset  # noqa: E402
from c2.training import pretrain  # noqa: E402
from c2.training.checkpoint import Checkpoints  # noqa: E402
from c2.training.state import TrainState  # noqa: E402
from experiments import recipe  # noqa: E402
from launch import run_dir, serve, serve_model  # noqa: E402

SIZES = ["slots=2", "capacity=700", "prefill_rows=1", "prefill_chunk=64", "steps=8"]
ENGINE = [f"--config.engine.{size}" for size in (*SIZES, "prefix_entries=0")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tiny_config, random_params):
    """A model in Hugging Face's format, with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    tokenizer = tokenizers.train(["def f(x):\n    return x\n"] * 9, 300)
    cfg = replace(tiny_config, vocab=tokenizer.vocab_size + 2, layers=2)
    hf.save(random_params(cfg), cfg, folder, dtype="float32", extra={"eos_token_id": 1})
    tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def started(monkeypatch):
    """Runs a command line in a thread: (words) -> its address, once it is ready."""
    threads, servers = [], []

    class Noted(uvicorn.Server):
        def run(self, sockets):
            servers.append(self)
            self.address = sockets[0].getsockname()
            ready.set()
            super().run(sockets)

    ready = threading.Event()
    monkeypatch.setattr(uvicorn, "Server", Noted)
    monkeypatch.setattr(serve.jax_setup, "enable_compilation_cache", lambda: None)

    def start(*words):
        console = Console(file=io.StringIO())
        command = ["serve", "--port=0", *ENGINE, *words]
        threads.append(threading.Thread(target=serve.run_main, args=(command, console)))
        threads[-1].start()
        assert ready.wait(300)
        return f"http://127.0.0.1:{servers[-1].address[1]}/v1", console.file.getvalue()

    yield start
    for server in servers:
        server.should_exit = True
    for thread in threads:
        thread.join()


def test_an_agent_talks_to_it(checkpoint, started):
    """The harness's client: turns with tools, in a conversation that grows."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        url, said = started(f"--checkpoint={checkpoint}", "--config.server.model=tiny")
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    assert said.startswith(f"model    {checkpoint}; chats in the project's format\n")
    assert f"ready    {url} after " in said and "try      curl " in said
    tools = Toolset.of([Tool(ReadFile, lambda call: "nothing")], ToolsConfig())
    agent = EndpointAgent(url, "tiny", tools)
    messages = [Message(role="system", text="Be brief."), Message(role="user", text="Look.")]

    async def talk():
        for seed in range(6):
            turn = await agent.turn(messages, max_tokens=16, seed=seed)
            assert turn.message.role == "assistant" and 1 <= turn.tokens <= 16
            assert agent.size([*messages, turn.message]) == turn.prompt_tokens + turn.tokens
            messages.append(turn.message)
            messages.extend(
                Message(role="tool", text="nothing", answers=request.id)
                for request in turn.message.requests
            )
        return turn

    last = asyncio.run(talk())
    assert last.prompt_tokens > 100


def test_what_a_checkpoint_holds(checkpoint):
    served = serve_model.load(
        checkpoint=checkpoint, preset=None, tokenizer=None, dtype="bfloat16", seed=0
    )
    assert served.cfg.dtype == "bfloat16" and served.end == (1,)
    assert served.tokenizer.decode(served.tokenizer.encode("def f")) == "def f"
    assert served.chat.stop[1] == served.tokenizer.special("end")
    with pytest.raises(ConfigError, match=r"^--tokenizer: bytes, for a vocabulary of "):
        serve_model.load(
            checkpoint=checkpoint, preset=None, tokenizer="bytes", dtype="float32", seed=0
        )


def test_a_vocabulary_without_room_for_marks(tmp_path, tiny_config, random_params):
    tokenizer = tokenizers.train(["def f(x):\n"] * 9, 300)
    cfg = replace(tiny_config, vocab=tokenizer.vocab_size - 1)
    hf.save(random_params(cfg), cfg, tmp_path / "m", dtype="float32")
    tokenizer.save(tmp_path / "m" / "tokenizer.json")
    served = serve_model.load(
        checkpoint=tmp_path / "m", preset=None, tokenizer=None, dtype="float32", seed=0
    )
    assert served.chat is None and served.end == ()


def test_the_newest_sound_checkpoint_of_a_run(tmp_path, tiny_config, random_params):
    phases = recipe.smoke().phases
    config = replace(recipe.smoke(), model=replace(tiny_config, mtp=1, vocab=600))
    folder = tmp_path / "run"
    (folder / "data").mkdir(parents=True)
    tokenizers.train(["def f(x):\n"] * 9, 300).save(folder / "data" / "tokenizer.json")
    manifest = {"study": "experiments/recipe.py", "variant": "smoke"}
    manifest |= {"config": run_dir.to_dict(config)}
    (folder / run_dir.CONFIG).write_text(json.dumps(manifest))
    optimizer = pretrain.make_optimizer(config.optimizer, phases, config.model)
    old, new = (random_params(config.model, seed) for seed in (0, 1))

    class NoData:
        def get_state(self):
            return {}

    last = sum(phase.steps for phase in phases)
    with Checkpoints(folder / run_dir.CHECKPOINTS) as checkpoints:
        for step, params in ((1, old), (last, new)):
            state = TrainState(jax.numpy.int32(step), params, optimizer.init(params))
            checkpoints.save(step, state, NoData())
    damaged = folder / run_dir.CHECKPOINTS / f"{last + 1:08d}"
    damaged.mkdir()
    served = serve_model.load(
        checkpoint=folder, preset=None, tokenizer=None, dtype="float32", seed=0
    )
    assert served.origin == f"{folder}, step {last}" and damaged.exists()
    assert served.cfg == pretrain.phase_model(config.model, phases[-1])
    jax.tree.map(np.testing.assert_array_equal, served.params, new)


def test_random_weights_and_bytes(monkeypatch):
    monkeypatch.setattr(serve_model.models, "init", lambda key, cfg: cfg.vocab)
    served = serve_model.load(
        checkpoint=None, preset="tiny_gqa_moe", tokenizer=None, dtype="float32", seed=1
    )
    assert isinstance(served.tokenizer, ByteTokenizer) and served.end == (256,)
    assert served.cfg.vocab == served.params == 256 + len(ByteTokenizer._NAMES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--checkpoint, --preset: one of them says what is served"),
        (["--preset=a", "--checkpoint=b"], "--checkpoint, --preset: one of them"),
        (["--checkpoint=nowhere"], "--checkpoint: there is no 'nowhere'"),
        (["--preset=x", "--port=0"], "unknown model 'x'; known: "),
        (["--preset=tiny_mla_moe", "--port=0", "--tokenizer=nowhere"], "tokenizer: cannot read"),
        (["--checkpoint=.", "--port=0"], "--tokenizer is missing: there is no 'tokenizer.json'"),
        (["--preset=x", "--config.engine.slot=1"], "config.engine.slot: unknown key; did you mean"),
        (["--preset=x", "--config.engine.slots=0"], "config.engine.slots: 0; legal: at least 1"),
        (["--preset=x", "--config.server.model="], "config.server.model: it is empty"),
        (["--preset=x", "--port=-1"], "flag --port=-1"),
        (["--dtype=int4"], "flag --dtype=int4"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message):
    assert serve.run_main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {message}") and err.count("\n") == 1 and not out


def test_a_port_that_is_taken(capsys):
    with serve.socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.run_main(["serve", "--preset=tiny_mla_moe", f"--port={port}"]) == 1
    assert "in use" in capsys.readouterr().err


def test_without_its_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert serve.run_main(["serve", "--preset=tiny_mla_moe"]) == 2
    assert "launch.serve needs `pip install -e .[serve]`" in capsys.readouterr().err


def test_help_and_config(capsys):
    with pytest.raises(SystemExit) as ended:
        serve.run_main(["serve", "--help"])
    assert ended.value.code == 0 and "--checkpoint" in capsys.readouterr().out
    assert serve.run_main(["serve", "--print_config", "--config.engine.slots=9"]) == 0
    assert json.loads(capsys.readouterr().out)["engine"]["slots"] == 9


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_as_a_process(number, status):
    """What it says to try works, and signals end it."""
    command = [sys.executable, "-m", "launch.serve", "--preset=tiny_mla_moe", "--port=0", *ENGINE]
    env = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        lines = iter(process.stdout.readline, "")
        example = next(line for line in lines if line.startswith("try "))
        words = shlex.split(example.removeprefix("try"))
        answer = subprocess.run(words, capture_output=True, check=True).stdout
        assert re.search(rb'"completion_tokens":\d+', answer)
        process.send_signal(number)
        assert not process.stdout.read()
    assert process.returncode == status
