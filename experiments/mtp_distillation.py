"""Does a prediction module draft well sooner if it is distilled than if it learns from the text?

The report trains its multi-token-prediction layers from scratch by self-distillation to the exact
distribution of the main head (section 3.1); DeepSeek-V3 trained its own on the tokens of the text.
Here a small model learns real code, is frozen, and modules are trained beside it by
KL(model || module), by cross-entropy on the text ("hard labels") and by KL(module || model). They
are judged by how often the model would accept their drafts of a package that is not trained on.

    python -m launch.main --config=experiments/mtp_distillation.py --workdir=runs/mtp_distillation

Expect, after 150 steps, 76 % of the drafts accepted with KL(model || module), 63 % with hard labels
and 73 % with KL(module || model), and after 300 steps 82, 66 and 80 %: distillation is where hard
labels end before a third of their steps. Sampling and verifying drafts gives the same shares within
1 %, and output with the model's distribution. About 4 minutes on 2 cores.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from c2.config import ConfigError, located
from c2.data.config import DataConfig, Source
from c2.data.packing import pack
from c2.data.pipeline import batches
from c2.data.prepare import Prepared, prepare
from c2.data.tokenizer import check_vocab
from c2.evals.acceptance import acceptance_rate
from c2.evals.codebase_nll import stream
from c2.models import MLAConfig, ModelConfig, MoEConfig, init, presets, spec
from c2.models.speculative import tokens_per_step
from c2.parallel import mesh as meshes
from c2.training import optimizer as optimizers
from c2.training.loop import StepFn
from c2.training.objective import MTPConfig
from c2.training.optimizer import OptimizerConfig, ScheduleConfig, schedule
from c2.training.pretrain import acceptance_fn
from c2.training.state import TrainState, init_state
from c2.training.step import make_train_step
from experiments import plotting
from experiments.speculative_check import Check, verify_drafts
from experiments.study import Claim, Figure, Result, Run, new_figure

VARIANTS = ("full", "smoke")

FORWARD, LABELS, REVERSE = "forward_kl", "hard_labels", "reverse_kl"
NAMES = {
    FORWARD: "KL(model || module)",
    LABELS: "hard labels",
    REVERSE: "KL(module || model)",
}
COLORS = {FORWARD: plotting.BLUE, LABELS: plotting.VERMILION, REVERSE: plotting.GREEN}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the study.

    Attributes:
      model: with one prediction module.
      data: corpus and held-out package.
      optimizer: its settings.
      learning_rate: of the model over its steps, and again of each module over its own.
      context: tokens per row.
      batch: rows per step.
      main_steps: of the model, before it is frozen.
      module_steps: of each module.
      bias_update_rate: of the routers' selection biases.
      seeds: modules per loss; those of one seed share initial values and the order of the data.
      compare_at: step of the modules at which the losses are compared.
      evaluate_at: further steps at which acceptance is measured.
      repeats: times that every token of the held-out package is drafted and verified.
      contexts: held-out contexts in which the distribution of the output is tested.
      samples: tokens drawn in each of them.
    """

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: ScheduleConfig
    context: int = 128
    batch: int = 8
    main_steps: int
    module_steps: int
    bias_update_rate: float = 3e-3
    seeds: int
    compare_at: int
    evaluate_at: tuple[int, ...] = ()
    repeats: int = 4
    contexts: int = 16
    samples: int = 10_000

    def __post_init__(self):
        if self.model.mtp != 1:
            raise ConfigError(f"model.mtp: {self.model.mtp} is not legal; legal: 1")
        for key in ("batch", "main_steps", "seeds", "repeats", "contexts", "samples"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}: {getattr(self, key)} is not legal; legal: 1 or more")
        if self.context < 3:
            raise ConfigError(f"context: {self.context} is not legal; legal: 3 or more")
        for step in (self.compare_at, *self.evaluate_at):
            if not 0 < step < self.module_steps:
                key = "compare_at" if step == self.compare_at else "evaluate_at"
                legal = f"1 to {self.module_steps - 1}, below module_steps"
                raise ConfigError(f"{key}: {step} is not legal; legal: {legal}")

    @property
    def steps(self) -> list[int]:
        """All steps of a module at which acceptance is measured."""
        return sorted({0, self.compare_at, *self.evaluate_at, self.module_steps})


