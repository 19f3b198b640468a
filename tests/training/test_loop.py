"""The loop on a tiny model and a tiny Grain pipeline; as a program, the run that gets killed."""

import dataclasses
import functools
import hashlib
import io
import itertools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import flax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from c2.config import ConfigError
from c2.training.checkpoint import Checkpoints, ForeignCheckpointError
from c2.training.loop import Interrupted, LoopConfig, Phase, train
from c2.training.metrics import MetricsLog, read_columns, read_rows
from c2.training.progress import TrainingProgress

BATCH, SEQ, WIDTH = 4, 8, 16
OPTIMIZER = optax.adam(1e-2)


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: optax.OptState


def make_state() -> State:
    chance = np.random.default_rng(0)
    params = {
        "in": jnp.asarray(chance.normal(size=(SEQ, WIDTH)), jnp.float32),
        "out": jnp.asarray(chance.normal(size=WIDTH), jnp.float32),
    }
    return State(jnp.int32(0), params, jax.jit(OPTIMIZER.init)(params))


@jax.jit
def loss_fn(params, tokens):
    hidden = jnp.tanh(tokens / 100.0 @ params["in"])  # [batch, width]
    return jnp.mean((hidden @ params["out"] - 1.0) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def step_fn(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch["tokens"])
    updates, opt_state = OPTIMIZER.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "tokens": jnp.sum(batch["loss_mask"])}
    return State(state.step + 1, params, opt_state), metrics


def make_batches(seed: int, documents: int | None = None):
    def batch(numbers):
        tokens = (numbers[:, None] * 31 + np.arange(SEQ)) % 97
        return {"tokens": tokens.astype(np.int32), "loss_mask": np.ones((BATCH, SEQ), np.float32)}

    numbers = grain.MapDataset.source(np.arange(documents or 100)).seed(seed).shuffle()
    numbers = numbers if documents else numbers.repeat()
    batches = numbers.batch(BATCH, drop_remainder=True).map(batch)
    # Ahead of the consumer, but not by hundreds of batches that no test would look at.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=3)))


def make_phases(steps=(7, 5), wrap=lambda step_fn: step_fn) -> list[Phase]:
    """A fresh shuffle in every phase."""
    return [
        Phase(
            name=f"phase{seed}",
            steps=count,
            step_fn=wrap(step_fn),
            make_batches=functools.partial(make_batches, seed),
        )
        for seed, count in enumerate(steps)
    ]


def run(directory: Path, phases=None, *, console=None, evaluate=None, **config):
    config = LoopConfig(**{"log_every": 2, "checkpoint_every": 3} | config)
    progress = TrainingProgress(console or Console(file=io.StringIO()), every=0.0)
    with (
        Checkpoints(directory / "checkpoints", keep=config.keep) as checkpoints,
        MetricsLog(directory) as log,
    ):
        return train(
            phases or make_phases(),
            make_state(),
            checkpoints=checkpoints,
            log=log,
            progress=progress,
            config=config,
            evaluate=evaluate,
        )


def recording(seen: list[str]):
    """Notes a hash of every batch that a step function gets."""

    def wrap(step_fn):
        def wrapped(state, batch):
            seen.append(hashlib.sha256(batch["tokens"].tobytes()).hexdigest())
            return step_fn(state, batch)

        return wrapped

    return wrap


def stopping_at(step: int, number: signal.Signals):
    """Raises a signal while the given step runs."""
    count = itertools.count(1)

    def wrap(step_fn):
        def wrapped(state, batch):
            if next(count) == step:
                os.kill(os.getpid(), number)
            return step_fn(state, batch)

        return wrapped

    return wrap


