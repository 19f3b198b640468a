"""Does training with NVFP4 and MXFP8 experts track training in bf16?

The report computes the products of its experts in NVFP4 in the forward and in MXFP8 in the backward
pass (section 6.1) and everything else in bf16. Here the recipe's small model learns real code three
times per seed: with bf16 experts, with MXFP8 in both passes, and with the report's combination.
Initial values and the order of the data are the same; operands are really quantised, from bf16, by
the rules of `pallas_kernels`.

    python -m launch.main --config=experiments/low_precision.py --workdir=runs/low_precision

Expect the three to end within half a percent of each other in every seed, after 280 steps at 4.53
to 4.59 nats per token, and a step in NVFP4 to take little more CPU time than one in bf16. About 25
minutes on 2 cores; an interrupted study continues with the next model.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from c2.config import ConfigError, located
from c2.data.config import DataConfig, Source
from c2.data.prepare import Prepared, prepare
from c2.data.tokenizer import check_vocab
from c2.evals.codebase_nll import codebase_nll
from c2.models import ModelConfig, presets
from c2.parallel import mesh as meshes
from c2.training.loop import Phase
from c2.training.optimizer import OptimizerConfig, ScheduleConfig
from c2.training.pretrain import PhaseConfig, choose_mesh, log_prob_fn, make_optimizer, make_phases
from c2.training.state import TrainState, init_state
from experiments import plotting
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("full", "smoke")

BF16, MXFP8, NVFP4 = "native", "mxfp8", "nvfp4_fwd_mxfp8_bwd"
NAMES = {BF16: "bf16", MXFP8: "MXFP8", NVFP4: "NVFP4 forward, MXFP8 backward"}
COLORS = {BF16: plotting.GREY, MXFP8: plotting.BLUE, NVFP4: plotting.VERMILION}
TOLERANCE = 0.02  # of the final held-out loss


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      model: with a mixture of experts; its precision is set by the study.
      data: corpus and held-out package.
      optimizer: its settings.
      training: the one phase that every model learns in.
      bias_update_rate: of the routers' selection biases.
      seeds: models per precision.
      evaluations: of the held-out package during training, evenly spaced, the last at the end.
      stride: of the evaluation, as a share of the context.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: PhaseConfig
    bias_update_rate: float = 3e-3
    seeds: int = 3
    evaluations: int = 4
    stride: float = 0.5

    def __post_init__(self):
        if self.model.moe is None:
            raise ConfigError("model.moe: none is not legal; legal: a mixture of experts")
        if self.seeds < 1:
            raise ConfigError(f"seeds: {self.seeds} is not legal; legal: 1 or more")
        if not 1 <= self.evaluations <= self.training.steps:
            raise ConfigError(
                f"evaluations: {self.evaluations} is not legal; legal: 1 to training.steps = "
                f"{self.training.steps}"
            )
        if not 0 < self.stride < 1:
            raise ConfigError(f"stride: {self.stride} is not legal; legal: above 0, below 1")

    @property
    def evaluate_at(self) -> list[int]:
        """Steps at which the held-out package is scored."""
        shares = range(1, self.evaluations + 1)
        return [self.training.steps * share // self.evaluations for share in shares]

    def model_in(self, precision: str) -> ModelConfig:
        """The model with its experts in this precision."""
        return replace(self.model, moe=replace(self.model.moe, precision=precision))


def full() -> Config:
    """The recipe's model, with AdamW, on the standard library alone."""
    return Config(
        model=replace(presets.get("tiny_mla_moe"), dtype="bfloat16"),
        data=DataConfig(held_out="json", vocab_size=2048),
        training=PhaseConfig(
            name="main",
            steps=280,
            context=256,
            batch=8,
            learning_rate=ScheduleConfig(peak=3e-3, warmup_steps=40, final=0.1),
        ),
    )