def full() -> Config:
    """A model of half a million parameters; three modules for each of three losses."""
    return Config(
        model=replace(
            presets.get("tiny_mla_moe"),
            vocab=1024,
            hidden=64,
            layers=3,
            dense_intermediate=192,
            attention=MLAConfig(heads=4, q_lora=32, kv_lora=32, nope=16, rope=8, v=16),
            moe=MoEConfig(experts=8, top_k=2, intermediate=64),
            mtp=1,
        ),
        data=DataConfig(held_out="json", vocab_size=1024),
        learning_rate=ScheduleConfig(peak=3e-3, warmup_steps=20),
        main_steps=400,
        module_steps=300,
        seeds=3,
        compare_at=150,
        evaluate_at=(50, 100, 200),
    )


def smoke() -> Config:
    """Everything once with a model of one dense layer, which compiles fast: for tests."""
    config = full()
    return replace(
        config,
        model=replace(
            config.model,
            vocab=512,
            hidden=16,
            layers=1,
            dense_intermediate=32,
            attention=MLAConfig(heads=2, q_lora=8, kv_lora=8, nope=4, rope=4, v=4),
            moe=None,
        ),
        data=DataConfig(sources=(Source(path="stdlib:email"),), held_out="json", vocab_size=512),
        learning_rate=ScheduleConfig(peak=1e-2, warmup_steps=5),
        context=64,
        main_steps=100,
        module_steps=40,
        seeds=2,
        compare_at=20,
        evaluate_at=(),
        contexts=4,
    )


def get_config(variant: str = VARIANTS[0]) -> Config:
    """The configuration of a variant."""
    return {"full": full, "smoke": smoke}[variant]()


class Values(NamedTuple):
    """What was measured: acceptance by loss, [seed, step], and one module of each verified."""

    acceptance: dict[str, np.ndarray]
    checks: dict[str, Check]


def measure(config: Config, run: Run) -> Values:
    """Trains the model, then all modules."""
    with located("config.data"):
        data = prepare(config.data, run.workdir / "data")
    with located("config.model"):
        check_vocab(data.tokenizer, config.model.vocab)
    mesh = meshes.data_mesh(math.gcd(config.batch, jax.device_count()))
    train = partial(_train, config, data, mesh)
    optimizer = _optimizer(config)
    say = partial(run.console.print, markup=False, highlight=False, soft_wrap=True)

    start = jax.jit(lambda key: init_state(key, config.model, optimizer))(jax.random.key(0))
    start = meshes.replicate(start, mesh)
    step_fn = _step(config, optimizer, mesh, None)
    for step, model, loss in train(step_fn, start, 0, config.main_steps):  # noqa: B007
        if step % 50 == 0 or step == config.main_steps:
            say(f"model, step {step}/{config.main_steps}: loss {float(loss):.2f}")

    acceptance, checks = {}, {}
    for name in NAMES:
        step_fn = _step(config, optimizer, mesh, MTPConfig(loss=name))
        acceptance[name] = np.zeros((config.seeds, len(config.steps)))
        for seed in range(config.seeds):
            fresh = _with_new_module(model, jax.random.key(seed + 1), config.model)
            rates = [_acceptance(config, data, fresh)]
            for step, trained, _ in train(step_fn, fresh, seed + 1, config.module_steps):
                if step in config.steps:
                    rates.append(_acceptance(config, data, trained))
            acceptance[name][seed] = rates
            shown = ", ".join(f"{rate:.3f}" for rate in rates)
            say(f"{NAMES[name]}, seed {seed}: acceptance {shown}")
        checks[name] = _check(config, data, trained)
    return Values(acceptance, checks)


def _optimizer(config: Config) -> optax.GradientTransformation:
    table = spec(config.model)
    main, mtp = (
        partial(optimizers.make, config.optimizer, schedule([(config.learning_rate, steps)]))
        for steps in (config.main_steps, config.module_steps)
    )
    return optimizers.by_part(main=main(table.replace(mtp=())), mtp=mtp(table.mtp))


