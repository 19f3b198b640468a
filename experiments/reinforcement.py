"""Asynchronous reinforcement learning on generated repair tasks, for studies to build on.

A study has weights and a tokenizer and gives them here with a config; it gets curves, scores on
held-out tasks, and pages on which every token of some groups can be looked at. The same call goes
on where it was interrupted.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from c2 import models
from c2.agent.chat import Tokenizer
from c2.config import ConfigError, runtime
from c2.data import tokenizer as tokenizers
from c2.data.files import atomic
from c2.evals.sampling import best_of_k
from c2.models import ModelConfig, Params
from c2.records import Group, Rollout
from c2.rl import credit
from c2.rl.calls import use_threads
from c2.rl.controller import Controller, ControllerConfig
from c2.rl.environments import EnvironmentConfig, Environments
from c2.rl.evaluation import Evaluation, EvaluationConfig
from c2.rl.inference import Inference
from c2.rl.inspection import Inspection
from c2.rl.journal import Journal
from c2.rl.monitor import group_metrics
from c2.rl.training import INSPECTED, Training, TrainingConfig
from c2.rollout.config import EngineConfig
from c2.rollout.follow import subscribe
from c2.sandbox.pool.pool import Pool
from c2.sandbox.protocol import SandboxError, Spec
from c2.training.checkpoint import Checkpoints
from c2.training.metrics import MetricsLog
from c2.weights import serving
from c2.weights.store import open_store
from experiments.repair_tasks import Prompts, TasksConfig, held_out
from experiments.study import Run
from experiments.viewer import View, write

Scores = dict[str, dict[str, list[float]]]
"""By split and task, as `c2.rl.evaluation.Evaluation.evaluate` gives them."""


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """A run of reinforcement learning.

    Attributes:
      controller: what runs when.
      training: how the trainer learns.
      engine: how inference samples.
      environments: what agents find.
      tasks: what they work on.
      samples: rollouts of each held-out task in an evaluation.
      rewards: "true", or "shuffled" over the rollouts of a step: a control from which nothing can
        be learned but what any rewards teach.
      seed: of the rollouts.
    """

    controller: ControllerConfig
    training: TrainingConfig
    engine: EngineConfig
    environments: EnvironmentConfig
    tasks: TasksConfig = field(default_factory=TasksConfig)
    samples: int = 8
    rewards: Literal["true", "shuffled"] = "true"
    seed: int = 0
    eval_slots: int = runtime(32)

    def __post_init__(self):
        warmup, steps = self.training.learning_rate.warmup_steps, self.controller.schedule.steps
        if warmup >= steps:
            raise ConfigError(
                f"training.learning_rate.warmup_steps: {warmup}; legal: below "
                f"controller.schedule.steps = {steps}"
            )
        if self.samples < 1:
            raise ConfigError(f"samples: {self.samples}; legal: at least 1")


def assign(groups: Sequence[Group], config: RLConfig) -> credit.Credit:
    """What a step learns from."""
    shape = config.controller.schedule
    if config.rewards == "shuffled":
        groups = shuffled(groups, seed=config.seed)
    return credit.assign(groups, config.training.objective, rollouts=shape.groups * shape.group)


def shuffled(groups: Sequence[Group], *, seed: int) -> list[Group]:
    """The same groups with rewards permuted over all rollouts that have one."""
    kept = [r for group in groups for r in group.rollouts if not r.failed]
    names = "/".join(group.task for group in groups)
    rewards = [rollout.reward for rollout in kept]
    random.Random(f"{seed}/{names}").shuffle(rewards)
    given = iter(rewards)
    return [
        replace(
            group,
            rollouts=tuple(
                r if r.failed else replace(r, reward=next(given)) for r in group.rollouts
            ),
        )
        for group in groups
    ]


def train(
    config: RLConfig,
    model: ModelConfig,
    params: Params,
    tokenizer: Path,
    folder: Path,
    run: Run,
) -> dict[int, Scores]:
    """Trains, or goes on.

    Args:
      config: how.
      model: model configuration.
      params: to begin with.
      tokenizer: the policy's `tokenizer.json`.
      folder: for journal, checkpoints, weights, metrics and pages.
      run: where services are started and progress is told.

    Returns:
      Scores by version.
    """
    folder, tokenizer = folder.absolute(), tokenizer.absolute()  # services may be anywhere
    start, store = folder / "start", str(folder / "weights")
    with_params = Checkpoints(start)
    if with_params.latest() is None:
        with_params.save(0, {"params": params})
    with_params.close()
    shape = config.controller.schedule
    make_tokenizer = partial(tokenizers.load, tokenizer)
    prompts = Prompts(config.tasks, shape.steps, shape.groups)
    evaluation = evaluation_config(config)
    with Journal(folder / "journal") as journal, MetricsLog(folder) as log:
        log.rewind(len(journal.batches))
        observer = Observer(config, journal, log, prompts, run)
        controller = Controller(
            config.controller,
            launcher := run.services(),
            journal,
            training=partial(
                Training, config.training, model, steps=shape.steps, start=str(start),
                workdir=str(folder), store=store,
            ),
            inference=partial(Inference, model, config.engine, store),
            environments=lambda inference: partial(
                Environments, config.environments, make_tokenizer, inference, seed=config.seed,
                folder=str(folder / "rollouts"),
            ),
            evaluation=partial(
                Evaluation, evaluation, config.environments, make_tokenizer, model, config.engine,
                store=store, folder=str(folder / "pinned"),
            ),
            prompt=prompts,
            credit=partial(assign, config=config),
            observe=observer,
        )  # fmt: skip

        async def play() -> None:
            use_threads()
            try:
                await controller.run()
            finally:
                await launcher.close()

        asyncio.run(play())
        write_pages(folder, journal, make_tokenizer())
        return dict(journal.evaluations)


def evaluate(
    config: RLConfig,
    model: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    tokenizer: Path,
    folder: Path,
    run: Run,
) -> Scores:
    """Scores given weights as evaluations of a run would, or finds the scores in the folder.

    Args:
      config: of the run.
      model: model configuration.
      tensors: weights as they are published, see `published` and `serving_form`.
      tokenizer: the policy's `tokenizer.json`.
      folder: where the scores are kept.
      run: where services are started.
    """
    folder, tokenizer = folder.absolute(), tokenizer.absolute()  # services may be anywhere
    path = folder / "scores.json"
    if path.exists():
        return json.loads(path.read_text())

    async def play() -> Scores:
        use_threads()
        launcher = run.services()
        make = partial(
            Evaluation, evaluation_config(config), config.environments,
            partial(tokenizers.load, tokenizer), model, config.engine,
            store=str(folder / "none"), folder=str(folder / "pinned"),
        )  # fmt: skip
        try:
            service = await launcher.start("evaluation", make)
            await service.call("keep", tensors, 0)
            return await service.call("evaluate", 0)
        finally:
            await launcher.close()

    found = asyncio.run(play())
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(found))
    return found


def try_sandboxes(config: EnvironmentConfig) -> None:
    """Starts a sandbox and ends it: better now than after hours of other work.

    Raises:
      ConfigError: if there can be none on this machine.
    """
    try:
        pool = Pool(config.pool)
        try:
            pool.close(pool.create(Spec(resources=config.resources)))
        finally:
            pool.shutdown()
    except SandboxError as error:
        raise ConfigError(
            f"pool.backend: {config.pool.backend!r} does not work here: {error}; legal: one that "
            "does"
        ) from error


def evaluation_config(config: RLConfig) -> EvaluationConfig:
    """What an evaluation measures."""
    return EvaluationConfig(
        tasks=held_out(config.tasks), samples=config.samples, slots=config.eval_slots
    )


def published(model: ModelConfig, folder: Path) -> Mapping[str, np.ndarray]:
    """The newest weights that a run has published."""
    subscriber = subscribe(open_store(str(folder / "weights")), model)
    subscriber.poll()
    return subscriber.current.tensors


def serving_form(model: ModelConfig, params: Params) -> Mapping[str, np.ndarray]:
    """Parameters as they would be published."""
    experts = serving.experts_for(model.moe.precision) if model.moe else "native"
    form = serving.make_serving_form(models.spec(model), model.dtype, experts)
    return jax.tree.map(np.asarray, form(params))


def write_pages(folder: Path, journal: Journal, tokenizer: Tokenizer) -> None:
    """Writes the viewer's page with the groups of all steps that were inspected."""
    views = []
    for path in sorted((folder / INSPECTED).glob("*.safetensors")):
        step, seen = int(path.stem), Inspection(path)
        for index in sorted(journal.batches[step]):
            group = Group(
                task=journal.prompts[index], rollouts=tuple(journal.rollouts(index).values())
            )
            known = {
                (i, j): seen.of(link)
                for i, rollout in enumerate(group.rollouts)
                for j, link in enumerate(rollout.generations)
            }
            trainer = {at: found for at, found in known.items() if found}
            views.append(View(step=step, group=group, trainer=trainer))
    write(folder / "trajectories.html", views, tokenizer.decode, title="Rollouts, group by group")