def raw(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def plain():
    """What a loop without any of our machinery computes: (state, batch hashes, losses)."""
    seen, losses, state = [], [], make_state()
    for phase in make_phases(wrap=recording(seen)):
        batches = phase.make_batches()
        for _ in range(phase.steps):
            state, metrics = phase.step_fn(state, next(batches))
            losses.append(float(metrics["loss"]))
    return state, seen, losses


def test_the_loop_adds_nothing_to_the_numbers(tmp_path, plain):
    seen = []
    state = run(tmp_path, make_phases(wrap=recording(seen)))
    assert raw(state) == raw(plain[0])
    assert seen == plain[1]

    columns = read_columns(tmp_path / "metrics.jsonl")
    steps, losses = columns["loss"]
    assert list(steps) == [2, 3, 4, 6, 7, 8, 9, 10, 12]  # every 2nd, and where a save looks at it
    np.testing.assert_array_equal(losses, np.float32([plain[2][step - 1] for step in steps]))
    np.testing.assert_array_equal(columns["total_tokens"][1], steps * BATCH * SEQ)
    assert list(columns["phase"][1]) == ["phase0"] * 5 + ["phase1"] * 4
    assert (columns["tokens_per_second"][1] > 0).all()


@pytest.mark.parametrize(
    ("step", "number"),  # 6 is saved anyway; 7 ends a phase
    [(1, signal.SIGTERM), (6, signal.SIGINT), (7, signal.SIGTERM), (8, signal.SIGTERM)],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, plain, step, number):
    seen = []
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    output = io.StringIO()
    wrap = recording(seen)
    with pytest.raises(Interrupted) as stopped:
        stopping = stopping_at(step, number)
        run(tmp_path, make_phases(wrap=lambda f: stopping(wrap(f))), console=Console(file=output))
    assert stopped.value.code == 128 + number
    assert stopped.value.step == step
    assert f"{number.name}: stopped after step {step} of 12" in output.getvalue()
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))

    assert raw(run(tmp_path, make_phases(wrap=wrap))) == raw(plain[0])
    assert seen == plain[1]
    steps, tokens = read_columns(tmp_path / "metrics.jsonl")["total_tokens"]
    assert sorted(set(steps)) == list(steps)
    np.testing.assert_array_equal(tokens, steps * BATCH * SEQ)


def test_the_last_step_finishes_even_if_a_signal_arrives(tmp_path, plain):
    state = run(tmp_path, make_phases(wrap=stopping_at(12, signal.SIGTERM)))
    assert raw(state) == raw(plain[0])