def _step(
    config: Config,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    module: MTPConfig | None,
) -> StepFn:
    rate = config.bias_update_rate
    return make_train_step(config.model, optimizer, mesh, bias_update_rate=rate, module=module)


@partial(jax.jit, static_argnames="cfg")
def _with_new_module(state: TrainState, key: jax.Array, cfg: ModelConfig) -> TrainState:
    """A copy of the state, since steps donate theirs; the module's moments in it are still zero."""
    state = jax.tree.map(jnp.copy, state)
    return state.replace(params=state.params.replace(mtp=init(key, cfg).mtp))


def _train(
    config: Config,
    data: Prepared,
    mesh: Mesh,
    step_fn: StepFn,
    state: TrainState,
    seed: int,
    steps: int,
) -> Iterator[tuple[int, TrainState, jax.Array]]:
    """Yields the number of each step, its state, which lasts until the next one, and its loss."""
    with located("config"):
        rows = pack(data.documents, config.context)
        dataset = batches(rows, batch=config.batch, seed=seed, weights=data.weights)
    for step, batch in zip(range(1, steps + 1), dataset, strict=False):
        state, metrics = step_fn(state, meshes.place(batch, mesh))
        yield step, state, metrics["loss"]


def _acceptance(config: Config, data: Prepared, state: TrainState) -> float:
    accept = acceptance_fn(state.params, config.model)
    return acceptance_rate(data.corpus.held_out, data.tokenizer, accept, window=config.context)