class Observer:
    """Turns the controller's news into metrics, lines for a person, and memory of tasks."""

    def __init__(
        self, config: RLConfig, journal: Journal, log: MetricsLog, prompts: Prompts, run: Run
    ) -> None:
        self._steps = config.controller.schedule.steps
        self._journal, self._log, self._prompts, self._run = journal, log, prompts, run
        self._engine: dict[str, float] = {}
        self._since, self._tokens, self._rollouts = time.monotonic(), 0, 0

    def __call__(self, kind: str, event: Mapping[str, Any]) -> None:
        """As `c2.rl.controller.Observe`."""
        match kind:
            case "rollout":
                rollout: Rollout = event["rollout"]
                self._tokens += rollout.sampled_tokens
                self._rollouts += 1
                self._prompts.note(self._journal.prompts[event["job"].group], rollout)
            case "weights":
                self._engine = {f"engine/{name}": value for name, value in event.items()}
            case "step":
                self._step(event)
            case "evaluation":
                parts = (f"{part} {text}" for part, text in told(event["found"]).items())
                self._say(f"version {event['version']} | {', '.join(parts)}")
            case "death":
                self._say(f"{event['reason']}; starting it again")

    def _step(self, event: Mapping[str, Any]) -> None:
        step, journal = event["step"], self._journal
        groups = [
            Group(task=journal.prompts[i], rollouts=tuple(journal.rollouts(i).values()))
            for i in journal.batches[step]
        ]
        seen = group_metrics(groups)
        seconds = time.monotonic() - self._since
        speeds = {
            "seconds": seconds,
            "rollouts_per_second": self._rollouts / seconds,
            "tokens_per_second": self._tokens / seconds,
        }
        self._since, self._tokens, self._rollouts = time.monotonic(), 0, 0
        oldest = min((r.oldest_version for g in groups for r in g.rollouts), default=step)
        line = {**seen, **event, **self._engine, **speeds, "staleness": step - oldest}
        self._log.write(step + 1, {name: x for name, x in line.items() if name != "step"})
        self._say(
            f"step {step + 1} of {self._steps} | reward {seen['reward']:.3f} | pass "
            f"{seen['correct']:.3f} | best of group {seen['best_of_group']:.3f} | entropy "
            f"{event.get('entropy', float('nan')):.3f} | mismatch "
            f"{event.get('mismatch', float('nan')):.1e} | staleness {step - oldest} | "
            f"{speeds['rollouts_per_second']:.1f} rollouts/s"
        )

    def _say(self, text: str) -> None:
        self._run.console.print(text, markup=False, highlight=False, soft_wrap=True)


def told(found: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, str]:
    """Scores of an evaluation in words, by split."""
    return {
        part: f"pass {scores['pass@1']:.3f} best {scores['best']:.3f}"
        for part, scores in ((part, score(tasks)) for part, tasks in found.items())
    }


def score(tasks: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean over tasks of a split: ``pass@1``, and ``best`` of as many as there are samples.

    Rollouts that the infrastructure has failed are left out.
    """
    kept = [np.array([x for x in scores if x == x]) for scores in tasks.values()]
    kept = [scores for scores in kept if len(scores)]
    if not kept:
        return {"pass@1": math.nan, "best": math.nan}
    return {
        "pass@1": float(np.mean([scores.mean() for scores in kept])),
        "best": float(np.mean([best_of_k(scores, len(scores)) for scores in kept])),
    }