def test_a_finished_run_is_only_restored(tmp_path, plain):
    run(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text()
    seen = []
    assert raw(run(tmp_path, make_phases(wrap=recording(seen)))) == raw(plain[0])
    assert seen == []
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_a_torn_newest_checkpoint_costs_only_the_steps_since_the_previous(tmp_path, plain, caplog):
    run(tmp_path, make_phases((7, 5)))
    (tmp_path / "checkpoints" / "00000012" / "manifest.json").unlink()
    seen = []
    assert raw(run(tmp_path, make_phases(wrap=recording(seen)))) == raw(plain[0])
    assert seen == plain[1][9:]
    assert "00000012" in caplog.text
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert steps == [2, 3, 4, 6, 7, 8, 9, 10, 12]
    assert Checkpoints(tmp_path / "checkpoints").latest() == 12


def test_metrics_are_read_one_step_late_and_only_when_due(tmp_path):
    """Stand-ins for device scalars note how many steps had been started when they were read."""
    started, reads = [], {}

    class Scalar:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            reads.setdefault(self.step, len(started))
            return 1.0

        def __array__(self, *_args, **_kwargs):
            return np.float32(float(self))

    def counting(state, batch):
        started.append(batch)
        scalar = Scalar(len(started))
        return state, {"loss": scalar, "tokens": scalar}

    phase = dataclasses.replace(make_phases((20,))[0], step_fn=counting)
    run(tmp_path, [phase], log_every=5, checkpoint_every=100)
    assert reads.pop(1) == 1  # the compiling step is waited for
    assert reads == {
        step: 6 if step <= 5 else 11 if step <= 10 else 16 if step <= 15 else 20
        for step in range(2, 21)
    }


def test_evaluation_joins_the_line_of_its_step_once(tmp_path):
    calls = []

    def evaluate(state):
        calls.append(int(state.step))
        return {"nll": float(state.step) / 2}

    other = dataclasses.replace(make_phases()[1], evaluate=lambda state: {"nll": -1.0})
    phases = [make_phases()[0], other]
    with pytest.raises(Interrupted):
        stopping = dataclasses.replace(other, step_fn=stopping_at(2, signal.SIGTERM)(step_fn))
        run(tmp_path, [phases[0], stopping], evaluate=evaluate, eval_every=3)
    run(tmp_path, phases, evaluate=evaluate, eval_every=3)
    assert calls == [0, 3, 6, 7]
    columns = read_columns(tmp_path / "metrics.jsonl")
    np.testing.assert_array_equal(columns["nll"][0], [0, 3, 6, 7, 9, 12])
    np.testing.assert_array_equal(columns["nll"][1], [0, 1.5, 3, 3.5, -1, -1])
    assert list(columns["loss"][0]) == [2, 3, 4, 6, 7, 8, 9, 10, 12]


def ruin_loss(state, metrics):
    return state, metrics | {"loss": jnp.float32("nan")}


def ruin_params(state, metrics):
    return state.replace(params=state.params | {"out": state.params["out"] * jnp.inf}), metrics


@pytest.mark.parametrize(
    ("ruin", "step", "message"),
    [
        (ruin_loss, 8, "the loss is nan at step 8; the last good checkpoint is .*/00000007$"),
        (ruin_loss, 2, "the loss is nan at step 2; no checkpoint was saved before$"),
        (ruin_params, 9, "the parameters are not finite after step 9; the last .*/00000007$"),
    ],
)
def test_nothing_bad_is_saved(tmp_path, ruin, step, message):
    def wrap(step_fn):
        def wrapped(state, batch):
            state, metrics = step_fn(state, batch)
            return ruin(state, metrics) if state.step == step else (state, metrics)

        return wrapped

    with pytest.raises(RuntimeError, match=message):
        run(tmp_path, make_phases(wrap=wrap), log_every=5)
    assert (Checkpoints(tmp_path / "checkpoints").latest() or 0) < step


def test_data_that_ends_early_is_named(tmp_path):
    phase = Phase(
        name="short", steps=9, step_fn=step_fn, make_batches=lambda: make_batches(0, documents=20)
    )
    with pytest.raises(RuntimeError, match="phase short: the data ended before step 6"):
        run(tmp_path, [phase])


@pytest.mark.parametrize("steps", [(3, 20), (4,)])
def test_a_checkpoint_of_another_schedule_is_refused(tmp_path, steps):
    with pytest.raises(Interrupted):
        run(tmp_path, make_phases(wrap=stopping_at(5, signal.SIGTERM)))
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ForeignCheckpointError, match="step 5 in phase phase0 is not in this"):
        run(tmp_path, make_phases(steps))
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines


def test_bad_configs_are_refused():
    with pytest.raises(ConfigError, match="log_every: 0"):
        LoopConfig(log_every=0)
    with pytest.raises(ConfigError, match="keep_every: -1"):
        LoopConfig(keep_every=-1)
    with pytest.raises(ConfigError, match="phase warm: 0 steps"):
        Phase(name="warm", steps=0, step_fn=step_fn, make_batches=lambda: make_batches(0))
    with pytest.raises(ConfigError, match="phases: none given"):
        train([], make_state(), checkpoints=None, log=None, progress=None, config=LoopConfig())


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    output = io.StringIO()
    run(tmp_path, console=Console(file=output, width=40), log_every=1)
    text = output.getvalue()
    assert not any(ord(character) < 32 and character != "\n" for character in text)
    lines = text.splitlines()
    assert lines[0] == "phase0 | step 0/12 | compiling"
    assert "phase1 | step 7/12 | compiling" in lines
    assert lines[1].startswith("phase0 | step 1/12 | loss - | - tokens/s | left: phase -, run -")
    assert lines[-1].startswith("phase1 | step 12/12 | loss ")
    assert lines[-1].endswith("left: phase 0:00:00, run 0:00:00")


