"""What does the Composer 2 recipe do, stage by stage, to a Kimi-K2.5-style model?

Continued pretraining on real code in phases that share one state (report section 2): short context,
then a multi-token-prediction module distilled from the frozen model, then longer context with YaRN
and supervised fine-tuning, both with the module trained jointly. The measures are the negative
log-likelihood of a package that is never trained on, and how often the model would accept the
module's drafts of it.

In variant `agent` the model then becomes one (`experiments.post_training`): fine-tuning on
demonstrations, and asynchronous reinforcement learning on repair tasks in sandboxes, against a
control with shuffled rewards and one that spends the same compute on more demonstrations.

    python -m launch.main --config=experiments/recipe.py:mini --workdir=runs/demo

`mini` does all of it with 1.3 million parameters in about half an hour on 2 cores. `smoke` runs
every stage once in three to four minutes, most of it compilation, and learns next to nothing.
`pretraining` stops before the agent, with 2.2 million parameters (1.3 million active per token):
expect the held-out package to fall from 3.8 to about 2.0 bits per byte, on a nearly straight line
over the logarithm of the tokens, in about 8 minutes on 2 cores. `small` is the whole for hours.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from c2.config import ConfigError, located, runtime
from c2.data.config import MIN_VOCAB, DataConfig, Source
from c2.data.prepare import Prepared, prepare
from c2.data.tokenizer import check_vocab
from c2.evals.acceptance import acceptance_rate
from c2.evals.codebase_nll import codebase_nll
from c2.models import ModelConfig, YarnConfig, count, presets
from c2.parallel.mesh import MeshConfig
from c2.parallel.processes import first_before_others
from c2.training.checkpoint import Checkpoints
from c2.training.loop import LoopConfig, train
from c2.training.metrics import MetricsLog
from c2.training.objective import MTPConfig
from c2.training.optimizer import OptimizerConfig, ScheduleConfig
from c2.training.pretrain import (
    PhaseConfig,
    acceptance_fn,
    choose_mesh,
    log_prob_fn,
    make_optimizer,
    make_phases,
    phase_model,
)
from c2.training.progress import TrainingProgress
from c2.training.sharding import place_state
from c2.training.state import TrainState, init_state
from experiments import (
    mtp_report,
    post_training_configs,
    post_training_report,
    pretraining_report,
    reinforcement,
)
from experiments.demonstrations import write_packages
from experiments.post_training import PostTrainingConfig, post_train
from experiments.pretraining_report import HELD_OUT
from experiments.study import Result, Run, joined

VARIANTS = ("mini", "smoke", "pretraining", "small")
MULTI_PROCESS = True


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How the held-out package is scored.

    Attributes:
      windows: context lengths in tokens. The first is scored at every evaluation and gives the
        curve; all are scored before the first and after every phase.
      stride: tokens by which a window moves, as a share of the window; each token is scored once,
        with at least (1 - stride) windows of context where there is any.
      batch: windows at a time.
    """

    windows: tuple[int, ...]
    stride: float = 0.5
    batch: int = runtime(8)

    def __post_init__(self):
        if not self.windows or min(self.windows) < 2:
            raise ConfigError(f"windows: {self.windows} is not legal; legal: lengths of 2 or more")
        if not 0 < self.stride < 1:
            raise ConfigError(f"stride: {self.stride} is not legal; legal: above 0, below 1")
        if self.batch < 1:
            raise ConfigError(f"batch: {self.batch} is not legal; legal: 1 or more")