def smoke() -> Config:
    """Everything once with a model that compiles fast: for tests."""
    config = full()
    model = config.model
    return replace(
        config,
        model=replace(
            model,
            vocab=512,
            hidden=32,
            layers=1,
            dense_layers=0,
            attention=replace(model.attention, heads=2, q_lora=16, kv_lora=16, nope=8, rope=8, v=8),
            moe=replace(model.moe, experts=4, intermediate=32),
        ),
        data=DataConfig(sources=(Source(path="stdlib:email"),), held_out="json", vocab_size=512),
        training=replace(
            config.training,
            steps=30,
            context=64,
            learning_rate=ScheduleConfig(peak=1e-2, warmup_steps=5),
        ),
        seeds=2,
        evaluations=2,
        stride=0.75,
    )


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The configuration of a variant."""
    return {"full": full, "smoke": smoke}[variant]()


class Curve(NamedTuple):
    """One model's training: held-out nats per token at every evaluation, training loss per step.

    ``seconds`` are CPU seconds of a step, the median: others' load on the machine hardly counts.
    """

    held_out: list[float]
    loss: list[float]
    seconds: float


def measure(config: Config, run: Run) -> dict[str, list[Curve]]:
    """Trains all models; those that the workdir already holds are read."""
    with located("config.data"):
        data = prepare(config.data, run.workdir / "data")
    with located("config.model"):
        check_vocab(data.tokenizer, config.model.vocab)
    mesh = choose_mesh([config.training])
    curves = {precision: [] for precision in NAMES}
    for seed in range(config.seeds):
        for precision, found in curves.items():
            path = run.workdir / "curves" / f"{precision}_{seed}.json"
            if not path.exists():
                curve = _train(config, data, mesh, precision, seed)
                path.parent.mkdir(exist_ok=True)
                draft = path.with_suffix(".part")
                draft.write_text(json.dumps(curve._asdict()))
                draft.replace(path)  # whole or not at all: an interrupted study continues here
            found.append(Curve(**json.loads(path.read_text())))
            run.console.print(
                f"{NAMES[precision]}, seed {seed}: held out "
                f"{', '.join(f'{nats:.3f}' for nats in found[-1].held_out)} nats per token, "
                f"{found[-1].seconds:.2f} CPU seconds per step",
                highlight=False,
                soft_wrap=True,
            )
    return curves


def _train(config: Config, data: Prepared, mesh: Mesh, precision: str, seed: int) -> Curve:
    held_out, losses, seconds = [], [], []
    began = time.process_time()
    for step, loss, evaluate in _steps(config, data, mesh, precision, seed):
        losses.append(float(loss))
        seconds.append(time.process_time() - began)
        if step in config.evaluate_at:
            held_out.append(evaluate())
        began = time.process_time()
    return Curve(held_out, losses, float(np.median(seconds)))


def _steps(
    config: Config, data: Prepared, mesh: Mesh, precision: str, seed: int
) -> Iterator[tuple[int, jax.Array, Any]]:
    """Yields the number of every step, its loss and a function that scores the held-out package."""
    model = config.model_in(precision)
    optimizer = make_optimizer(config.optimizer, [config.training], model)

    def evaluation(model: ModelConfig):
        def evaluate(state: TrainState) -> dict[str, float]:
            window = config.training.context
            score = codebase_nll(
                data.corpus.held_out,
                data.tokenizer,
                log_prob_fn(state.params, model),
                window=window,
                stride=max(1, int(window * config.stride)),
            )
            return {"nats_per_token": score.nats_per_token}

        return evaluate

    phase: Phase
    with located("config"):
        (phase,) = make_phases(
            [config.training],
            model,
            data.of,
            optimizer,
            mesh,
            seed=seed,
            bias_update_rate=config.bias_update_rate,
            evaluate=evaluation,
        )
    start = jax.jit(lambda key: init_state(key, model, optimizer))(jax.random.key(seed))
    state = meshes.replicate(start, mesh)
    for step, batch in zip(range(1, phase.steps + 1), phase.make_batches(), strict=False):
        state, metrics = phase.step_fn(state, batch)
        yield step, metrics["loss"], lambda: phase.evaluate(state)["nats_per_token"]  # noqa: B023


def final(curves: dict[str, list[Curve]], precision: str) -> np.ndarray:
    """Held-out nats per token at the end, [seed]."""
    return np.array([curve.held_out[-1] for curve in curves[precision]])


def judge(config: Config, curves: dict[str, list[Curve]]) -> list[Claim]:
    """Whether the loss stays, and what it costs on a CPU."""
    reference = final(curves, BF16)
    claims = []
    for precision in (MXFP8, NVFP4):
        gaps = final(curves, precision) / reference - 1
        claims.append(
            Claim(
                statement=f"{NAMES[precision]}: the final held-out loss is that of bf16 within 2 %"
                " (largest difference over seeds)",
                measured=np.abs(gaps).max(),
                bound=TOLERANCE,
                relation="<=",
                seeds=config.seeds,
                note=f"mean {gaps.mean():+.4f}, from {gaps.min():+.4f} to {gaps.max():+.4f}; seeds"
                f" of bf16 spread by {reference.max() / reference.min() - 1:.4f}",
            )
        )
    seconds = {p: np.median([curve.seconds for curve in curves[p]]) for p in (BF16, NVFP4)}
    claims.append(
        Claim(
            statement=f"{NAMES[NVFP4]}: a step takes at most three times the CPU seconds of bf16",
            measured=seconds[NVFP4] / seconds[BF16],
            bound=3.0,
            relation="<=",
            seeds=config.seeds,
            note=f"{seconds[NVFP4]:.2f} against {seconds[BF16]:.2f} seconds",
        )
    )
    return claims


def draw(config: Config, run: Run, curves: dict[str, list[Curve]]) -> Figure:
    """Held-out loss over steps, and its difference to bf16."""
    figure, (left, right) = new_figure(1, 2, width=4.8, height=3.8)
    steps = config.evaluate_at
    for precision, found in curves.items():
        losses = np.array([curve.held_out for curve in found])
        color, name = COLORS[precision], NAMES[precision]
        for one in losses:
            left.plot(steps, one, color=color, linewidth=0.8, alpha=0.5)
        left.plot(steps, losses.mean(0), "o-", color=color, label=name)
        if precision == BF16:
            reference = losses
            continue
        gaps = 100 * (losses / reference - 1)
        for one in gaps:
            right.plot(steps, one, color=color, linewidth=0.8, alpha=0.5)
        right.plot(steps, gaps.mean(0), "o-", color=color, label=name)
    left.set(xlabel="step", ylabel="nats per token")
    left.set_title("Held-out code")
    left.legend()
    percent = 100 * TOLERANCE
    right.axhspan(-percent, percent, color=plotting.SHADE, zorder=0)
    right.axhline(0, color=COLORS[BF16], linewidth=1.2)
    right.set(xlabel="step", ylabel="difference to bf16, %")
    limit = max(percent, *np.abs(right.get_ylim())) * 1.1
    right.set_ylim(-limit, limit)
    right.set_title("Difference to bf16 of the same seed")
    return run.save_figure(
        figure,
        "held_out",
        caption="Loss on the held-out package by the precision of the experts' products; thin lines"
        f" are {config.seeds} seeds, thick lines their mean. Right: the difference to bf16 with the"
        f" same initial values and data; the band is the claim's {percent:.0f} %.",
    )


def table(config: Config, curves: dict[str, list[Curve]]) -> list[dict[str, Any]]:
    """Mean and range of the held-out loss, and the time of a step."""

    def over_seeds(values):
        return f"{np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"

    return [
        {"experts": NAMES[precision]}
        | {
            f"step {step}": over_seeds([curve.held_out[i] for curve in found])
            for i, step in enumerate(config.evaluate_at)
        }
        | {"CPU seconds per step": round(np.median([curve.seconds for curve in found]), 3)}
        for precision, found in curves.items()
    ]


def run(config: Config, run: Run) -> Result:
    """Measures, judges and draws."""
    curves = measure(config, run)
    with plotting.style():
        figure = draw(config, run, curves)
    means = {precision: final(curves, precision).mean() for precision in NAMES}
    largest = max(math.log(means[p] / means[BF16]) for p in (MXFP8, NVFP4))
    return Result(
        summary=f"""\
After {config.training.steps} steps the held-out loss is {means[BF16]:.4f} nats per token with bf16
experts, {means[MXFP8]:.4f} in MXFP8 and {means[NVFP4]:.4f} in NVFP4 with an MXFP8 backward pass:
at most {100 * largest:+.2f} %.

**Limits.** Minutes of training of two million parameters. Whether errors add up over trillions of
tokens, and whether reinforcement learning stays stable, which is what the report's choice of scales
is about, does not show at this size; nor does speed, since a CPU has no such arithmetic.
""",
        claims=judge(config, curves),
        figures=[figure],
        tables={"Held-out nats per token, mean and range over seeds": table(config, curves)},
        metrics={f"held_out/{precision}": float(mean) for precision, mean in means.items()},
    )