def test_numbers_and_time_left():
    output = io.StringIO()
    progress = TrainingProgress(Console(file=output), every=0.0)
    progress.begin(2000)
    progress.phase("main", 0, 1000)
    progress.report(loss=2.34567, tokens_per_second=12345.6, seconds_per_step=0.5)
    progress.advance(100)
    assert output.getvalue() == (
        "main | step 100/2,000 | loss 2.3457 | 12,346 tokens/s | left: phase 0:07:30, run 0:15:50\n"
    )


def test_a_live_bar_in_a_terminal(tmp_path):
    output = io.StringIO()
    run(tmp_path, console=Console(file=output, force_terminal=True, width=120))
    assert "\x1b[" in output.getvalue()
    assert "phase1 | step 12/12 | loss " in output.getvalue()


def sigkill_often(directory: Path, kills: int, steps: int) -> None:
    """Kills the program below again and again, then compares it with a run left alone."""
    chance = random.Random(kills)
    reference = start(directory / "reference", steps)
    victim = directory / "victim"
    for kill in range(kills):
        process = start(victim, steps)
        moment = (before_a_checkpoint, while_saving, anywhere)[kill % 3]
        moment(process, victim, chance)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"
    last = start(victim, steps)
    for process in (last, reference):
        process.join()
        assert process.exitcode == 0

    order = dict(documents(directory / "reference"))
    assert sorted(order) == list(range(1, steps + 1))
    seen = documents(victim)
    assert {step for step, _ in seen} == set(order)
    assert all(order[step] == batch for step, batch in seen)
    ends = [Checkpoints(path / "checkpoints") for path in (directory / "reference", victim)]
    assert [end.latest() for end in ends] == [steps, steps]
    states = [raw(end.restore(steps, make_state())) for end in ends]
    assert states[0] == states[1]
    lines = [
        [row | {"tokens_per_second": None} for row in read_rows(path / "metrics.jsonl")]
        for path in (directory / "reference", victim)
    ]
    assert lines[0] == lines[1]


def start(directory: Path, steps: int) -> multiprocessing.Process:
    """Starts the program in a process that has its imports behind it, but nothing else."""
    directory.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tensorboardX"])
    process = context.Process(target=program, args=(directory, steps), daemon=True)
    process.start()
    return process


def before_a_checkpoint(process, directory, chance):
    time.sleep(chance.uniform(0.0, 0.5))


def while_saving(process, directory, chance):
    for _ in range(chance.randint(1, 3)):
        wait_until(process, lambda: not list(directory.glob("checkpoints/*tmp*")))
        wait_until(process, lambda: list(directory.glob("checkpoints/*tmp*")))
    time.sleep(chance.uniform(0.0, 0.03))


def anywhere(process, directory, chance):
    before = len(documents(directory))
    wait_until(process, lambda: len(documents(directory)) > before)
    time.sleep(chance.uniform(0.0, 0.3))


def wait_until(process, condition):
    while not condition() and process.is_alive():
        time.sleep(0.001)


def documents(directory: Path) -> list[tuple[int, str]]:
    path = directory / "documents.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


@pytest.fixture
def importable(monkeypatch):
    """Lets the fork server find this file and the library."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parents[1])]))


def test_a_run_killed_three_times_ends_bitwise_equal(tmp_path, importable):
    sigkill_often(tmp_path, kills=3, steps=40)


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_bitwise_equal(tmp_path, importable):
    sigkill_often(tmp_path, kills=20, steps=400)


def program(directory: Path, steps: int) -> None:
    """Trains with a save at every second step and writes down which documents each step saw."""
    record = os.open(directory / "documents.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def wrap(step_fn):
        def wrapped(state, batch):
            digest = hashlib.sha256(batch["tokens"].tobytes()).hexdigest()
            os.write(record, f"{int(state.step) + 1} {digest}\n".encode())
            return step_fn(state, batch)

        return wrapped

    phases = make_phases((steps // 3, steps - steps // 3), wrap)
    run(directory, phases, checkpoint_every=2, log_every=3)