@dataclass(frozen=True, kw_only=True)
class PackagesConfig:
    """Generated packages in the corpus, like those that the agent is going to repair.

    Attributes:
      count: packages.
      weight: their share of the training tokens, relative to the weights of the other sources.
    """

    count: int
    weight: float = 0.25

    def __post_init__(self):
        if self.count < 1:
            raise ConfigError(f"count: {self.count} is not legal; legal: 1 or more")
        Source(path="packages", weight=self.weight)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole recipe.

    Attributes:
      seed: of initial values and of the order of the data.
      model: architecture; `vocab` must hold the tokenizer.
      data: corpus, held-out package, tokenizer.
      packages: generated ones that join the corpus, or none.
      optimizer: its settings, shared by all phases.
      phases: in order; parameters, moments and step count carry over.
      mesh: how steps are spread over devices.
      bias_update_rate: step of the routers' selection biases towards equal expert load.
      evaluation: of the held-out package.
      loop: reporting and saving.
      post_training: what follows, or none.
    """

    seed: int = 0
    model: ModelConfig
    data: DataConfig
    packages: PackagesConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    phases: tuple[PhaseConfig, ...]
    mesh: MeshConfig = field(default_factory=MeshConfig)
    bias_update_rate: float = 1e-3
    evaluation: EvaluationConfig
    loop: LoopConfig = field(default_factory=LoopConfig)
    post_training: PostTrainingConfig | None = None

    def __post_init__(self):
        names = [phase.name for phase in self.phases]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"phases: names {names} must be distinct, and at least one")
        if self.data.tokenizer is None and self.data.vocab_size > self.model.vocab:
            raise ConfigError(
                f"data.vocab_size: {self.data.vocab_size} exceeds model.vocab; legal: {MIN_VOCAB} "
                f"to {self.model.vocab}"
            )
        if self.bias_update_rate < 0:
            raise ConfigError(
                f"bias_update_rate: {self.bias_update_rate} is not legal; legal: 0 or more"
            )
        if self.model.mtp != 1 and any(phase.mtp is not None for phase in self.phases):
            raise ConfigError(
                f"model.mtp: {self.model.mtp}, but a phase trains a module (phases.*.mtp); legal: 1"
            )


def pretraining() -> Config:
    """Less than ten minutes on two CPU cores, without an agent."""
    jointly = MTPConfig(joint_weight=0.1, into_trunk=True)
    return Config(
        model=replace(presets.get("tiny_mla_moe"), mtp=1),
        data=DataConfig(held_out="json", vocab_size=2048),
        phases=(
            PhaseConfig(
                name="main",
                steps=560,
                context=256,
                batch=8,
                learning_rate=ScheduleConfig(peak=3e-3, warmup_steps=40, final=0.1),
            ),
            PhaseConfig(
                name="mtp",
                steps=80,
                context=256,
                batch=8,
                learning_rate=ScheduleConfig(peak=3e-3, warmup_steps=10, final=0.2),
                mtp=MTPConfig(),
            ),
            PhaseConfig(
                name="long",
                steps=40,
                context=1024,
                batch=4,
                learning_rate=ScheduleConfig(peak=6e-4, decay="linear", final=0.5),
                yarn=YarnConfig(factor=4.0, original_context=256),
                mtp=jointly,
            ),
            PhaseConfig(
                name="fine_tuning",
                steps=40,
                context=512,
                batch=8,
                learning_rate=ScheduleConfig(peak=3e-4, decay="linear", final=0.1),
                data="fine_tuning",
                yarn=YarnConfig(factor=4.0, original_context=256),
                mtp=jointly,
            ),
        ),
        bias_update_rate=3e-3,
        evaluation=EvaluationConfig(windows=(256, 1024)),
        loop=LoopConfig(log_every=10, eval_every=40, checkpoint_every=100),
    )


def mini() -> Config:
    """Half an hour on two CPU cores: a smaller model, less pretraining, then post-training.

    A few words and one function a file are all that the agent ever sees, so half of the corpus are
    packages like those, and a small vocabulary gets along with it.
    """
    config = pretraining()
    model = replace(config.model, vocab=1024, moe=replace(config.model.moe, intermediate=64))
    steps = {"main": 240, "mtp": 24, "long": 12}
    return replace(
        config,
        model=model,
        data=replace(config.data, vocab_size=model.vocab),
        packages=PackagesConfig(count=9000, weight=2.0),
        optimizer=OptimizerConfig(name="muon"),
        phases=tuple(
            replace(phase, steps=steps[phase.name], batch=2 * phase.batch)
            for phase in config.phases
            if phase.name in steps
        ),
        post_training=post_training_configs.mini(),
    )


def small() -> Config:
    """Hours: ten times the steps of `pretraining`, then longer post-training."""
    phases = pretraining().phases
    return replace(
        mini(),
        model=pretraining().model,
        data=pretraining().data,
        phases=tuple(replace(phase, steps=10 * phase.steps) for phase in phases),
        loop=LoopConfig(log_every=10, eval_every=400, checkpoint_every=200),
        post_training=post_training_configs.small(),
    )


def smoke() -> Config:
    """Every stage once, as fast as possible: for tests, and for trying a change."""
    config = mini()
    steps = {"main": 12, "mtp": 4, "long": 4, "fine_tuning": 4}
    phases = [
        replace(
            phase,
            steps=steps[phase.name],
            batch=2,
            context=phase.context // 4,
            learning_rate=replace(phase.learning_rate, warmup_steps=0),
            yarn=phase.yarn and replace(phase.yarn, original_context=64),
        )
        for phase in pretraining().phases
    ]
    return replace(
        config,
        model=replace(config.model, vocab=512, hidden=32, layers=2, dense_intermediate=64),
        data=DataConfig(sources=config.data.sources, held_out="json", vocab_size=512),
        packages=PackagesConfig(count=300),
        phases=tuple(phases),
        evaluation=EvaluationConfig(windows=(64, 256), stride=0.75),
        loop=LoopConfig(log_every=2, eval_every=6, checkpoint_every=6),
        post_training=post_training_configs.smoke(),
    )


def get_config(variant: str = "mini") -> Config:
    """The configuration of a variant."""
    return {"mini": mini, "smoke": smoke, "pretraining": pretraining, "small": small}[variant]()


def run(config: Config, run: Run) -> Result:
    """Trains through all phases, then draws and judges what the metrics say."""
    if config.post_training is not None and jax.process_count() > 1:
        raise ConfigError(
            "config.post_training: it begins on one process, and its services start others; legal "
            "with --processes: none"
        )
    if config.post_training is not None:
        environments = config.post_training.reinforcement.environments
        with located("config.post_training.reinforcement.environments"):
            reinforcement.try_sandboxes(environments)
    with located("config.data"):
        data = prepare(corpus_config(config, run), run.workdir / "data")
    with located("config.model"):
        check_vocab(data.tokenizer, config.model.vocab)
    with located("config"):
        mesh = choose_mesh(config.phases, config.mesh)
    optimizer = make_optimizer(config.optimizer, config.phases, config.model)
    with located("config"):
        phases = make_phases(
            config.phases,
            config.model,
            data.of,
            optimizer,
            mesh,
            seed=config.seed,
            bias_update_rate=config.bias_update_rate,
            evaluate=lambda model: held_out_evaluation(config, data, model),
            layout=config.mesh,
        )
    _announce(config, data, mesh.size, run)
    key = jax.random.key(config.seed)
    state = init_state(key, config.model, optimizer)
    state = place_state(state, config.model, optimizer, mesh, config.mesh)
    loop = config.loop
    with (
        Checkpoints(
            run.workdir / "checkpoints", keep=loop.keep, keep_every=loop.keep_every
        ) as checkpoints,
        MetricsLog(run.workdir, mute=jax.process_index() > 0) as log,
    ):
        progress = TrainingProgress(run.console)
        state = train(
            phases, state, checkpoints=checkpoints, log=log, progress=progress, config=loop
        )
    if jax.process_index() > 0:
        return Result(summary="Process 0 reports.")
    result = pretraining_report.summarise(config, data, run)
    if (after := config.post_training) is None:
        return result
    model = replace(phase_model(config.model, config.phases[-1]), mtp=0)
    params, folder = state.params.replace(mtp=()), run.workdir / "agent"
    words = run.workdir / "data" / "tokenizer.json"
    scores = post_train(after, model, params, words, folder, run)
    return joined(post_training_report.summarise(after, scores, folder, run), result)


def corpus_config(config: Config, run: Run) -> DataConfig:
    """The corpus with the generated packages, which are written where they are looked for."""
    if config.packages is None:
        return config.data
    path = run.workdir / "data" / "packages.zip"
    with first_before_others("packages"):
        if not path.exists():
            write_packages(path, config.packages.count)
    source = Source(path=str(path), weight=config.packages.weight, license="Apache-2.0")
    return replace(config.data, sources=(*config.data.sources, source))


def held_out_evaluation(
    config: Config, data: Prepared, model: ModelConfig
) -> Callable[[TrainState], dict[str, float]]:
    """The evaluation of a phase that runs ``model``: state -> metrics of the held-out package."""
    borders = {0, *np.cumsum([phase.steps for phase in config.phases])}
    drafts_from = mtp_report.first_step(config)

    def evaluate(state: TrainState) -> dict[str, float]:
        windows = config.evaluation.windows
        step = int(state.step)
        if step not in borders:
            windows = windows[:1]
        found = {}
        for window in windows:
            score = codebase_nll(
                data.corpus.held_out,
                data.tokenizer,
                log_prob_fn(state.params, model),
                window=window,
                stride=max(1, int(window * config.evaluation.stride)),
                batch_size=config.evaluation.batch,
            )
            prefix = HELD_OUT.format(window=window)
            found[prefix + "nats"] = score.nats
            found[prefix + "nats_per_token"] = score.nats_per_token
            found[prefix + "bits_per_byte"] = score.bits_per_byte
        if drafts_from is not None and step >= drafts_from:
            found[mtp_report.ACCEPTANCE] = acceptance_rate(
                data.corpus.held_out,
                data.tokenizer,
                acceptance_fn(state.params, model),
                window=windows[0],
                batch_size=config.evaluation.batch,
            )
        return found

    return evaluate


def _announce(config: Config, data: Prepared, devices: int, run: Run) -> None:
    size = count(config.model)
    module = f"and {size.mtp:,} in the prediction module, " if config.model.mtp else ""
    run.console.print(
        f"model    {size.total:,} parameters, {module}{size.active:,} active per token; "
        f"{devices} device{'s' if devices > 1 else ''}\n"
        f"data     {len(data.corpus.documents):,} documents, "
        f"{len(data.documents.tokens):,} tokens; held out: {config.data.held_out}, "
        f"{len(data.corpus.held_out)} files",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