def _check(config: Config, data: Prepared, state: TrainState) -> Check:
    tokens = stream(data.corpus.held_out, data.tokenizer)
    tokens = tokens[: len(tokens) // config.context * config.context]
    return verify_drafts(
        state.params,
        config.model,
        tokens.reshape(-1, config.context),
        repeats=config.repeats,
        contexts=config.contexts,
        samples=config.samples,
    )


def steps_to_reach(steps: list[int], rates: np.ndarray, target: float) -> float:
    """The step at which a curve reaches a rate, interpolated; inf if it never does."""
    at = np.flatnonzero(rates >= target)
    if not len(at):
        return math.inf
    if at[0] == 0:
        return steps[0]
    after, before = at[0], at[0] - 1
    share = (target - rates[before]) / (rates[after] - rates[before])
    return steps[before] + share * (steps[after] - steps[before])


def judge(config: Config, values: Values) -> list[Claim]:
    """The report's choice, and that the numbers can be trusted."""
    sampled = partial(Claim, seeds=config.seeds)
    rates, checks = values.acceptance, values.checks.values()
    middle = config.steps.index(config.compare_at)
    lead = (rates[FORWARD] - rates[LABELS])[:, middle]
    end = (rates[FORWARD] - rates[LABELS])[:, -1]
    share = [
        steps_to_reach(config.steps, forward, labels[-1]) / config.module_steps
        for forward, labels in zip(rates[FORWARD], rates[LABELS], strict=True)
    ]
    return [
        sampled(
            statement=f"At step {config.compare_at} the distilled module is ahead of hard labels in"
            " every seed (smallest lead in acceptance)",
            measured=lead.min(),
            bound=0.0,
            relation=">",
            note=f"mean lead {lead.mean():.3f}; at the end {end.mean():.3f}",
        ),
        sampled(
            statement="Distillation gets to where hard labels end in clearly fewer steps"
            " (largest share of their steps)",
            measured=max(share),
            bound=0.8,
            relation="<=",
            note=f"mean {np.mean(share):.2f}",
        ),
        sampled(
            statement="Distillation makes drafts acceptable (smallest gain in acceptance)",
            measured=(rates[FORWARD][:, -1] - rates[FORWARD][:, 0]).min(),
            bound=0.2,
            relation=">=",
        ),
        Claim(
            statement="Sampled drafts are accepted as often as sum min(p, q) says (largest relative"
            " error)",
            measured=max(abs(check.sampled / check.analytic - 1) for check in checks),
            bound=0.01,
            relation="<=",
            seeds=len(checks),
        ),
        Claim(
            statement="Speculative output has the model's distribution (chi-square, standard"
            " deviations above its mean, largest)",
            measured=max(check.output for check in checks),
            bound=4,
            relation="<=",
            seeds=len(checks),
            note=f"the drafts themselves: at least {min(check.drafts for check in checks):,.0f}",
        ),
    ]


def draw(config: Config, run: Run, values: Values) -> Figure:
    """Acceptance over steps, and the lead of distillation."""
    figure, (left, right) = new_figure(1, 2, width=4.8, height=3.8)
    for loss, rates in values.acceptance.items():
        for rate in rates:
            left.plot(config.steps, rate, color=COLORS[loss], linewidth=0.8, alpha=0.5)
        left.plot(config.steps, rates.mean(0), color=COLORS[loss], label=NAMES[loss])
    left.set(xlabel="step of the module", ylabel="accepted drafts")
    left.set_ylim(bottom=0)
    left.legend(loc="lower right")
    left.set_title("Acceptance on held-out code")
    for loss in (FORWARD, REVERSE):
        lead = values.acceptance[loss] - values.acceptance[LABELS]
        for one in lead:
            right.plot(config.steps, one, color=COLORS[loss], linewidth=0.8, alpha=0.5)
        right.plot(config.steps, lead.mean(0), "o-", color=COLORS[loss])
    right.axhline(0, color=COLORS[LABELS], linewidth=1.2)
    right.axvline(config.compare_at, color=plotting.GREY, linewidth=0.8, linestyle=":")
    right.set(xlabel="step of the module", ylabel="difference in acceptance")
    right.set_title("Lead over hard labels")
    return run.save_figure(
        figure,
        "acceptance",
        caption="Share of drafts for the held-out package that the frozen model accepts at"
        f" temperature 1, by the module's loss; thin lines are {config.seeds} seeds, thick lines"
        " their mean. Right: the difference to hard labels of the same seed.",
    )


def table(config: Config, values: Values) -> list[dict[str, Any]]:
    """Mean and range of the acceptance by loss."""
    return [
        {"loss": NAMES[loss]}
        | {
            f"step {step}": f"{rate.mean():.3f} ({rate.min():.3f} to {rate.max():.3f})"
            for step, rate in zip(config.steps, rates.T, strict=True)
        }
        | {"tokens per step": round(float(tokens_per_step(rates[:, -1].mean())), 2)}
        for loss, rates in values.acceptance.items()
    ]


def run(config: Config, run: Run) -> Result:
    """Measures, judges and draws."""
    values = measure(config, run)
    with plotting.style():
        figure = draw(config, run, values)
    checks = [
        {
            "loss": NAMES[loss],
            "acceptance, sum min(p, q)": check.analytic,
            "acceptance, sampled": check.sampled,
        }
        for loss, check in values.checks.items()
    ]
    return Result(
        summary=summary(config, values),
        claims=judge(config, values),
        figures=[figure],
        tables={
            "Acceptance, mean and range over seeds": table(config, values),
            "Drafts sampled and verified": checks,
        },
        metrics={
            f"acceptance/{loss}": float(rates[:, -1].mean())
            for loss, rates in values.acceptance.items()
        },
    )


def summary(config: Config, values: Values) -> str:
    """The findings in words, and what they cannot say."""
    middle = config.steps.index(config.compare_at)
    at, last = (
        {loss: rates[:, i].mean() for loss, rates in values.acceptance.items()}
        for i in (middle, -1)
    )
    return f"""\
After {config.compare_at} steps the model accepts {at[FORWARD]:.3f} of the distilled module's
drafts, {at[LABELS]:.3f} with hard labels and {at[REVERSE]:.3f} with the divergence reversed; after
{config.module_steps} steps {last[FORWARD]:.3f}, {last[LABELS]:.3f} and {last[REVERSE]:.3f}.

**Limits.** One small model, trained for minutes: its distribution is broad, so there is more to
learn from it than a hard label says, and less to gain for a good model that is nearly always sure.
"""
